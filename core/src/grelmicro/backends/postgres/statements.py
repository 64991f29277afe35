"""The table of leases in PostgreSQL, and the statements that work on it.

Each is one transaction, and decides by the server's time after it has got the row: that of the transaction's start may
be old by then. Nothing depends on what a session has set: table and functions are named with their schema, and times
carry their zone. The parameters `$1` and `$2` are always namespace and name.
"""

from hashlib import blake2b

from grelmicro.leases.marks import MARK, MARK_AGAIN, SEVERAL
from grelmicro.leases.retention import DROPPED_KINDS, NOTES

TABLE = "grelmicro_leases"

BATCH = 500
"""Records that are read, or looked at, in one go."""

RETRACT_LOCK_TIMEOUT = "100ms"
"""For how long an undo waits for its row at a time: it is repeated, and must not keep a connection meanwhile."""

COLUMNS = {
    "namespace": "text",
    "name": "text",
    "holder": "text",
    "fence": "int8",
    "transitions": "int8",
    "acquired_at": "timestamptz",
    "renewed_at": "timestamptz",
    "expires_at": "timestamptz",
    "incarnation": "timestamptz",
    "data": "text",
    "waiter": "text",
    "waited_at": "timestamptz",
}
"""The columns and their types. `expires_at` of a free record is when it was released, or the epoch if it expired."""

NOW = "pg_catalog.clock_timestamp()"
STARTED = "pg_catalog.pg_postmaster_start_time()"

# A database or a role may have it off, and then a crash would undo grants that somebody relies on.
DURABLY = (
    "CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'off' "
    "THEN pg_catalog.set_config('synchronous_commit', 'on', true) END"
)


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def _epoch(time: str) -> str:
    return f"pg_catalog.date_part('epoch', {time})"


def _micros(time: str) -> str:
    return f"(1000000 * {_epoch(time)})::pg_catalog.int8"


def _seconds(number: object) -> str:
    return f"pg_catalog.make_interval(secs => {number})"


def _fields(row: str) -> str:
    """What the store makes a lease of."""
    return (
        f"{row}.name, {row}.holder, {row}.fence, {row}.transitions, {_epoch(row + '.acquired_at')}, "
        f"{_epoch(row + '.renewed_at')}, {_epoch(row + '.expires_at')}, {_epoch(NOW)}, "
        f"{row}.data, {row}.waiter, {_epoch(row + '.waited_at')}"
    )


def _marked(row: str) -> str:
    """Whether somebody said, not long ago, that it waits."""
    return f"{row}.waiter <> '' AND {row}.waited_at > {NOW} - {_seconds(MARK)}"


def _in_time(row: str, limit: str) -> str:
    """True, or an error that undoes the statement: another transaction may have kept the row until now.

    A condition is judged before the statement waits for its row, and once more only if the row has changed meanwhile.
    """
    late = f"pg_catalog.concat('an acquire of this name came too late: ', {row}.name)::pg_catalog.bool"
    return f"CASE WHEN {NOW} <= pg_catalog.to_timestamp({limit}) THEN true ELSE {late} END"


