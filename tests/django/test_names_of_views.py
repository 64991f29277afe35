"""What the names of `@locked` are made of."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils.asyncio import async_unsafe
from django.utils.functional import SimpleLazyObject
from django.views import View

from grelmicro.errors import SettingsValidationError
from grelmicro_django import locked

Make = Callable[..., Callable[..., Any]]


def plain(name: str, **options: Any) -> Callable[..., Any]:
    @locked(name, **options)
    def view(request: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse(request.lock.name)

    return view


def coroutine(name: str, **options: Any) -> Callable[..., Any]:
    @locked(name, **options)
    async def view(request: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse(request.lock.name)

    return async_to_sync(view)


both = pytest.mark.parametrize("make", [plain, coroutine])


def a_request(**attributes: Any) -> Any:
    request: Any = RequestFactory().get("/?page=2", headers={"idempotency-key": "a b"})
    vars(request).update(attributes)
    return request


def name_of(view: Callable[..., Any], request: Any = None, **kwargs: Any) -> str:
    """The name of the lock under which a view runs."""
    return str(view(request or a_request(), **kwargs).content.decode())


@both
@pytest.mark.parametrize(
    ("name", "kwargs", "made"),
    [
        ("order:{pk}", {"pk": 42}, "order:42"),
        ("order:{pk}", {"pk": "042"}, "order:042"),
        ("order:{pk}", {"pk": UUID(int=7)}, f"order:{UUID(int=7)}"),
        ("{year}:{slug}", {"year": 2026, "slug": "a:b"}, "2026:a%3Ab"),
        ("order:{request.method}", {}, "order:GET"),
        ("order:{request.headers.idempotency_key}", {}, "order:a b"),
        ("page:{request.GET.page}", {}, "page:2"),
        ("all", {}, "all"),
    ],
)
def test_values_of_the_url_and_the_request(make: Make, name: str, kwargs: dict[str, Any], made: str) -> None:
    assert name_of(make(name), **kwargs) == made


@both
def test_values_that_functions_make(make: Make) -> None:
    def cart(request: Any, shop: int) -> tuple[str, int]:
        return request.method, shop

    view = make("cart:{method}:{shop}", method=lambda request, shop: cart(request, shop)[0])
    assert name_of(view, shop=3) == "cart:GET:3"


def test_a_value_of_an_async_view_may_be_awaited() -> None:
    async def cart(request: Any) -> int:
        await asyncio.sleep(0)
        return 5

    assert name_of(coroutine("cart:{cart}", cart=cart)) == "cart:5"
    with pytest.raises(TypeError, match="is not async, and a value of its lock's name is"):
        name_of(plain("cart:{cart}", cart=cart))


def user(pk: object) -> Any:
    return SimpleNamespace(pk=pk, is_authenticated=pk is not None)


class Session:
    def __init__(self, key: str | None) -> None:
        self.session_key = key

    def create(self) -> None:
        self.session_key = "new"


@both
def test_the_user(make: Make) -> None:
    view = make("user:{request.user.pk}")
    assert name_of(view, a_request(user=user(7))) == "user:7"
    with pytest.raises(PermissionDenied, match="not logged in: write @login_required"):
        name_of(view, a_request(user=user(None)))
    with pytest.raises(SettingsValidationError, match="AuthenticationMiddleware"):
        name_of(view)


@both
def test_an_anonymous_user(make: Make) -> None:
    shared = make("user:{request.user.pk}", anonymous="share")
    assert name_of(shared, a_request(user=user(None))) == "user:=none"
    assert name_of(shared, a_request(user=user(7))) == "user:7"
    own = make("user:{request.user.pk}", anonymous="session")
    assert name_of(own, a_request(user=user(7))) == "user:7"
    first, second = (name_of(own, a_request(user=user(None), session=Session(key))) for key in ("secret", None))
    assert first.startswith("user:session-")
    assert second.startswith("user:session-")
    assert first != second
    assert "secret" not in first
    assert first == name_of(own, a_request(user=user(None), session=Session("secret")))
    with pytest.raises(SettingsValidationError, match="SessionMiddleware"):
        name_of(own, a_request(user=user(None)))


def test_an_async_view_looks_its_user_up_in_a_thread() -> None:
    @async_unsafe("a query of the user")
    def query() -> Any:
        return user(7)

    request = a_request(user=SimpleLazyObject(query))
    assert name_of(coroutine("user:{request.user.pk}"), request) == "user:7"


def test_an_async_view_looks_its_user_up_as_its_middleware_does() -> None:
    def never() -> Any:
        raise AssertionError("it was looked up twice")

    async def auser() -> Any:
        return user(8)

    request = a_request(user=SimpleLazyObject(never), auser=auser)
    assert name_of(coroutine("user:{request.user.pk}"), request) == "user:8"


@both
@pytest.mark.parametrize("name", ["order:{request.headers.if_match}", "page:{request.GET.size}"])
def test_what_the_client_did_not_send_is_its_fault(make: Make, name: str) -> None:
    with pytest.raises(BadRequest, match="the request has no {request"):
        name_of(make(name))


@both
def test_an_argument_that_is_missing(make: Make) -> None:
    with pytest.raises(SettingsValidationError, match=r"'.*view' was called without it: it was called with .*shop"):
        name_of(make("order:{pk}"), shop=3)


class Shop(View):
    def get(self, request: Any, pk: int) -> HttpResponse:
        return HttpResponse(request.lock.name)


def test_as_view_takes_what_the_url_has() -> None:
    view = locked("order:{pk}")(Shop.as_view())
    assert name_of(view, pk=7) == "order:7"


def no_pk(request: Any) -> None: ...


written: Any = locked  # whatever its types say


@pytest.mark.parametrize(
    ("decorate", "text"),
    [
        (lambda: written("order:{pk}")(no_pk), "has the field {pk}, but 'no_pk' has no such parameter: it has request"),
        (lambda: written("order:{pk.}"), "no plain name"),
        (lambda: written("order", pk=str), "'pk' is neither a setting nor a field"),
        (lambda: written("order:{pk}", pk=7), "'pk' should be a function"),
        (lambda: written("order", until="later"), "until should be 'return' or 'closed'"),
        (lambda: written("order", anonymous="me"), "anonymous should be 'session', 'share' or None"),
        (lambda: written("order", on_busy="busy.html"), "on_busy should be a view, not str"),
        (lambda: written("order", timeout=-1), "timeout"),
        (lambda: written(no_pk), 'write @locked("order:{order_id}") with a name'),
    ],
)
def test_what_is_wrong_is_refused_where_it_is_written(decorate: Any, text: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        decorate()
    assert text in str(caught.value)


def test_what_cannot_be_guarded_is_refused() -> None:
    guard: Callable[[Any], Awaitable[None]] = locked("order")

    def generator() -> Any:
        yield 1

    with pytest.raises(TypeError, match=r"'Shop' is a class: write @method_decorator\(locked"):
        guard(Shop)
    with pytest.raises(TypeError, match="is a generator"):
        guard(generator)
    with pytest.raises(TypeError, match="write it below @staticmethod"):
        guard(staticmethod(no_pk))
