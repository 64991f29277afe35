"""Every error this package raises.

    GrelmicroError
    ├── SettingsValidationError (ValueError)    a setting, name, URL or option breaks a rule
    ├── OutOfContextError (RuntimeError)        no open app, several, an empty slot, a closed or foreign backend
    ├── DependencyNotFoundError (ImportError)   an extra is not installed
    ├── CoordinationError
    │   ├── WouldBlockError                     busy: another holder has it
    │   │   └── LockTimeoutError (TimeoutError) busy until the caller's deadline
    │   ├── LockReentrantError (RuntimeError)   this task or thread holds it already
    │   ├── LockNotOwnedError                   not, or no longer, held by the caller
    │   │   └── LockLostError                   lost while the guarded work was running
    │   ├── NotLeaderError                      this worker does not lead
    │   │   └── LeadershipLostError             the term ended while the work of its leader was running
    │   └── CoordinationBackendError            the store did not do its part
    │       ├── BackendUnavailableError         it failed, and nothing was changed by this request
    │       └── OutcomeUnknownError             it did not answer: the request may or may not have happened
    └── TaskError (RuntimeError)                a task cannot be declared, added or started

Busy, lost, unavailable and unknown are never confused. No text contains a token, a password or a rejected value.
"""


class GrelmicroError(Exception):
    """Root of every error of this package."""

    lasting: bool = True
    """Whether it stays so until a setting or the program is changed: then trying again does not help."""


class SettingsValidationError(GrelmicroError, ValueError):
    """A setting breaks a rule; the text names the setting, the rule and the remedy, never the value."""


class OutOfContextError(GrelmicroError, RuntimeError):
    """Used where nothing serves it: no open app, several, an empty slot, or a backend closed or bound elsewhere."""


class DependencyNotFoundError(GrelmicroError, ImportError):
    """A client library is missing; the text gives the command that installs the extra."""


class CoordinationError(GrelmicroError):
    """Root of what locks, elections and schedules raise.

    Args:
        text: what is wrong, and what to do.
        name: the lock or election that it is about, if it is about one.
    """

    name: str | None = None
    """The name of the lock or election that it is about; None where it is about none, or about several."""

    def __init__(self, *text: object, name: str | None = None) -> None:
        super().__init__(*text)
        if name is not None:
            self.name = name


class WouldBlockError(CoordinationError):
    """Busy: another holder has it now."""

    retry_after: float | None = None
    """Seconds after which its lease ends if the holder does nothing, as far as the store told."""
    busy_for: float | None = None
    """Seconds for which it surely stays busy: what is left of a task lock's minimum hold. None: nobody knows."""


class LockTimeoutError(WouldBlockError, TimeoutError):
    """Busy until the deadline: another holder kept it for the whole `timeout`."""

    timeout: float | None = None
    """Seconds for which it was waited for."""


class LockReentrantError(CoordinationError, RuntimeError):
    """This task or thread already holds this very lock."""


class LockNotOwnedError(CoordinationError):
    """The lease is not, or no longer, held by the caller."""


class LockLostError(LockNotOwnedError):
    """The lease was lost while the work it guards was running."""


class NotLeaderError(CoordinationError):
    """This worker does not lead now."""


class LeadershipLostError(NotLeaderError):
    """The term ended while the work of its leader was running."""


class CoordinationBackendError(CoordinationError):
    """The store did not do its part."""

    lasting = False


class BackendUnavailableError(CoordinationBackendError):
    """The store failed or refused, and this request changed nothing.

    Args:
        text: what is wrong, and what to do.
        name: the lock or election that it is about, if it is about one.
        lasting: whether trying again does not help, as after a password that the server does not accept.
    """

    def __init__(self, *text: object, name: str | None = None, lasting: bool = False) -> None:
        super().__init__(*text, name=name)
        if lasting:
            self.lasting = True


class OutcomeUnknownError(CoordinationBackendError):
    """The store did not answer: the request may have happened. An acquire is undone in the background."""


class TaskError(GrelmicroError, RuntimeError):
    """A task cannot be declared, added or started."""
