"""The table of leases is there, and is the right one: looked at and made when a store is opened."""

from grelmicro.backends.postgres.connections import Requests
from grelmicro.backends.postgres.errors import code
from grelmicro.backends.postgres.statements import COLUMNS, INSPECT, TABLE, Statements
from grelmicro.errors import BackendUnavailableError, SettingsValidationError

ALREADY = frozenset(("23505", "42710", "42P07", "XX000", "40P01"))
"""What the server may answer when several make one table at the same moment."""

TRIES = 10
"""How often it is tried to make the table, while others do."""

EXPECTED = [f"{name} {kind}" for name, kind in COLUMNS.items()]


async def prepare(requests: Requests, statements: Statements, schema: str, limit: float, *, create: bool) -> float:
    """See that the table is there and can be written to, and make it if `create` says so; the server's time.

    Raises:
        SettingsValidationError: it is missing and cannot be made, or it is something else.
        BackendUnavailableError: the server cannot be asked, or takes no writes.
    """
    for _ in range(TRIES):
        read_only, now, found = (await requests.fetch(INSPECT, (schema,), limit, once=True))[0]
        if found and found != EXPECTED:
            raise SettingsValidationError(
                f"PostgreSQL: {statements.table} is a table of something else, or of another version of this package: "
                "let all processes use one version, or name another schema with schema="
            )
        if read_only:
            raise BackendUnavailableError(
                "PostgreSQL: the server takes no writes (it is a standby, or read-only): connect to the primary"
            )
        if found:
            return float(now)
        if not create:
            raise SettingsValidationError(
                f"PostgreSQL: auto_migrate is off and the table {TABLE} does not exist in schema {schema}: create it "
                f"with\n\n{statements.create};\n"
            )
        await _create(requests, statements, schema, limit)
    raise BackendUnavailableError(f"PostgreSQL: {statements.table} could not be made: try again, or create it by hand")


async def _create(requests: Requests, statements: Statements, schema: str, limit: float) -> None:
    try:
        await requests.fetch(statements.create, (), limit, once=True)
    except BackendUnavailableError as error:
        answer = "" if error.__cause__ is None else code(error.__cause__)
        if answer in ("42501", "3F000"):
            why = "the role may not create tables in" if answer == "42501" else "there is no"
            raise SettingsValidationError(
                f"PostgreSQL: {why} schema {schema}: name another one with schema=, or let an administrator run, and "
                f"grant the role SELECT, INSERT, UPDATE and DELETE,\n\n{statements.create};\n"
            ) from error
        if answer not in ALREADY:
            raise