class Statements:
    """The statements for the table in `schema`, and the channel on which releases in `namespace` are told."""

    def __init__(self, schema: str, namespace: str) -> None:
        self.table = f"{quoted(schema)}.{TABLE}"
        self.channel = f"grelmicro_{blake2b(f'{schema} {namespace}'.encode(), digest_size=12).hexdigest()}"
        self.create = self._create()
        self.take = self._take()
        self.ask = self._ask()
        self.renew, self.renew_quietly = self._renew(self._notify("$8")), self._renew("NULL")
        self.renew_many = self._renew_many()
        self.release, self.release_quietly = self._release(self._notify("$7")), self._release("NULL")
        self.pass_on = self._pass_on()
        self.retract, self.retract_quietly = self._retract(self._notify("$5")), self._retract("NULL")
        self.raise_fence = self._raise_fence()
        self.read = f"SELECT {_fields('l')} FROM {self.table} AS l WHERE l.namespace = $1 AND l.name = $2"
        self.page = (
            f"SELECT {_fields('l')} FROM {self.table} AS l WHERE l.namespace = $1 AND l.name > $2 "
            f"ORDER BY l.name LIMIT {BATCH}"
        )
        self.sweep = self._sweep()
        self.vacate = self._vacate()
        self.notify = f"SELECT {self._notify('$1')}"
        self.time = f"SELECT {_epoch(NOW)}"

    def _notify(self, topic: str) -> str:
        return f"pg_catalog.pg_notify('{self.channel}', {topic}) IS NULL"

    def _create(self) -> str:
        """The names of records are compared byte by byte, as Python compares text."""
        collation = {"namespace": ' COLLATE "C"', "name": ' COLLATE "C"'}
        columns = "".join(f"    {name} {kind}{collation.get(name, '')} NOT NULL,\n" for name, kind in COLUMNS.items())
        # Room in each page lets a row change within it, without touching the index.
        return (
            f"CREATE TABLE IF NOT EXISTS {self.table} (\n{columns}    PRIMARY KEY (namespace, name)\n)"
            " WITH (fillfactor = 50)"
        )

    def _take(self) -> str:
        """Take what is free; no row when it is not, or when that is not certain enough. It is what happens most.

        $3 holder, $4 seconds, $5 data or NULL, $6 this process, $7 the time after which it is too late.
        """
        return f"""
            UPDATE {self.table} AS l SET
                holder = $3, fence = l.fence + 1, transitions = l.transitions + 1,
                acquired_at = {NOW}, renewed_at = {NOW}, expires_at = {NOW} + {_seconds("$4")},
                data = COALESCE($5, l.data), waiter = CASE WHEN l.waiter = $6 THEN '' ELSE l.waiter END
            WHERE l.namespace = $1 AND l.name = $2 AND l.holder = '' AND l.incarnation = {STARTED}
                AND {NOW} <= pg_catalog.to_timestamp($7)
            RETURNING {_fields("l")}, {DURABLY}, {_in_time("l", "$7")}"""

    def _ask(self) -> str:
        """Take it if it is free, expired or one's own; else mark that the caller waits ($8), and tell who has it.

        Parameters are those of `take`. One row: the record, and whether that is certain. What the statement sees at its
        beginning may change before it gets the row: if that decides, it has to be asked again.
        """

        def held(row: str) -> str:
            return f"{row}.holder NOT IN ('', $3) AND {row}.expires_at >= {NOW}"

        def to_mark(row: str) -> str:
            """Whether the mark does not tell yet, or not for long, that this process waits."""
            old = f"{row}.waited_at < {NOW} - {_seconds(MARK_AGAIN)}"
            return f"(NOT ({_marked(row)}) OR {row}.waiter NOT IN ($6, '{SEVERAL}') OR {old})"

        own = f"l.holder = $3 AND l.expires_at >= {NOW}"
        one = "l.namespace = $1 AND l.name = $2"
        return f"""
            WITH seen AS MATERIALIZED (SELECT l.* FROM {self.table} AS l WHERE {one}),
            taken AS (
                INSERT INTO {self.table} AS l
                SELECT $1, $2, $3, {_micros(NOW)}, 0, {NOW}, {NOW}, {NOW} + {_seconds("$4")}, {STARTED},
                    COALESCE($5, ''), '', 'epoch'
                WHERE {NOW} <= pg_catalog.to_timestamp($7)
                    AND NOT EXISTS (SELECT FROM seen WHERE {held("seen")})
                ON CONFLICT (namespace, name) DO UPDATE SET
                    holder = $3,
                    fence = CASE
                        WHEN {own} THEN l.fence
                        WHEN l.incarnation = {STARTED} THEN l.fence + 1
                        ELSE GREATEST(l.fence + 1, {_micros(NOW)})
                    END,
                    transitions = l.transitions + CASE WHEN l.holder = $3 THEN 0 ELSE 1 END,
                    acquired_at = CASE WHEN {own} THEN l.acquired_at ELSE {NOW} END,
                    renewed_at = {NOW},
                    expires_at = {NOW} + {_seconds("$4")},
                    incarnation = CASE WHEN {own} THEN l.incarnation ELSE {STARTED} END,
                    data = COALESCE($5, l.data),
                    waiter = CASE WHEN l.waiter = $6 THEN '' ELSE l.waiter END
                WHERE {NOW} <= pg_catalog.to_timestamp($7)
                    AND (l.holder IN ('', $3) OR l.expires_at < {NOW})
                RETURNING l.*
            ),
            marked AS (
                UPDATE {self.table} AS l SET
                    waiter = CASE WHEN {_marked("l")} AND l.waiter <> $6 THEN '{SEVERAL}' ELSE $6 END,
                    waited_at = {NOW}
                WHERE $8 AND NOT EXISTS (SELECT FROM taken) AND {one}
                    AND {held("l")} AND {to_mark("l")}
                RETURNING l.*
            ),
            answer AS (
                SELECT {_in_time("taken", "$7")} AS certain, taken.* FROM taken
                UNION ALL SELECT true, marked.* FROM marked
                UNION ALL SELECT {held("seen")} AND NOT ($8 AND {to_mark("seen")}), seen.*
                FROM seen WHERE NOT EXISTS (SELECT FROM taken) AND NOT EXISTS (SELECT FROM marked)
            )
            SELECT {_fields("answer")}, {DURABLY}, answer.certain
            FROM (SELECT) AS always LEFT JOIN answer ON true"""

    def _renew(self, notify: str) -> str:
        """Let it end later or sooner: $3 holder, $4 fence, $5 seconds, $6 data or NULL, $7 this process, $8 topic."""
        return f"""
            WITH held AS MATERIALIZED (
                SELECT l.name, l.expires_at FROM {self.table} AS l
                WHERE l.namespace = $1 AND l.name = $2 AND l.holder = $3
                    AND ($4::pg_catalog.int8 = 0 OR l.fence = $4)
                FOR UPDATE
            ),
            timed AS MATERIALIZED (SELECT held.*, {NOW} AS now FROM held),
            renewed AS (
                UPDATE {self.table} AS l SET
                    renewed_at = timed.now, expires_at = timed.now + {_seconds("$5")}, data = COALESCE($6, l.data)
                FROM timed WHERE l.namespace = $1 AND l.name = timed.name AND timed.expires_at >= timed.now
                RETURNING l.*, timed.expires_at AS before
            )
            SELECT {_fields("l")}, {DURABLY}, l.expires_at < l.before,
                CASE WHEN l.expires_at < l.before AND l.waiter <> $7 AND {_marked("l")} THEN {notify} END
            FROM renewed AS l"""

    def _renew_many(self) -> str:
        """Renew those that nobody else has locked: $2 names, $3 holders, $4 fences, $5 seconds, $6 this process."""
        return f"""
            WITH held AS MATERIALIZED (
                SELECT l.name, l.expires_at, asked.seconds::pg_catalog.float8 AS seconds
                FROM ROWS FROM (pg_catalog.unnest($2::pg_catalog.text[]), pg_catalog.unnest($3::pg_catalog.text[]),
                    pg_catalog.unnest($4::pg_catalog.text[]), pg_catalog.unnest($5::pg_catalog.text[])
                ) AS asked (name, holder, fence, seconds)
                JOIN {self.table} AS l ON l.namespace = $1 AND l.name = asked.name AND l.holder = asked.holder
                    AND l.fence = asked.fence::pg_catalog.int8
                ORDER BY l.name FOR UPDATE OF l SKIP LOCKED
            ),
            timed AS MATERIALIZED (SELECT held.*, {NOW} AS now FROM held),
            renewed AS (
                UPDATE {self.table} AS l SET
                    renewed_at = timed.now, expires_at = timed.now + {_seconds("timed.seconds")}
                FROM timed WHERE l.namespace = $1 AND l.name = timed.name AND timed.expires_at >= timed.now
                    AND timed.now + {_seconds("timed.seconds")} >= timed.expires_at
                RETURNING l.*
            )
            SELECT {_fields("l")}, {DURABLY} FROM renewed AS l"""

    def _release(self, notify: str) -> str:
        """Set it free: $3 holder, $4 fence or 0, $5 data or NULL, $6 this process, $7 topic."""
        return f"""
            UPDATE {self.table} AS l SET holder = '', expires_at = {NOW}, data = COALESCE($5, l.data)
            WHERE l.namespace = $1 AND l.name = $2 AND l.holder = $3
                AND ($4::pg_catalog.int8 = 0 OR l.fence = $4) AND l.expires_at >= {NOW}
            RETURNING {_epoch(NOW)}, CASE WHEN l.waiter <> $6 AND {_marked("l")} THEN {notify} END, {DURABLY}"""

    def _pass_on(self) -> str:
        """Give what $3 has under fence $4 to $5 for $6 seconds, until the time $8. $7 is this process.

        That is not marked as waiting any more.
        """
        return f"""
            UPDATE {self.table} AS l SET
                holder = $5,
                fence = CASE
                    WHEN l.incarnation = {STARTED} THEN l.fence + 1 ELSE GREATEST(l.fence + 1, {_micros(NOW)})
                END,
                transitions = l.transitions + 1, acquired_at = {NOW}, renewed_at = {NOW},
                expires_at = {NOW} + {_seconds("$6")}, incarnation = {STARTED},
                waiter = CASE WHEN l.waiter = $7 THEN '' ELSE l.waiter END
            WHERE l.namespace = $1 AND l.name = $2 AND l.holder = $3 AND l.fence = $4 AND l.expires_at >= {NOW}
                AND {NOW} <= pg_catalog.to_timestamp($8)
            RETURNING {_fields("l")}, {DURABLY}, {_in_time("l", "$8")}"""

    def _retract(self, notify: str) -> str:
        """Set free what $3 acquired, if it did, once no transaction that began before has the row any more.

        $4 this process, $5 topic. One row: the time, whether the row was had, and whether it was set free. A row that
        does not exist is made, since a transaction that makes it is seen by no other means. A transaction that keeps
        the row longer makes this fail with 55P03.
        """
        return f"""
            WITH patient AS MATERIALIZED (
                SELECT pg_catalog.set_config('lock_timeout', '{RETRACT_LOCK_TIMEOUT}', true) AS lock_timeout
            ),
            had AS MATERIALIZED (
                SELECT l.name, l.holder, l.expires_at FROM patient, {self.table} AS l
                WHERE l.namespace = $1 AND l.name = $2 FOR UPDATE OF l
            ),
            made AS (
                INSERT INTO {self.table} AS l
                SELECT $1, $2, '', {_micros(NOW)}, 0, 'epoch', {NOW}, 'epoch', {STARTED}, '', '', 'epoch'
                FROM patient WHERE NOT EXISTS (SELECT FROM had)
                ON CONFLICT (namespace, name) DO NOTHING
                RETURNING l.name
            ),
            freed AS (
                UPDATE {self.table} AS l SET holder = '', expires_at = {NOW}
                FROM had WHERE l.namespace = $1 AND l.name = had.name AND had.holder = $3 AND had.expires_at >= {NOW}
                RETURNING CASE WHEN l.waiter <> $4 AND {_marked("l")} THEN {notify} END AS told
            ),
            answer AS MATERIALIZED (
                SELECT EXISTS (SELECT FROM had) OR EXISTS (SELECT FROM made) AS had, EXISTS (SELECT FROM freed) AS freed
            )
            SELECT {_epoch(NOW)}, answer.had, answer.freed, {DURABLY} FROM answer"""

    def _raise_fence(self) -> str:
        """Give what $3 has under fence $4 a fence of at least $5."""
        return f"""
            UPDATE {self.table} AS l SET fence = GREATEST(l.fence, $5)
            WHERE l.namespace = $1 AND l.name = $2 AND l.holder = $3 AND l.fence = $4 AND l.expires_at >= {NOW}
            RETURNING {_fields("l")}, {DURABLY}"""

    def _sweep(self) -> str:
        """Drop what is old among the records after $2, for a retention of $3 seconds; the last one looked at, or NULL.

        Their fences never come again: a new record begins with the time in microseconds, which is above all of them.
        """
        unused = " AND l.data = ''"
        kinds = " OR ".join(
            f"pg_catalog.starts_with(l.name, '{kind}'){'' if kind in NOTES else unused}" for kind in DROPPED_KINDS
        )
        return f"""
            WITH page AS MATERIALIZED (
                SELECT l.name FROM {self.table} AS l WHERE l.namespace = $1 AND l.name > $2
                ORDER BY l.name LIMIT {BATCH}
            ),
            old AS MATERIALIZED (
                SELECT l.name FROM {self.table} AS l JOIN page ON l.name = page.name
                WHERE l.namespace = $1 AND ({kinds}) AND l.renewed_at < {NOW} - {_seconds("$3")}
                    AND (l.holder = '' OR l.expires_at < {NOW})
                ORDER BY l.name FOR UPDATE OF l SKIP LOCKED
            ),
            gone AS (DELETE FROM {self.table} AS l USING old WHERE l.namespace = $1 AND l.name = old.name)
            SELECT page.name FROM page ORDER BY page.name DESC LIMIT 1"""

    def _vacate(self) -> str:
        """Set free what expired, a part of it at a time."""
        return f"""
            UPDATE {self.table} AS l SET holder = '', expires_at = 'epoch'
            WHERE l.namespace = $1 AND l.name IN (
                SELECT m.name FROM {self.table} AS m
                WHERE m.namespace = $1 AND m.holder <> '' AND m.expires_at < {NOW}
                LIMIT {BATCH} FOR UPDATE SKIP LOCKED
            )"""


INSPECT = f"""
    SELECT pg_catalog.pg_is_in_recovery() OR pg_catalog.current_setting('transaction_read_only') = 'on',
        {_epoch(NOW)},
        ARRAY(
            SELECT (a.attname || ' ' || t.typname)::pg_catalog.text
            FROM pg_catalog.pg_attribute AS a
            JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid
            JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
            JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
            WHERE n.nspname = $1 AND c.relname = '{TABLE}' AND c.relkind IN ('r', 'p') AND a.attnum > 0
                AND NOT a.attisdropped
            ORDER BY a.attnum
        )"""
"""Whether the server takes no writes, its time, and what the table in schema $1 is like."""
