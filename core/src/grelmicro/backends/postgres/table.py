"""Leases in a PostgreSQL table: what each operation asks of the server, and what the answer means."""

import json
import logging
from collections.abc import Awaitable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from secrets import token_hex
from time import monotonic
from typing import NamedTuple

from grelmicro.backends.postgres.connections import Args, Requests, Rows
from grelmicro.backends.postgres.errors import QUEUE_FULL, code
from grelmicro.backends.postgres.late import Late, LateAcquires
from grelmicro.backends.postgres.library import Record
from grelmicro.backends.postgres.schema import prepare
from grelmicro.backends.postgres.statements import Statements
from grelmicro.clock import Clock
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError
from grelmicro.leases.lease import NO_DATA, Lease
from grelmicro.leases.marks import MARK

logger = logging.getLogger("grelmicro.coordination")

SPENT = 0.05
"""Seconds by which a grant may be old when it arrives: one that waited longer for its row is extended at once."""

MOST_FREED = 1000
"""Names that are remembered as released in this process, at most."""

CERTAIN = 12
"""Where the answer to `ask` says that it is one."""

SHORTENED = 12
"""Where the answer to `renew` says that the lease ends sooner than before."""


class Answer(NamedTuple):
    """What a request to renew brought."""

    lease: Lease
    shortened: bool


