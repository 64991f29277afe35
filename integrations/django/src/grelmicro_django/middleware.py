"""`GrelmicroMiddleware`: responses for errors of locks that views acquire themselves."""

from collections.abc import Awaitable, Callable

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from grelmicro_django.refusals import REFUSED, refuse


class GrelmicroMiddleware:
    """Answers what `with lock(...)` raises in a view as `@locked` does: busy is 409, a store that fails is 503.

    Name it in `MIDDLEWARE`; the place among others does not matter much.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]) -> None:
        self._get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """Serve a request."""
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponseBase | None:
        """The response for an error that a view raised; None where it is another one."""
        return refuse(request, exception) if isinstance(exception, REFUSED) else None
