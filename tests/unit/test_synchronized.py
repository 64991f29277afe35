"""`synchronized`: functions and methods under a lock whose name is made of their arguments."""

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, assert_type

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import (
    Coordination,
    Lock,
    LockLostError,
    LockReentrantError,
    LockTimeoutError,
    synchronized,
)
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.testing import held_elsewhere


@pytest.fixture
def micro() -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://")])


def locked(name: str) -> bool:
    return Lock(name).from_thread.locked()


@synchronized("cart:{cart_id}", timeout=0)
def checkout(cart_id: int, *, gift: bool = False) -> str:
    """Check a cart out."""
    return f"{cart_id} {gift} {locked(f'cart:{cart_id}')}"


@synchronized("cart:{cart_id}", timeout=0)
async def checkout_async(cart_id: int, *, gift: bool = False) -> str:
    return f"{cart_id} {gift} {await Lock(f'cart:{cart_id}').locked()}"


def test_plain_function(micro: Grelmicro) -> None:
    with micro:
        assert assert_type(checkout(7), str) == "7 False True"
        assert checkout(cart_id=8, gift=True) == "8 True True"
        assert not locked("cart:7")
        with held_elsewhere(micro, "cart:7"):
            assert checkout(8) == "8 False True"
            with pytest.raises(LockTimeoutError, match="'cart:7'"):
                checkout(7)


async def test_async_function(micro: Grelmicro) -> None:
    async with micro:
        assert assert_type(await checkout_async(7), str) == "7 False True"
        async with held_elsewhere(micro, "cart:7"):
            assert await checkout_async(8, gift=True) == "8 True True"
            with pytest.raises(LockTimeoutError, match="'cart:7'"):
                await checkout_async(7)
        assert not await Lock("cart:7").locked()


def test_one_at_a_time(micro: Grelmicro) -> None:
    inside: list[int] = []
    most: list[int] = []

    @synchronized("stock", timeout=None)
    def sell(number: int) -> None:
        inside.append(number)
        most.append(len(inside))
        inside.remove(number)

    with micro, ThreadPoolExecutor(8) as pool:
        for sold in [pool.submit(sell, number) for number in range(100)]:
            sold.result(60)
    assert most == [1] * 100


def test_it_stays_what_it_was() -> None:
    assert checkout.__name__ == "checkout"
    assert checkout.__doc__ == "Check a cart out."
    assert list(inspect.signature(checkout).parameters) == ["cart_id", "gift"]
    assert not inspect.iscoroutinefunction(checkout)
    assert inspect.iscoroutinefunction(checkout_async)


def test_errors_and_wrong_arguments_are_those_of_the_function(micro: Grelmicro) -> None:
    @synchronized("cart:{cart_id}", timeout=0)
    def fail(cart_id: int) -> None:
        raise ZeroDivisionError

    wrong: Callable[..., Any] = fail
    with micro:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                fail(7)
        with pytest.raises(TypeError, match="cart_id"):
            wrong()


@dataclass
class Cart:
    id: int

    @synchronized("cart:{self.id}", timeout=0)
    def close(self, note: str = "") -> bool:
        return locked(f"cart:{self.id}")

    @classmethod
    @synchronized("carts of {shop}", timeout=0)
    def open(cls, shop: str = "main") -> Self:
        assert locked(f"carts of {shop}")
        return cls(1)

    @staticmethod
    @synchronized("count", timeout=0)
    def count() -> bool:
        return locked("count")


def test_methods(micro: Grelmicro) -> None:
    with micro:
        assert assert_type(Cart(7).close("note"), bool)
        assert assert_type(Cart.open(), Cart) == Cart(1)
        assert Cart.open(shop="other") == Cart(1)
        assert Cart.count()
        with held_elsewhere(micro, "carts of main"), pytest.raises(LockTimeoutError):
            Cart.open()


def test_names_are_made_as_everywhere_else(micro: Grelmicro) -> None:
    seen: list[str] = []

    @synchronized("move:{source}:{order.id}", timeout=0)
    def move(source: str, order: Cart) -> None:
        seen.append(source)

    with micro, held_elsewhere(micro, "move:a%3A1:2"):
        with pytest.raises(LockTimeoutError):
            move("a:1", Cart(2))
        move("a", Cart(2))
    assert seen == ["a"]


def test_arguments_that_have_no_parameter_of_their_own(micro: Grelmicro) -> None:
    @synchronized("cart:{cart_id}", timeout=0)
    def tidy(*args: object, **options: object) -> bool:
        return locked(f"cart:{options['cart_id']}")

    with micro:
        assert tidy(1, 2, cart_id=7)
        with pytest.raises(SettingsValidationError, match=r"the field \{cart_id\}, but '.*tidy' was called without it"):
            tidy()


def test_partial_and_decorated_functions(micro: Grelmicro) -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return called

    def ship(order: int, by: str) -> bool:
        return locked(f"{order} by {by}")

    async def ship_async(order: int) -> bool:
        return await Lock(f"order:{order}").locked()

    with micro:
        assert synchronized("{order} by {by}", timeout=0)(functools.partial(ship, by="air"))(7)
        assert synchronized("{order} by {by}", timeout=0)(functools.lru_cache(ship))(7, by="sea")

    async def main() -> None:
        async with micro:
            guarded = synchronized("order:{order}", timeout=0)(logged(ship_async))
            assert inspect.iscoroutinefunction(guarded)
            assert await guarded(7)

    asyncio.run(main())


def no_field(shop: int) -> None: ...


