"""Which app's store a lock uses: that of its context, else the only one open around it, and never another silently."""

import asyncio
import gc
import logging
import threading
from contextvars import Context

import pytest

from grelmicro import Grelmicro
from grelmicro.context import open_apps
from grelmicro.coordination import Coordination, Lock, TaskLock
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.providers.memory import MemoryProvider

pytestmark = pytest.mark.usefixtures("nothing_left")

NO_APP = (
    "Lock 'cart': no app is open: open one around this code with `async with Grelmicro(uses=[Coordination(...)])` "
    "(`with` in a script), or pass backend=; a web application is opened by install(app, micro) of its integration; "
    "in a test use `with TestClient(app)`, or, around an httpx.AsyncClient, "
    "`async with app.router.lifespan_context(app)`"
)
SEVERAL = (
    "Lock 'cart': 2 apps are open, and none of them is bound to this context: "
    "pass backend=, or build it from its app: app.coordination.lock(...)"
)
CLOSED = (
    "Lock 'cart': the app of this context is not open, and another one is never used in its place: keep it open "
    "around this code; servers of web applications run the lifespan of the root app alone, so open it there; "
    "in a test use `with TestClient(app)`, or, around an httpx.AsyncClient, "
    "`async with app.router.lifespan_context(app)`"
)
ELSEWHERE = (
    "Lock 'cart': the app that is open serves another event loop than the running one: "
    "use it on the loop that opened it, through `from_thread` in a thread, or through a lock's `from_loop` "
    "in a coroutine"
)
MOVED = (
    "Lock 'cart' was used with another app that is still open: "
    "build one for each app, with app.coordination.lock(...) or backend="
)


def new_app() -> Grelmicro:
    return Grelmicro(uses=[Coordination(MemoryProvider())])


def unbound(lock: Lock) -> "asyncio.Task[None]":
    """Use `lock` in a context that no app is bound to, as a request handler of a server has it."""

    async def use() -> None:
        async with lock:
            pass

    return asyncio.get_running_loop().create_task(use(), context=Context())


async def refusal(lock: Lock) -> str:
    with pytest.raises(OutOfContextError) as caught:
        await unbound(lock)
    return str(caught.value)


async def test_the_app_of_the_context_serves() -> None:
    async with new_app() as micro, new_app() as inner:
        assert Lock("cart").backend is inner.coordination.lock_backend
        assert Context().run(lambda: [app for app in open_apps if app.is_open]) == [micro, inner]


async def test_tasks_and_threads_started_in_it_are_served_too() -> None:
    async with new_app() as micro, new_app():
        pass
    async with new_app(), micro:
        lock = Lock("cart")

        async def use() -> object:
            return lock.backend

        assert await asyncio.create_task(use()) is micro.coordination.lock_backend
        assert await asyncio.to_thread(lock._source.find, any_loop=True) is micro.coordination.lock_backend


async def test_without_one_the_only_app_on_the_loop_serves() -> None:
    async with new_app():
        await unbound(Lock("cart"))


async def test_without_any_the_error_says_how_to_open_one() -> None:
    assert await refusal(Lock("cart")) == NO_APP
    with pytest.raises(OutOfContextError) as caught:
        await Lock("cart").acquire()
    assert str(caught.value) == NO_APP


def test_outside_of_any_loop_the_error_is_the_same() -> None:
    with pytest.raises(OutOfContextError) as caught:
        _ = Lock("cart").backend
    assert str(caught.value) == NO_APP
    with pytest.raises(OutOfContextError) as caught:
        Lock("cart").from_thread.acquire()
    assert str(caught.value) == NO_APP


async def test_with_several_and_none_bound_it_is_an_error() -> None:
    async with new_app() as one, new_app():
        assert await refusal(Lock("cart")) == SEVERAL
        await unbound(one.coordination.lock("cart"))


async def test_a_closed_app_of_the_context_is_an_error_and_no_fallback() -> None:
    async with new_app():
        lock, closed = Lock("cart"), new_app()
        finished = asyncio.Event()

        async def later() -> None:
            await finished.wait()
            await lock.acquire()

        async with closed:
            task = asyncio.create_task(later())
        finished.set()
        with pytest.raises(OutOfContextError) as caught:
            await task
        assert str(caught.value) == CLOSED


