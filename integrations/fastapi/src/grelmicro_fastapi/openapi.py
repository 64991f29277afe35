"""The refusals of this package in the OpenAPI document of an application."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from grelmicro.problems import CoordinationProblem, openapi_response
from grelmicro_fastapi.declared import declared, effective_routes


class Documented:
    """`app.openapi` with the refusals of routes that have dependencies of this package.

    Args:
        app: the application.
        generate: its `openapi` so far, which decides when the document is made anew.
        described: whether the content of refusals is that of this package.
    """

    def __init__(self, app: FastAPI, generate: Callable[[], dict[str, Any]], *, described: bool) -> None:
        self._app = app
        self._generate = generate
        self._described = described
        self._done: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any]:
        """The document."""
        document = self._generate()
        if document is not self._done:
            self._complete(document)
            self._done = document
        return document

    def _complete(self, document: dict[str, Any]) -> None:
        for (path, method), statuses in _refusals(self._app).items():
            responses = document.get("paths", {}).get(path, {}).get(method, {}).get("responses", {})
            for status in statuses:
                if {str(status), f"{status // 100}XX", "default"} & responses.keys():
                    continue
                response = responses[str(status)] = openapi_response(status)
                if self._described:
                    schemas = document.setdefault("components", {}).setdefault("schemas", {})
                    schemas.setdefault(CoordinationProblem.__name__, CoordinationProblem.model_json_schema())
                else:
                    del response["headers"], response["content"]


def document(app: FastAPI, *, described: bool) -> None:
    """Add refusals to the document of `app`, once."""
    if not isinstance(app.openapi, Documented):
        vars(app)["openapi"] = Documented(app, app.openapi, described=described)


def _refusals(app: FastAPI) -> dict[tuple[str, str], list[int]]:
    """The statuses of each operation; of several routes for one, FastAPI documents the last."""
    return {
        (route.path_format, method.lower()): sorted(
            {status for each in declared(route.dependant) for status in each.refusals}
        )
        for route in effective_routes(app.routes)
        if isinstance(getattr(route, "original_route", route), APIRoute) and route.include_in_schema
        for method in route.methods
    }