def positional(*carts: int) -> None: ...


@pytest.mark.parametrize(
    ("template", "function", "told"),
    [
        ("cart:{cart_id}", no_field, r"the field \{cart_id\}, but 'no_field' has no such parameter: it has shop"),
        ("cart:{cart_id.id}", no_field, "no such parameter"),
        ("cart:{carts}", positional, "no such parameter: it has none"),
        ("cart:{", no_field, "each { has its }"),
        ("{shop}", no_field, "needs text beside its fields"),
    ],
)
def test_a_name_that_cannot_be_made_is_refused_at_declaration(
    template: str, function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(SettingsValidationError, match=told):
        synchronized(template)(function)


@pytest.mark.parametrize("settings", [{"timeout": -1}, {"lease_duration": 0}, {"max_hold": "long"}])
def test_bad_settings_are_refused_at_declaration(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsValidationError):
        synchronized("cart", **settings)


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


class Task:
    """As a task queue makes it of a function."""

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (generator, "'generator' is a generator: synchronized"),
        (async_generator, "'async_generator' is a generator: synchronized"),
        (functools.partial(generator), "'generator' is a generator"),
        (Cart, "'Cart' is a class: .* of a class decorate its methods"),
        (Task(), "not Task: write it directly above the function"),
        (Cart.__dict__["open"], "is above @classmethod of 'Cart.open': write it below @classmethod"),
        (Cart.__dict__["count"], "is above @staticmethod of 'Cart.count': write it below @staticmethod"),
        ("cart", "not str"),
    ],
)
def test_what_is_over_before_its_work_is_done_is_refused_at_declaration(function: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        synchronized("cart")(function)


async def work() -> None: ...


@pytest.mark.parametrize("made", [work, generator, async_generator])
def test_what_shows_only_when_it_is_called_is_refused_then(micro: Grelmicro, made: Callable[[], Any]) -> None:
    @synchronized("cart", timeout=0)
    def hand_on() -> Any:
        return made()

    with micro:
        for _ in range(2):
            with pytest.raises(
                TypeError, match="'.*hand_on' is no coroutine function and returned a .*, which would run"
            ):
                hand_on()


async def test_a_function_that_waits_for_itself(micro: Grelmicro, caplog: pytest.LogCaptureFixture) -> None:
    @synchronized("cart", timeout=0.05)
    async def call(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await function()

    @synchronized("stock", timeout=None)
    async def recurse() -> None:
        await recurse()

    async with micro:
        with pytest.raises(LockTimeoutError):
            await call(lambda: call(recurse))
        assert "'cart' is waited for by the task, thread or request that holds it" in caplog.text
        with pytest.raises(LockReentrantError):
            await recurse()


def test_without_an_app(micro: Grelmicro) -> None:
    with pytest.raises(OutOfContextError, match="Lock 'cart:7': no app is open"):
        checkout(7)


async def test_plain_function_on_the_event_loop(micro: Grelmicro) -> None:
    async with micro:
        with pytest.raises(OutOfContextError, match="used on the event loop that has to serve"):
            checkout(7)
        assert (await asyncio.to_thread(checkout, 7)).endswith("True")


async def test_backend_of_its_own(micro: Grelmicro) -> None:
    other = Grelmicro(uses=[Coordination.from_url("memory://")])

    @synchronized("cart", timeout=0, backend=micro.coordination.lock_backend)
    async def use() -> None: ...

    async with micro, other:
        async with held_elsewhere(other, "cart"):
            await use()
        async with held_elsewhere(micro, "cart"):
            with pytest.raises(LockTimeoutError):
                await use()


async def test_a_loss_cancels_an_async_function(micro: Grelmicro) -> None:
    @synchronized("cart", max_hold=0.1)
    async def hang() -> None:
        await asyncio.sleep(60)

    async with micro:
        with pytest.raises(LockLostError, match="max_hold"):
            await hang()


def test_a_loss_shows_at_the_end_of_a_plain_function(micro: Grelmicro) -> None:
    over = threading.Event()

    @synchronized("cart", max_hold=0.05)
    def linger() -> None:
        with pytest.raises(TimeoutError), held_elsewhere(micro, "cart", timeout=0.001):
            pass
        with held_elsewhere(micro, "cart", timeout=30):
            over.set()

    with micro, pytest.raises(LockLostError):
        linger()
    assert over.is_set()


async def test_a_lease_is_renewed(micro: Grelmicro) -> None:
    @synchronized("cart", lease_duration=0.2)
    async def outlast() -> bool:
        await asyncio.sleep(0.5)
        return await Lock("cart").locked()

    async with micro:
        assert await outlast()


async def test_cancelled_it_gives_back(micro: Grelmicro) -> None:
    entered = asyncio.Event()

    @synchronized("cart")
    async def hang() -> None:
        entered.set()
        await asyncio.sleep(60)

    async with micro:
        work: Coroutine[Any, Any, None] = hang()
        task = asyncio.create_task(work)
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await Lock("cart").locked()


def test_settings_come_from_the_environment(micro: Grelmicro, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LOCK_CART_LEASE_DURATION", "7")

    @synchronized("cart:{cart_id}")
    def remaining(cart_id: int) -> float:
        async def read() -> float:
            record = await micro.coordination.lock_backend.read(f"lock:cart:{cart_id}")
            return 0.0 if record is None else record.remaining

        return asyncio.run_coroutine_threadsafe(read(), micro.get_loop()).result(30)

    with micro:
        assert 0 < remaining(7) <= 7
