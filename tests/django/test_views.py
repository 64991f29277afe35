"""`@locked` on views, in one process."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from grelmicro.coordination import LockTimeoutError
from grelmicro_django import lock, locked


def is_free(name: str) -> bool:
    """Whether another thread can acquire a lock at once."""
    found: list[bool] = []

    def ask() -> None:
        try:
            with lock(name, timeout=0):
                found.append(True)
        except LockTimeoutError:
            found.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    return found[0]


def seen(request: HttpRequest, name: str) -> HttpResponse:
    """Whether the lock is free while the view runs."""
    return HttpResponse(f"{'free' if is_free(name) else 'held'}")


@locked("order:{pk}", timeout=0)
def plain(request: HttpRequest, pk: int) -> HttpResponse:
    return seen(request, f"order:{pk}")


@locked("order:{pk}", timeout=0)
async def coroutine(request: HttpRequest, pk: int) -> HttpResponse:
    await asyncio.sleep(0)
    return await asyncio.to_thread(seen, request, f"order:{pk}")


class Plain(View):
    def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        return seen(request, f"order:{pk}")


class Async(View):
    async def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        await asyncio.sleep(0)
        return await asyncio.to_thread(seen, request, f"order:{pk}")


class Dispatch(Plain):
    @locked("order:{pk}", timeout=0)
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return super().dispatch(request, *args, **kwargs)


class AsyncDispatch(Async):
    @locked("order:{pk}", timeout=0)
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return super().dispatch(request, *args, **kwargs)


@method_decorator(locked("order:{pk}", timeout=0), name="dispatch")
class Decorated(Plain):
    pass


@method_decorator(locked("order:{pk}", timeout=0), name="dispatch")
class AsyncDecorated(Async):
    pass


class Handler(View):
    @locked("order:{pk}", timeout=0)
    def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        return seen(request, f"order:{pk}")


class AsyncHandler(View):
    @locked("order:{pk}", timeout=0)
    async def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        await asyncio.sleep(0)
        return await asyncio.to_thread(seen, request, f"order:{pk}")


VIEWS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "coroutine": coroutine,
    "as_view": locked("order:{pk}", timeout=0)(Plain.as_view()),
    "async_as_view": locked("order:{pk}", timeout=0)(Async.as_view()),
    "dispatch": Dispatch.as_view(),
    "async_dispatch": AsyncDispatch.as_view(),
    "as_view_of_dispatch": locked("other:{pk}", timeout=0)(Dispatch.as_view()),
    "decorated": Decorated.as_view(),
    "async_decorated": AsyncDecorated.as_view(),
    "handler": Handler.as_view(),
    "async_handler": AsyncHandler.as_view(),
}


class Urls:
    urlpatterns = [path(f"{name}/<int:pk>", view) for name, view in VIEWS.items()]


@pytest.fixture(autouse=True)
def urls() -> Iterator[None]:
    with override_settings(ROOT_URLCONF=Urls):
        yield


def wsgi(url: str) -> tuple[int, str]:
    response = Client().get(url)
    return response.status_code, response.content.decode()


def asgi(url: str) -> tuple[int, str]:
    response = async_to_sync(AsyncClient().get)(url)
    return response.status_code, response.content.decode()


@pytest.mark.parametrize("get", [wsgi, asgi])
@pytest.mark.parametrize("name", VIEWS)
def test_held_while_the_view_runs(name: str, get: Callable[[str], tuple[int, str]]) -> None:
    assert get(f"/{name}/7") == (200, "held")
    assert is_free("order:7")
    with lock("order:7"):
        assert get(f"/{name}/007")[0] == 409  # what the path converter makes of it counts
        assert get(f"/{name}/8") == (200, "held")
