"""`Problem`: what a client is told of an error, without a framework."""

import pytest

from grelmicro import errors
from grelmicro.problems import Problem

SECRET = "lock 'cart' is held by web-1:task:0123"


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (errors.WouldBlockError, "busy", 409),
        (errors.LockTimeoutError, "busy", 409),
        (errors.LockNotOwnedError, "lost", 503),
        (errors.LockLostError, "lost", 503),
        (errors.NotLeaderError, "not-leader", 503),
        (errors.LeadershipLostError, "leadership-lost", 503),
        (errors.BackendUnavailableError, "unavailable", 503),
        (errors.OutcomeUnknownError, "unknown", 503),
        (errors.CoordinationBackendError, "unavailable", 503),
    ],
)
def test_each_error_is_one_kind_of_problem(error: type[Exception], kind: str, status: int) -> None:
    problem = Problem.of(error(SECRET))
    assert (problem.kind, problem.status, problem.retry_after) == (kind, status, 1)
    assert "cart" not in str(problem.document())


@pytest.mark.parametrize(("busy_for", "retry_after", "told"), [(None, 0, 0), (None, 1.2, 2), (8.5, 1, 9), (0.5, 3, 3)])
def test_the_client_waits_as_long_as_it_surely_stays_busy(
    busy_for: float | None, retry_after: float, told: int
) -> None:
    error = errors.WouldBlockError(SECRET)
    error.busy_for = busy_for
    assert Problem.of(error, retry_after=retry_after).retry_after == told


def test_members_are_added_to_the_document_or_replace_what_it_has() -> None:
    problem = Problem("busy", 409, "Busy", "Wait.")
    assert problem.document(title="Belegt", instance="/") == {
        "type": "urn:grelmicro:busy",
        "title": "Belegt",
        "status": 409,
        "detail": "Wait.",
        "instance": "/",
    }


def test_other_errors_are_not_for_the_client() -> None:
    with pytest.raises(TypeError, match="LockReentrantError is no refusal"):
        Problem.of(errors.LockReentrantError(SECRET))
