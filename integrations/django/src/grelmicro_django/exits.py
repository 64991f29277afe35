"""The exit codes of the commands, those of BSD's sysexits.h, and the errors that end a command with one line."""

from django.core.management.base import CommandError

from grelmicro.errors import (
    CoordinationBackendError,
    DependencyNotFoundError,
    GrelmicroError,
    LockNotOwnedError,
    SettingsValidationError,
    WouldBlockError,
)

USAGE = 64
UNAVAILABLE = 69
"""The store is unreachable, or did not answer."""
LOST = 70
"""The lease was lost, or held for too long."""
BUSY = 75
SETTINGS = 78

_CODES: tuple[tuple[type[GrelmicroError], int], ...] = (
    (SettingsValidationError, SETTINGS),
    (DependencyNotFoundError, SETTINGS),
    (WouldBlockError, BUSY),
    (LockNotOwnedError, LOST),
    (CoordinationBackendError, UNAVAILABLE),
)


def command_error(error: GrelmicroError) -> CommandError:
    """The error that makes Django print one line and exit with the code of `error`."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), 1)
    return CommandError(" ".join(str(error).split()), returncode=code)


def usage_error(text: str) -> CommandError:
    """The command line is wrong."""
    return CommandError(" ".join(text.split()), returncode=USAGE)
