"""The errors of coordination, at the path where other packages of this design have them."""

from grelmicro.errors import (
    BackendUnavailableError,
    CoordinationBackendError,
    CoordinationError,
    DependencyNotFoundError,
    GrelmicroError,
    LeadershipLostError,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    NotLeaderError,
    OutcomeUnknownError,
    OutOfContextError,
    SettingsValidationError,
    WouldBlockError,
)

__all__ = [
    "BackendUnavailableError",
    "CoordinationBackendError",
    "CoordinationError",
    "DependencyNotFoundError",
    "GrelmicroError",
    "LeadershipLostError",
    "LockLostError",
    "LockNotOwnedError",
    "LockReentrantError",
    "LockTimeoutError",
    "NotLeaderError",
    "OutOfContextError",
    "OutcomeUnknownError",
    "SettingsValidationError",
    "WouldBlockError",
]
