"""Refusals as HTTP responses: problem documents (RFC 9457) for programs, a page for browsers."""

import logging
from pathlib import Path
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.template import Engine, loader
from django.template.exceptions import TemplateDoesNotExist
from django.utils.cache import patch_vary_headers

from grelmicro.coordination import (
    CoordinationBackendError,
    LeadershipLostError,
    LockNotOwnedError,
    NotLeaderError,
    WouldBlockError,
)
from grelmicro.problems import MEDIA_TYPE, Problem, Trouble

logger = logging.getLogger("grelmicro.django")

REFUSED = (WouldBlockError, LockNotOwnedError, NotLeaderError, CoordinationBackendError)
"""The errors that are answered. Others are faults of the program."""

RETRY_AFTER = "Retry-After"

PAGE = "grelmicro/refused.html"
"""The template of the page for browsers."""

HTML = ("text/html", "application/xhtml+xml")

_store = Trouble()
_page = Trouble()


def refuse(request: Any, error: Exception) -> HttpResponse:
    """The response to a request that is refused because of one of the errors `REFUSED`, which is logged."""
    problem = Problem.of(error)
    log(request, problem, error)
    response = page(request, problem) if wants_page(request) else document(problem)
    response[RETRY_AFTER] = str(problem.retry_after)
    patch_vary_headers(response, ["Accept"])
    return response


def advise(response: HttpResponseBase, error: Exception) -> None:
    """Tell in a response of the project's own when to try again, unless it does."""
    if not response.has_header(RETRY_AFTER):
        response[RETRY_AFTER] = str(Problem.of(error).retry_after)


def document(problem: Problem) -> HttpResponse:
    """The problem document."""
    return JsonResponse(problem.document(), status=problem.status, content_type=MEDIA_TYPE)


def page(request: HttpRequest, problem: Problem) -> HttpResponse:
    """The page, made by the template of the project if it has one that works."""
    context = {"problem": problem}
    try:
        text = loader.get_template(PAGE).render(context, request)
    except TemplateDoesNotExist as missing:
        if missing.args[0] != PAGE:
            _log_page(missing)
        text = _default_page(context)
    except Exception as error:
        _log_page(error)
        text = _default_page(context)
    return HttpResponse(text, status=problem.status)


def _default_page(context: dict[str, Any]) -> str:
    return Engine(dirs=[str(Path(__file__).parent / "templates")]).render_to_string(PAGE, context)


def _log_page(error: Exception) -> None:
    if (untold := _page.untold()) is not None:
        logger.error(
            "template %s failed (and %d times since the last word on it), and the client got the default page: %s",
            PAGE,
            untold,
            error,
            exc_info=error,
        )


def wants_page(request: Any) -> bool:
    """Whether the client names HTML, and no kind of JSON that it likes as well: most programs accept anything."""
    best: dict[bool, float] = {}
    for token in request.headers.get("Accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in token.split(";"))
        is_page = kind in HTML
        if is_page or kind.endswith(("/json", "+json")):
            best[is_page] = max(best.get(is_page, 0.0), _quality(parameters))
    return best.get(True, 0.0) > best.get(False, 0.0)


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def log(request: Any, problem: Problem, error: Exception) -> None:
    """Write one line that names the route. Contention is no trouble, and a store that fails does so for all routes."""
    if isinstance(error, CoordinationBackendError):
        if (untold := _store.untold()) is not None:
            logger.warning(
                "%s was refused with %d (and %d other requests since the last word on it): %s",
                route_title(request),
                problem.status,
                untold,
                error,
            )
    elif isinstance(error, LockNotOwnedError | LeadershipLostError):
        logger.warning("%s was interrupted, and answered with %d: %s", route_title(request), problem.status, error)
    elif logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s was refused with %d: %s", route_title(request), problem.status, error)


def route_title(request: Any) -> str:
    """What the log calls the route of a request: `POST orders/<int:pk>/ship`, without the values of its parameters."""
    match = getattr(request, "resolver_match", None)
    if match is None:
        return f"{request.method} outside of any route"
    return f"{request.method} {match.route or match.view_name or '/'}"