async def test_an_app_on_another_loop_serves_threads_only() -> None:
    stop = threading.Event()
    opened = threading.Event()

    def other() -> None:
        with new_app():
            opened.set()
            stop.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    await asyncio.to_thread(opened.wait)
    try:
        assert await refusal(Lock("cart")) == ELSEWHERE

        def use() -> None:
            with Lock("cart").from_thread:
                pass

        await asyncio.to_thread(use)
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)


async def test_for_threads_several_in_the_process_are_an_error() -> None:
    async with new_app(), new_app():
        thread_errors: list[str] = []

        def use() -> None:
            try:
                Lock("cart").from_thread.acquire()
            except OutOfContextError as error:
                thread_errors.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert thread_errors == [SEVERAL]


async def test_a_lock_stays_with_its_app() -> None:
    lock = Lock("cart")
    async with new_app() as one:
        await lock.acquire()
        async with new_app():
            with pytest.raises(OutOfContextError) as caught:
                await lock.acquire()
            assert str(caught.value) == MOVED
        await lock.release()
        assert lock.backend is one.coordination.lock_backend


async def test_when_its_app_has_closed_it_moves_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    lock, first = Lock("cart"), new_app()
    async with first, lock:
        pass
    async with first, lock:
        pass
    assert caplog.text == ""
    async with new_app(), lock:
        pass
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "Lock 'cart' now uses another app than before, whose leases it knows nothing of"
    ]


async def test_a_lock_keeps_no_app_alive() -> None:
    lock = Lock("cart")
    async with new_app(), lock:
        pass
    gc.collect()
    assert lock._source._app is not None
    assert lock._source._app() is None


def test_an_app_that_a_finished_run_left_open_serves_nobody() -> None:
    left = new_app()
    asyncio.run(left.__aenter__())
    try:
        assert left.is_open
        with pytest.raises(OutOfContextError) as caught:
            Lock("cart").from_thread.acquire()
        assert str(caught.value) == NO_APP
        with new_app(), Lock("cart").from_thread:
            pass

        def elsewhere() -> None:
            with Lock("cart").from_thread:
                pass

        with new_app():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
    finally:
        left.abandon()


async def test_a_given_backend_is_used_whatever_is_open() -> None:
    provider = MemoryProvider()
    async with provider.lock() as backend, new_app(), new_app():
        lock = Lock("cart", backend=backend)
        assert lock.given_backend is backend
        await unbound(lock)
        assert Lock("cart").given_backend is None


async def test_an_app_without_locks_is_an_error_with_its_remedy() -> None:
    async with Grelmicro():
        with pytest.raises(OutOfContextError) as caught:
            await Lock("cart").acquire()
    assert str(caught.value) == (
        "this app has no coordination: add one, such as Grelmicro(uses=[Coordination.from_url('sqlite:///locks.db')])"
    )
    async with Grelmicro(uses=[Coordination(election=MemoryProvider())]):
        with pytest.raises(OutOfContextError) as caught:
            await Lock("cart").acquire()
    assert str(caught.value) == (
        "this Coordination has no lock backend: give it one with Coordination(lock=...), "
        "or a provider that serves everything with Coordination(provider)"
    )


async def test_locks_of_an_app_can_be_built_before_it_is_open() -> None:
    micro = new_app()
    lock, tasklock = micro.coordination.lock("cart"), micro.coordination.tasklock("report")
    with pytest.raises(OutOfContextError, match="LockAdapter is not open: use it inside `async with`"):
        await lock.acquire()
    async with micro, lock, tasklock:
        assert isinstance(tasklock, TaskLock)


@pytest.mark.parametrize("kind", [Lock, TaskLock])
def test_something_that_is_no_backend_is_refused(kind: type[Lock] | type[TaskLock]) -> None:
    for wrong in (MemoryProvider(), MemoryProvider().schedule(), 5):
        with pytest.raises(SettingsValidationError) as caught:
            kind("cart", backend=wrong)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"{kind.__name__} 'cart': backend should be a LockBackend, a Coordination or the name of one, "
            f"not {type(wrong).__name__}: "
            "of a provider, pass provider.lock() or provider.leaderelection()"
        )
