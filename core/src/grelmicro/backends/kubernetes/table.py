"""The records of one store: what each operation reads and writes, and what the answers mean."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from math import inf
from secrets import token_hex

from grelmicro.backends.kubernetes.late import NOTHING, Late
from grelmicro.backends.kubernetes.names import lease_name, prefix_label
from grelmicro.backends.kubernetes.objects import Objects
from grelmicro.backends.kubernetes.observation import Sight
from grelmicro.backends.kubernetes.record import (
    OBSERVED,
    PREFIX,
    TOUCHED,
    WAITING,
    Body,
    annotated,
    selector,
    whole_seconds,
    written,
)
from grelmicro.backends.kubernetes.refusals import check_fence, check_name, crowded
from grelmicro.backends.kubernetes.requests import Requests
from grelmicro.backends.kubernetes.turns import AT_ONCE, ROUNDS, Turns
from grelmicro.clock import Clock
from grelmicro.errors import CoordinationBackendError
from grelmicro.leases.lease import Lease
from grelmicro.leases.rules import granted, owns, renewed, taken, vacated

MARKS = 3
"""How often a request is tried to be marked that waits."""

FAREWELLS = 50
"""Objects that closing writes to, at most."""


def _never(record: Lease) -> bool:
    return False


class Table:
    """The records of one store.

    Args:
        requests: to the API server.
        prefix: whose records.
        clock: the time of this process, by which leases are observed.
    """

    def __init__(self, requests: Requests, prefix: str, clock: Clock) -> None:
        self._requests = requests
        self._prefix = prefix
        self._clock = clock
        self._label = prefix_label(prefix)
        self._objects = Objects(requests, clock)
        self._late = Late()
        self._turns = Turns()
        self._me = token_hex(4)

    async def acquire(
        self, name: str, holder: str, ttl: float, data: Mapping[str, str] | None, *, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`. What is known to be free is taken by one write; a refusal is read first.

        Who waits is marked only once others have gone before it several times: a mark costs the holder a conflict.
        """
        what = f"acquiring {name!r}"
        seconds = whole_seconds(ttl)
        key = self._key(name)
        marks = MARKS if waiting else 0
        changed = False  # while it was being written to
        for tries in range(ROUNDS):
            alone = await self._turns.wait(key, tries)
            sight = None if changed else self._objects.seen.get(key)
            # What does not exist is looked for: its first fence is the server's time.
            known = sight is not None and sight.record is not None
            lease = self._taken(sight, name, holder, seconds, data) if sight is not None and known else None
            if sight is None or lease is None:
                sight = await self._objects.look(key, what)
                check_name(sight, name, what)
                lease = self._taken(sight, name, holder, seconds, data)
            if lease is None:
                sight.refused = True
                if waiting:
                    sight.waits(self._clock.now())
                if marks and sight.is_overtaken(self._clock.now()) and not await self._mark(key, sight, what):
                    marks -= 1
                    changed = True
                    continue
                return self._lease(sight, name)
            check_fence(lease, what)
            if alone and self._turns.is_taken(key):
                changed = False  # what the other one is answered tells how it is
                continue
            with self._late.expect(holder, _version(sight)), self._turns.take(key):
                done = await self._objects.write(key, self._body(lease, seconds, sight), what)
            if done is not None:
                done.own, done.waited_at = True, -inf
                return self._lease(done, name)
            changed = True
        raise crowded(what, ROUNDS)

    async def renew(self, lease: Lease, ttl: float, data: Mapping[str, str] | None) -> tuple[Lease, bool] | None:
        """The renewed lease and whether it was shortened; None when it is lost. See `LeaseStore.renew`."""
        seconds = whole_seconds(ttl)

        def change(record: Lease) -> Lease | None:
            return renewed(record, lease, seconds, data, self._clock.now(), self._clock.wall())

        changed = await self._change(lease, change, seconds, f"renewing {lease.name!r}", urgent=True)
        if changed is None:
            return None
        before, sight = changed
        sight.own = True
        after = self._lease(sight, lease.name)
        return after, after.expires_at < before.expires_at

    async def release(self, lease: Lease, data: Mapping[str, str] | None) -> bool:
        """See `LeaseStore.release`. An undo ends only when what it undoes cannot be done any more."""
        what = f"releasing {lease.name!r}"
        if not lease.holder:
            return False
        if not lease.fence:
            return await self._undo(lease, data, what)

        def change(record: Lease) -> Lease | None:
            now = self._clock.now()
            return vacated(record, data, now) if owns(record, lease, now) else None

        def is_done(record: Lease) -> bool:
            return not record.holder and record.fence == lease.fence

        return await self._change(lease, change, 1, what, is_done=is_done) is not None

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`."""
        what = f"releasing {lease.name!r}"
        seconds = whole_seconds(ttl)

        def change(record: Lease) -> Lease | None:
            now = self._clock.now()
            if not owns(record, lease, now):
                return None
            return granted(record, lease.name, holder, seconds, None, now, self._clock.wall(), lease.fence + 1)

        def is_done(record: Lease) -> bool:
            return record.granted_to(holder)

        changed = await self._change(lease, change, seconds, what, successor=holder, is_done=is_done)
        if changed is None:
            return None
        changed[1].own = True
        return self._lease(changed[1], lease.name)

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""

        def change(record: Lease) -> Lease | None:
            held = owns(record, lease, self._clock.now())
            return replace(record, fence=max(record.fence, least)) if held else None

        def is_done(record: Lease) -> bool:
            return record.granted_to(lease.holder) and record.fence >= least

        # What is left of it, since it begins with this write for all that watch it.
        seconds = whole_seconds(max(lease.remaining, 1.0))
        changed = await self._change(lease, change, seconds, f"raising the fence of {lease.name!r}", is_done=is_done)
        if changed is None:
            return None
        changed[1].own = True
        return self._lease(changed[1], lease.name)

    async def drop(self, name: str) -> bool:
        """See `DroppingLeases.drop`."""
        return await self._objects.delete(self._key(name), f"dropping {name!r}")

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        what = f"reading {name!r}"
        sight = await self._objects.look(self._key(name), what)
        check_name(sight, name, what)
        return sight.lease(name, self._clock.now())

    async def scan(self, prefix: str) -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        found = await self._objects.look_at_all(selector(self._prefix), "reading records")
        names = {name: sight for key, sight in found if (name := self._name(key, sight)) is not None}
        for name in sorted(names):
            if name.startswith(prefix):
                yield self._lease(names[name], name)

    async def tidy(self) -> None:
        """Vacate what was seen to expire, and tell since when this process has seen what it did not get."""
        bodies = [(key, self._farewell(key, sight)) for key, sight in self._objects.seen.items()]
        writes = [(key, body) for key, body in bodies if body is not None][:FAREWELLS]
        requests = [self._objects.write(key, body, "closing") for key, body in writes]
        for answer in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    def learn(self, body: Body, /, *, deleted: bool = False) -> Body | None:
        """See `Objects.learn`."""
        return self._objects.learn(body, deleted=deleted)

    def is_watched(self, name: str) -> bool:
        """Whether a watch tells changes of the record, as far as one knows: what others made has no label of ours."""
        sight = self._objects.seen.get(self._key(name))
        return sight is None or sight.record is None or self._is_labelled(sight)

    async def _change(
        self,
        lease: Lease,
        change: Callable[[Lease], Lease | None],
        seconds: int,
        what: str,
        *,
        urgent: bool = False,
        successor: str = "",
        is_done: Callable[[Lease], bool] = _never,
    ) -> tuple[Lease, Sight] | None:
        """Change the record of who has it, by one write if it is as it was seen last; None when it is lost.

        `successor` is who has it then, if that is another one; `is_done` tells whether a record was changed that way.
        """
        key = self._key(lease.name)
        sight = self._objects.seen.get(key)
        for tries in range(ROUNDS):
            if tries >= AT_ONCE:
                await self._turns.wait(key, tries)
            before = None if sight is None else sight.lease(lease.name, self._clock.now())
            after = None if before is None else change(before)
            if sight is None or before is None or after is None:
                sight = await self._objects.look(key, what, urgent=urgent)
                before = sight.lease(lease.name, self._clock.now())
                after = None if before is None else change(before)
                if tries and before is not None and is_done(before):
                    return before, sight  # the write was sent twice on its way, and its repetition was refused
                if before is None or after is None:
                    return None
            check_fence(after, what)
            late = self._late.expect(successor, _version(sight)) if successor else nullcontext()
            with late, self._turns.take(key):
                done = await self._objects.write(key, self._body(after, seconds, sight), what, urgent=urgent)
            if done is not None:
                return before, done
            sight = None
        raise crowded(what, ROUNDS)

    async def _mark(self, key: str, sight: Sight, what: str) -> bool:
        """Tell who holds it that a process waits; False where it changed meanwhile."""
        if sight.record is None:
            return True
        body = annotated(sight.record, WAITING, f"{self._me} {sight.record.fence}")
        with suppress(CoordinationBackendError):  # then it is told the next time
            return await self._objects.write(key, body, what) is not None
        return True

    async def _undo(self, lease: Lease, data: Mapping[str, str] | None, what: str) -> bool:
        """Vacate what an acquire took that ended without an answer, or see to it that it cannot take it any more."""
        key, holder = self._key(lease.name), lease.holder
        for tries in range(ROUNDS):
            if tries >= AT_ONCE:
                await self._turns.wait(key, tries)
            sight = await self._objects.look(key, what)
            record = sight.lease(lease.name, self._clock.now())
            came = record is not None and record.holder == holder
            if record is not None and came:
                body = self._body(vacated(record, data, record.now), 1, sight)
            elif not self._late.may_come(holder, _version(sight)):
                self._late.settle(holder)
                return False
            elif sight.record is None:
                body = self._body(Lease(lease.name, "", self._first_fence(sight)), 1, sight)
            else:
                body = annotated(sight.record, TOUCHED, token_hex(8))
            if await self._objects.write(key, body, what) is not None:
                self._late.settle(holder)
                return came
        raise crowded(what, ROUNDS)

    def _taken(
        self, sight: Sight, name: str, holder: str, seconds: int, data: Mapping[str, str] | None
    ) -> Lease | None:
        """The record after `holder` took it; None where another one has it, or nothing is known of it."""
        if sight.record is not None and sight.record.name not in (None, name):
            return None
        now = self._clock.now()
        record = sight.lease(name, now)
        return taken(record, name, holder, seconds, data, now, self._clock.wall(), self._first_fence(sight))

    def _first_fence(self, sight: Sight) -> int:
        """The lowest fence that may be given: above all that were seen, and where ours begin, at the server's time."""
        last = None if sight.record is None else sight.record.last_fence
        return max(sight.fence, self._objects.server_time - 1 if last is None else last) + 1

    def _farewell(self, key: str, sight: Sight) -> Body | None:
        """What closing leaves on an object: it is vacated where it was seen to expire, else what others can use."""
        now = self._clock.now()
        name = self._name(key, sight)
        record = sight.lease(name, now) if name is not None else None
        if sight.record is None or not sight.record.holder:
            return None
        if record is not None and not record.live and self._is_labelled(sight):
            return self._body(vacated(record, None, now), 1, sight)
        mark = sight.mark
        return annotated(sight.record, OBSERVED, mark) if sight.refused and not sight.own and mark else None

    def _key(self, name: str) -> str:
        return lease_name(self._prefix, name)

    def _name(self, key: str, sight: Sight) -> str | None:
        """The name that an object stores; None where it stores none of this store."""
        name = None if sight.record is None else sight.record.name
        return name if name is not None and self._key(name) == key else None

    def _lease(self, sight: Sight, name: str) -> Lease:
        lease = sight.lease(name, self._clock.now())
        assert lease is not None
        assert sight.record is not None
        lease.waited = sight.record.waiter not in ("", self._me)
        return lease

    def _body(self, lease: Lease, seconds: int, sight: Sight) -> Body:
        return written(lease, self._key(lease.name), self._prefix, seconds, sight.record, self._me)

    def _is_labelled(self, sight: Sight) -> bool:
        return sight.record is not None and sight.record.labels.get(PREFIX) == self._label


def _version(sight: Sight) -> str:
    return NOTHING if sight.record is None else sight.record.version