class Table:
    """The records of one namespace.

    Args:
        statements: those of the table.
        namespace: whose records.
        requests: what takes them to the server.
        renewals: what takes renewals there, also when `requests` has no connection left.
        clock: the time of this process.
        limit: seconds within which an operation ends.
    """

    def __init__(
        self,
        statements: Statements,
        namespace: str,
        requests: Requests,
        renewals: Requests,
        clock: Clock,
        limit: float,
    ) -> None:
        self._statements = statements
        self._namespace = namespace
        self._requests = requests
        self._renewals = renewals
        self._clock = clock
        self._late = LateAcquires(clock)
        self._limit = limit
        self._freed: set[str] = set()  # released in this process, and not asked for since
        self.me = token_hex(8)  # whose mark it is, in the records

    async def open(self, schema: str, *, create: bool) -> None:
        """See that the table is there, and learn the server's time; see `prepare`."""
        sent_at = self._clock.now()
        self._late.learn(await prepare(self._requests, self._statements, schema, self._limit, create=create), sent_at)

    async def acquire(self, name: str, holder: str, ttl: float, data: Mapping[str, str] | None, waiting: bool) -> Lease:
        """See `LeaseStore.acquire`."""
        until = monotonic() + self._limit
        text = None if data is None else dumps(data)
        # What is free is taken by a statement that does nothing else. Who waits was refused already, and may have to
        # leave a mark; but what was released here is probably free.
        if name in self._freed or not waiting:
            self._freed.discard(name)
            sent_at = self._clock.now()
            rows = await self._try(self._statements.take, name, holder, ttl, text, until)
            if rows:
                lease = self._lease(rows[0])
                self._late.learn(lease.now, sent_at)
                if (whole := await self._lengthened(lease, ttl)) is not None:
                    return whole
        while True:
            sent_at = self._clock.now()
            row = (await self._try(self._statements.ask, name, holder, ttl, text, until, waiting))[0]
            self._late.learn(row[7], sent_at)
            if row[CERTAIN]:
                lease = self._lease(row)
                if lease.holder != holder:
                    return lease
                if (whole := await self._lengthened(lease, ttl)) is not None:
                    return whole
            if monotonic() >= until:
                raise BackendUnavailableError(
                    f"acquiring {name!r}: PostgreSQL did not come to a decision within {self._limit:g} s, since others "
                    "changed the record meanwhile: try again"
                )

    async def renew(self, lease: Lease, ttl: float, data: Mapping[str, str] | None) -> Answer | None:
        """See `LeaseStore.renew`."""
        text = None if data is None else dumps(data)
        args = (self._namespace, lease.name, lease.holder, lease.fence, ttl, text, self.me, topic_of(lease.name))
        sql = self._statements
        rows, _ = await self._surely(self._renewals, sql.renew, sql.renew_quietly, args)
        return Answer(self._lease(rows[0]), rows[0][SHORTENED]) if rows else None

    async def _lengthened(self, lease: Lease, ttl: float) -> Lease | None:
        """A lease for the whole time, also if it was granted a while ago; None if it is lost.

        It is not acquired once more: should that be late, it could take what an undo has set free.
        """
        if not is_spent(lease, ttl):
            return lease
        answer = await self.renew(lease, ttl, None)
        return None if answer is None else answer.lease

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """Those renewed by one statement; the others are lost, or locked, or would be shortened."""
        args = (
            self._namespace,
            [lease.name for lease, _ in renewals],
            [lease.holder for lease, _ in renewals],
            [str(lease.fence) for lease, _ in renewals],
            [repr(float(ttl)) for _, ttl in renewals],
        )
        rows, _ = await self._surely(self._renewals, self._statements.renew_many, None, args)
        return [self._lease(row) for row in rows]

    async def release(self, lease: Lease, data: Mapping[str, str] | None) -> bool:
        """See `LeaseStore.release`."""
        self._free(lease.name)
        late = None if lease.fence else self._late.get(lease)
        if late is not None:
            return await self._retract(lease, late)
        text = None if data is None else dumps(data)
        args = (self._namespace, lease.name, lease.holder, lease.fence, text, self.me, topic_of(lease.name))
        sql = self._statements
        rows, again = await self._surely(self._requests, sql.release, sql.release_quietly, args)
        self._late.done(lease)
        return bool(rows) if rows or not again else await self._was_released(lease)

    async def _retract(self, lease: Lease, late: Late) -> bool:
        """Release what an acquire that may come late has taken; whether it had.

        Raises:
            OutcomeUnknownError: it may still take effect.
        """
        args = (self._namespace, lease.name, lease.holder, self.me, topic_of(lease.name))
        sql = self._statements
        rows, _ = await self._surely(self._requests, sql.retract, sql.retract_quietly, args)
        now, had, freed = rows[0][:3]
        if not (freed or (had and now > late.not_after)):
            raise OutcomeUnknownError(f"releasing {lease.name!r}: what acquires it may still be on its way: try again")
        self._late.done(lease)
        return bool(freed)

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`."""
        not_after = self._late.server_time() + self._limit
        args = (self._namespace, lease.name, lease.holder, lease.fence, holder, ttl, self.me, not_after)
        over = partial(self._late.add, holder, not_after)
        rows = await self._requests.fetch(self._statements.pass_on, args, self._limit, over=over)
        return self._lease(rows[0]) if rows else None

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""
        args = (self._namespace, lease.name, lease.holder, lease.fence, least)
        rows = await self._requests.fetch(self._statements.raise_fence, args, self._limit)
        return self._lease(rows[0]) if rows else None

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        rows = await self._requests.fetch(self._statements.read, (self._namespace, name), self._limit)
        return self._lease(rows[0]) if rows else None

    async def page(self, after: str, prefix: str) -> list[Lease]:
        """The next records whose name begins with `prefix`, in the order of their names."""
        leases = []
        for row in await self._requests.fetch(self._statements.page, (self._namespace, after), self._limit):
            # Those with one prefix stand together.
            if not row[0].startswith(prefix):
                break
            leases.append(self._lease(row))
        return leases

    async def sweep(self, after: str, retention: float) -> str:
        """Drop old ones among the next records after a name; the name to go on from, "" at the end of a round."""
        args = (self._namespace, after, retention)
        rows = await self._requests.fetch(self._statements.sweep, args, self._limit)
        return str(rows[0][0]) if rows else ""

    async def vacate(self, limit: float) -> None:
        """Set free what expired."""
        await self._requests.fetch(self._statements.vacate, (self._namespace,), limit, once=True)

    def _try(
        self, sql: str, name: str, holder: str, ttl: float, data: str | None, until: float, *more: object
    ) -> Awaitable[Rows]:
        """Ask for a lease; should the request be late, it is not granted."""
        limit = max(until - monotonic(), 0.001)
        not_after = self._late.server_time() + limit
        args = (self._namespace, name, holder, ttl, data, self.me, not_after, *more)
        return self._requests.fetch(sql, args, limit, over=partial(self._late.add, holder, not_after))

    async def _surely(self, requests: Requests, sql: str, quietly: str | None, args: Args) -> tuple[Rows, bool]:
        """The rows of a statement that may be carried out twice; whether it may have been.

        `quietly` sends no message, its last argument: that the server cannot send one is no reason not to do it.
        """
        until = monotonic() + self._limit
        again = False
        while True:
            limit = max(until - monotonic(), 0.001) if again else self._limit / 2
            try:
                return await requests.fetch(sql, args, limit), again
            except BackendUnavailableError as error:
                if sql == quietly or quietly is None or error.__cause__ is None or code(error.__cause__) != QUEUE_FULL:
                    raise
                logger.warning("PostgreSQL cannot send messages, so waiters learn of a release by asking: %s", error)
                sql, args = quietly, args[:-1]
            except Exception:
                if again:
                    raise
                again = True

    def _free(self, name: str) -> None:
        """Note that it is released."""
        if len(self._freed) >= MOST_FREED:
            self._freed.clear()  # of names that nobody may ask for again
        self._freed.add(name)

    async def _was_released(self, lease: Lease) -> bool:
        """What the record tells of a release that was sent twice, and found nothing to release the second time."""
        record = await self.read(lease.name)
        if record is not None and record.fence == lease.fence:
            # `expires_at` of what was released in order is the time of that.
            return not record.holder and record.expires_at > 0
        raise OutcomeUnknownError(f"releasing {lease.name!r}: it was released or had expired, and was taken again")

    def _lease(self, row: Record) -> Lease:
        """The record that a row of the statements holds."""
        name, holder, fence, transitions, acquired_at, renewed_at, expires_at, now, data, waiter, waited_at = row[:11]
        return Lease(
            name,
            holder,
            fence,
            transitions,
            acquired_at,
            renewed_at,
            expires_at,
            now,
            json.loads(data) if data else NO_DATA,
            waiter != "" and waiter != self.me and now - waited_at <= MARK,
        )


def dumps(data: Mapping[str, str]) -> str:
    """Data as it is stored: only ASCII, so that every database can hold it."""
    return json.dumps(dict(data)) if data else ""


@lru_cache(maxsize=1024)
def topic_of(name: str) -> str:
    """What is said on the channel when `name` is released."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def is_spent(lease: Lease, ttl: float) -> bool:
    """Whether a good part of a lease was over when it was granted, since the row was locked by somebody else."""
    return lease.now - lease.renewed_at > SPENT and lease.remaining < ttl * 0.9
