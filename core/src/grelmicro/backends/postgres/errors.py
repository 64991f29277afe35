"""What an error of PostgreSQL means: whether something may have happened, why, and what to do."""

from collections.abc import Mapping
from ssl import SSLCertVerificationError, SSLError

from grelmicro.backends.postgres.library import (
    DataError,
    InterfaceError,
    InternalClientError,
    InvalidCachedStatementError,
    PostgresError,
)
from grelmicro.errors import BackendUnavailableError

IDLE_TOO_LONG = "57P05"
"""The session was idle for longer than idle_session_timeout: it is ended before the server reads the next request."""

TOO_LATE = "22P02"
"""What a statement fails with that got its row after the time at which it is not to be granted any more."""

REASONS: Mapping[str, str] = {
    "22021": "a name or a holder has a character that text in PostgreSQL cannot have: choose another name",
    TOO_LATE: "the row was kept locked for so long that it came too late: find the transaction that keeps it locked",
    "22P05": "a name has a character that the encoding of the database lacks: choose a database in UTF8",
    "25006": "it takes no writes now (a standby, or a role or server that is set to read-only): connect to the primary",
    "28000": "it does not let this role in: check user, database and pg_hba.conf",
    "28P01": "it does not accept user and password: check both",
    "3D000": "the database does not exist: check its name",
    "42501": "the role lacks a right: GRANT SELECT, INSERT, UPDATE, DELETE on the table, and USAGE on its schema",
    "42P01": "the table of leases is gone: open the store again, or create it",
    "53100": "its disk is full: make room",
    "53200": "it is out of memory: look into its log",
    "53300": "it has no connection left: raise max_connections, or use a pooler",
    "53400": "a limit of its configuration is reached: look into its log",
    "54000": "its queue of notifications is full: find the session that listens and stands still in a transaction",
    "55P03": "it could not lock the row within its lock_timeout: find the transaction that keeps it locked",
    "57014": "it ended the statement (statement_timeout, or somebody's request): raise the limit, or try again",
    "57P01": "it is shutting down: try again soon",
    "57P02": "it has crashed, and restarts: try again soon",
    "57P03": "it does not take connections yet (it starts, stops or recovers): try again soon",
    IDLE_TOO_LONG: "it ended the session, which was idle (idle_session_timeout): try again",
    "57P04": "the database was dropped: check its name",
}
"""What a code of PostgreSQL means: the reason, and the remedy."""

ELSEWHERE = frozenset(("25006", "57P01", "57P02", "57P03"))
"""Said by a server that is not, or not for long, the one to ask: a new connection may lead to another one."""

LASTING = frozenset(("22021", "22P05", "28000", "28P01", "3D000", "42501"))
"""What a server says as long as a setting, here or there, stays as it is."""

AGAIN = frozenset(("40001", "40P01"))
"""Two transactions got in each other's way, and this one was undone: it can be repeated at once."""

NO_STATEMENT = frozenset(("26000", "42P05"))
"""A prepared statement is missing or there already: the server behind this connection is not always the same one."""

NOT_IDLE = "cannot switch to state"
"""How asyncpg, before it sends anything, refuses a connection on which the server has ended the session meanwhile."""

QUEUE_FULL = "54000"
"""A message cannot be sent, and so the transaction that sends it fails."""

NO_TLS = "rejected SSL upgrade"
"""What asyncpg says where a server that should encrypt does not; there is no class for it."""

LONGEST_TEXT = 200
"""Characters of a server's own words that are passed on."""


def code(error: BaseException) -> str:
    """The code of what the server answered; "" for what is no answer of a server."""
    return (error.sqlstate or "") if isinstance(error, PostgresError) else ""


def is_refusal(error: BaseException) -> bool:
    """Whether the server answered that the statement failed, so that nothing was changed.

    A fatal error tells nothing: a session may be ended between its commit and the answer. Neither do the errors of
    connections, which asyncpg and poolers give as well.
    """
    return (
        isinstance(error, PostgresError)
        and (error.severity_en or error.severity) == "ERROR"
        and (code(error) == "57014" or code(error)[:2] not in ("08", "57"))
    )


def is_unsendable(error: BaseException) -> bool:
    """Whether asyncpg could not encode a value, and sent nothing."""
    return isinstance(error, DataError) and error.severity is None


def is_unsent(error: BaseException) -> bool:
    """Whether asyncpg sent nothing over this connection, or the server had ended its session before: on another it can.

    A session that the server has ended is found out by the request that comes in the same moment.
    """
    if isinstance(error, InternalClientError):
        return str(error).startswith(NOT_IDLE)
    ended = code(error) == IDLE_TOO_LONG or (error.__cause__ is not None and code(error.__cause__) == IDLE_TOO_LONG)
    return isinstance(error, InterfaceError) or ended


def is_stale(error: BaseException) -> bool:
    """Whether the table was changed since the statement was prepared: on a new connection it is prepared anew."""
    return isinstance(error, InvalidCachedStatementError)


def reason(error: BaseException) -> str:
    """Why the server did not do it, and what to do."""
    known = REASONS.get(code(error))
    if known is not None:
        return known
    if isinstance(error, PostgresError):
        # Only its first sentence: details may show values.
        return f"it answered: {str(error.args[0] if error.args else code(error))[:LONGEST_TEXT]}"
    if isinstance(error, InterfaceError | InternalClientError):
        return f"asyncpg refuses: {str(error.args[0] if error.args else '')[:LONGEST_TEXT]}"
    if isinstance(error, SSLError):
        told = getattr(error, "verify_message", "") or error.reason or type(error).__name__
        return f"an encrypted connection fails ({told}): check sslmode, sslrootcert and the host in its certificate"
    if isinstance(error, ConnectionError) and NO_TLS in str(error):
        return "it takes no encrypted connections: turn ssl on there, or give sslmode=prefer"
    if isinstance(error, TimeoutError):
        return "it does not answer: check host, port and network, or raise command_timeout"
    return f"it cannot be reached ({type(error).__name__}): check host and port, and whether it runs"


def refusal(error: BaseException, doing: str = "", server: str = "PostgreSQL") -> BackendUnavailableError:
    """What tells a caller that `error` is why nothing was changed.

    Args:
        error: what happened.
        doing: a verb, such as `connecting to `.
        server: whose answer it is, or would be.
    """
    no_tls = isinstance(error, SSLCertVerificationError) or (
        isinstance(error, ConnectionError) and NO_TLS in str(error)
    )
    return BackendUnavailableError(f"{doing}{server}: {reason(error)}", lasting=no_tls or code(error) in LASTING)


def unsendable() -> BackendUnavailableError:
    """What tells a caller that; the error itself shows the value."""
    return BackendUnavailableError(
        "PostgreSQL: a name or a holder has characters that cannot be stored: choose another name"
    )
