"""What a refusal is over HTTP: a problem document (RFC 9457) that tells nothing about who holds what."""

import math
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, Field

from grelmicro.errors import (
    BackendUnavailableError,
    CoordinationBackendError,
    LeadershipLostError,
    LockNotOwnedError,
    NotLeaderError,
    OutcomeUnknownError,
    WouldBlockError,
)

MEDIA_TYPE = "application/problem+json"

TELL_AGAIN = 30.0
"""Seconds between two log lines about a trouble that goes on."""


class Kind(NamedTuple):
    """What is always said of one kind of refusal."""

    kind: str
    status: int
    title: str
    detail: str


NOT_DECIDED = Kind("unavailable", 503, "Coordination unavailable", "It could not be decided whose turn it is.")

KINDS: dict[type[Exception], Kind] = {
    WouldBlockError: Kind("busy", 409, "Busy", "Something is under way, or was just done, that excludes this request."),
    LockNotOwnedError: Kind(
        "lost", 503, "Interrupted", "The right to do this was lost on the way. It may have been done, or a part of it."
    ),
    LeadershipLostError: Kind(
        "leadership-lost",
        503,
        "Interrupted",
        "This worker's duty ended on the way. It may have been done, or a part of it.",
    ),
    NotLeaderError: Kind("not-leader", 503, "Not the leader", "This worker does not have this duty now."),
    BackendUnavailableError: NOT_DECIDED,
    OutcomeUnknownError: Kind(
        "unknown", 503, "Coordination unavailable", "It could not be learned in time whose turn it is."
    ),
    CoordinationBackendError: NOT_DECIDED,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a client is refused. It says nothing of who holds what, or where the store is."""

    kind: str
    """One word that stays the same: `busy`, `lost`, `leadership-lost`, `not-leader`, `unavailable` or `unknown`."""
    status: int
    """The HTTP status."""
    title: str
    """A few words for people."""
    detail: str
    """A sentence for people. It holds wherever the error came from: the route may have done something before."""
    retry_after: int = 1
    """Whole seconds after which the client may try again."""

    @classmethod
    def of(cls, error: Exception, *, retry_after: float = 1.0) -> Self:
        """What an error of coordination is to a client.

        Args:
            error: busy, lost, not the leader, or one of a store.
            retry_after: seconds that it is told to wait at least; more where it surely stays busy for longer.

        Raises:
            TypeError: it is none of these errors.
        """
        for kind in type(error).__mro__:
            if kind in KINDS:
                return cls(*KINDS[kind], math.ceil(max(retry_after, getattr(error, "busy_for", None) or 0.0)))
        raise TypeError(f"{type(error).__name__} is no refusal: it is not for the client")

    def document(self, **members: object) -> dict[str, object]:
        """The problem document, of the media type `MEDIA_TYPE`; `members` are added to it, or replace what it has."""
        return {
            "type": f"urn:grelmicro:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **members,
        }


class Trouble:
    """Which of many log lines about one trouble are written: the first, and now and then one more."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._told_at = -math.inf
        self._untold = 0

    def untold(self) -> int | None:
        """How many were left out since the last one; None: leave out this one, too."""
        with self._changing:
            now = time.monotonic()
            if now - self._told_at < TELL_AGAIN:
                self._untold += 1
                return None
            untold, self._told_at, self._untold = self._untold, now, 0
            return untold


class CoordinationProblem(BaseModel):
    """Why a request was refused (RFC 9457)."""

    type: Annotated[str, Field(json_schema_extra={"format": "uri"})]
    title: str
    status: int
    detail: str


DESCRIPTIONS = {
    409: "Something is under way, or was just done, that excludes this request",
    503: "This worker cannot serve the request now",
}


def openapi_response(status: int) -> dict[str, Any]:
    """How an OpenAPI document describes refusals of a status; it needs `CoordinationProblem` among its schemas."""
    return {
        "description": DESCRIPTIONS[status],
        "headers": {
            "Retry-After": {"description": "Seconds to wait before the next try", "schema": {"type": "integer"}}
        },
        "content": {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{CoordinationProblem.__name__}"}}},
    }
