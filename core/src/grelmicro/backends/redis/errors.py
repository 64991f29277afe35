"""What an error of Redis means, in words that show nothing of what was sent."""

import re
from collections.abc import Mapping
from ssl import SSLCertVerificationError

from grelmicro.backends.redis.library import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)

REASONS: Mapping[str, str] = {
    "BUSY": "it is busy with a script that does not end: find whose it is, or end it with SCRIPT KILL",
    "CLUSTERDOWN": "it is a cluster that is down, and clusters are not supported: use a server of its own",
    "LOADING": "it is still loading its data: try again soon",
    "MASTERDOWN": "it is a replica without its primary: connect to the primary",
    "MISCONF": "it takes no writes, since it cannot save to its disk: check the disk, and the log of the server",
    "MOVED": "it is a node of a cluster, and clusters are not supported: use a server of its own",
    "NOAUTH": "it asks for a password: give user and password",
    "NOPASS": "it has no password for the default user, and one was given: leave it out, or name the user whose it is",
    "NOREPLICAS": "it takes no writes, since too few replicas follow it: check them, or lower min-replicas-to-write",
    "OOM": "its memory is full: raise maxmemory, or remove something",
    "READONLY": "it is a replica, which takes no writes: connect to the primary",
    "WRONGPASS": "it does not accept user and password: check both",
    "WRONGTYPE": "the key holds something else than a lease: remove it, or use another namespace",
}
"""What the first word of an error means: the reason, and the remedy. Nothing was changed in any of these cases.

`NOPASS` is not a word of the server, which begins that error with a plain `ERR`.
"""

LASTING = frozenset(("CLUSTERDOWN", "MOVED", "NOAUTH", "NOPASS", "NOPERM", "WRONGPASS", "WRONGTYPE"))
"""The errors that stay until a setting, here or there, is changed."""

ELSEWHERE = frozenset(("READONLY", "MASTERDOWN", "LOADING"))
"""The errors of a server that is not, or not yet, the one to ask: a new connection may lead to another one."""

_CODES: Mapping[type[RedisError], str] = {
    AuthenticationError: "WRONGPASS",
    BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN",  # before the next one, of which redis-py makes it a kind
    ClusterDownError: "CLUSTERDOWN",
    MovedError: "MOVED",
    NoPermissionError: "NOPERM",
    NoScriptError: "NOSCRIPT",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
}

_LOGINS: Mapping[str, str] = {
    "Authentication required": "NOAUTH",
    "without any password configured": "NOPASS",
}
"""What an error of the login says, of which redis-py leaves out the first word."""

LONGEST_TEXT = 200
"""Characters of a server's own words that are passed on."""


def code(error: RedisError) -> str:
    """The first word of the error that a server answered with."""
    known = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    if known == "WRONGPASS":
        return next((code for text, code in _LOGINS.items() if text in str(error)), known)
    return known or _words(error).partition(" ")[0]


def is_lasting(error: BaseException) -> bool:
    """Whether trying again does not help."""
    # redis-py raises its own error while it handles that of the connection.
    untrusted = isinstance(error.__context__, SSLCertVerificationError)
    return untrusted or (isinstance(error, RedisError) and code(error) in LASTING)


def reason(error: RedisError) -> str:
    """Why the server did not do it, and what to do."""
    found = REASONS.get(code(error))
    if found is not None:
        return found
    # What a server says of a command that it does not know repeats the arguments, a holder's name among them.
    text = _words(error).partition(", with args beginning with")[0]
    return f"it answered: {text[:LONGEST_TEXT]}"


def _words(error: RedisError) -> str:
    """What the server said, without the place in the script that Redis 6 puts before it."""
    return re.sub(r"^@user_script: \d+: -?", "", str(error))
