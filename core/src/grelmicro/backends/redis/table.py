"""The records of one namespace on a Redis server: what is sent for each operation, and what the answers mean."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from grelmicro.backends.redis import scripts as scripts
from grelmicro.backends.redis.connections import Connections, Unanswered
from grelmicro.backends.redis.errors import code, is_lasting, reason
from grelmicro.backends.redis.library import NoScriptError, ResponseError
from grelmicro.backends.redis.scripts import Argument, Script, pack
from grelmicro.clock import Clock
from grelmicro.config import check_seconds
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases.lease import NO_DATA, Lease
from grelmicro.leases.retention import DROPPED_KINDS, NOTES

PAGE = 1000
"""How many keys the server looks at for one step of a search."""

SWEEP_PAGE = 500
"""How many keys are looked at for one part of a sweep, so that no request waits long for it."""

BEGIN = b"0"
"""Where a search begins, and what the server says at its end."""

BATCH = 200
"""How many records are read in one go."""

FOR_GOOD = 0

MARGIN = 5.0
"""Seconds for which an acquire without an answer is remembered after it cannot be done any more, as far as one can tell
here; an undo that the server answers asks its clock."""

Arguments = tuple[Argument, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Late:
    """An acquire that ended without an answer."""

    latest: int
    """The time on the server's clock, in microseconds, until which it may be done."""
    rest: "asyncio.Task[bool] | None"
    """Waits for the answer in the background; its result says whether it came."""

    @property
    def is_settled(self) -> bool:
        """Whether the server has answered it by now."""
        rest = self.rest
        return rest is not None and rest.done() and not rest.cancelled() and rest.result()

    async def wait(self, left: float) -> None:
        """Wait for the answer; if none will come, until its time is over, `left` seconds from now."""
        if self.rest is not None and not self.rest.done():
            await asyncio.wait({self.rest}, timeout=left)
        elif not self.is_settled:  # else it came just now
            await asyncio.sleep(left + 0.001)


class Table:
    """The records of one namespace.

    Args:
        connections: to the server.
        namespace: whose records.
        clock: by which the server's time is estimated between its answers.
        retention: seconds for which a free lock's record is kept.
    """

    def __init__(self, connections: Connections, namespace: str, clock: Clock, retention: float) -> None:
        self.prefix = f"{namespace}:lease:".encode()
        self._connections = connections
        self._clock = clock
        self._limit = connections.server.limits.command_timeout
        self._retention = round(retention * 1e3) or 1
        self._late: dict[str, _Late] = {}
        self._ahead = 0.0  # seconds by which the server's time is ahead of the clock, at most
        self._me = token_hex(8)

    def learn_time(self, server_now: float, asked_at: float) -> None:
        """The server said what time it is, when it was asked at `asked_at` by the clock."""
        self._ahead = server_now - asked_at

    async def acquire(self, name: str, holder: str, ttl: float, data: Mapping[str, str] | None, waiting: bool) -> Lease:
        """See `LeaseStore.acquire`. The server does not grant it after the time by which the answer is waited for."""
        what = f"acquiring {name!r}"
        micros = _micros(ttl)
        for _ in range(2):
            now = self._clock.now()
            latest = self._latest(now)
            arguments: Arguments = (holder, self._me, micros, latest, b"1" if waiting else b"", *_encoded(data))
            answer = await self._run(
                scripts.acquire, name, arguments, what, unanswered=partial(self._may_arrive, holder, latest)
            )
            if answer[0] != scripts.LATE:
                return self._granted(name, answer, now)
            self.learn_time(answer[1] / 1e6, now)
        raise _late_twice(what)

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`. The server does not do it after the time by which the answer is waited for."""
        what = f"releasing {lease.name!r}"
        for _ in range(2):
            now = self._clock.now()
            latest = self._latest(now)
            arguments = (lease.holder, self._me, lease.fence, holder, _micros(ttl), latest)
            answer = await self._run(
                scripts.pass_on, lease.name, arguments, what, unanswered=partial(self._may_arrive, holder, latest)
            )
            if answer is None or answer[0] != scripts.LATE:
                return None if answer is None else self._granted(lease.name, answer, now)
            self.learn_time(answer[1] / 1e6, now)
        raise _late_twice(what)

    def _latest(self, now: float) -> int:
        """The server's time, in microseconds, until which the answer to a request of this moment is waited for."""
        return round((now + self._ahead + self._limit) * 1e6)

    def _granted(self, name: str, answer: Sequence[Any], asked_at: float) -> Lease:
        """The record in the answer to an acquire, with the time."""
        lease = _lease(name, answer)
        self.learn_time(lease.now, asked_at)
        return lease

    def _may_arrive(self, holder: str, latest: int, rest: "asyncio.Task[bool] | None") -> None:
        """An acquire ended without an answer, and may be done until `latest` on the server's clock."""
        late = self._late[holder] = _Late(latest, rest)

        def forget() -> None:
            if self._late.get(holder) is late:
                del self._late[holder]

        asyncio.get_running_loop().call_later(2 * self._limit + MARGIN, forget)

    async def renew(self, lease: Lease, ttl: float, data: Mapping[str, str] | None) -> tuple[Lease, bool] | None:
        """The renewed lease and whether it was shortened; None when it is lost. See `LeaseStore.renew`."""
        arguments = self._renewal(lease, ttl, data)
        answer = await self._run(scripts.renew, lease.name, arguments, f"renewing {lease.name!r}", urgent=True)
        return None if answer is None else (_lease(lease.name, answer), answer[0] == 1)

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[tuple[Lease, bool]]:
        """The survivors, each with whether it was shortened; in one round trip."""
        ordered = sorted(renewals, key=lambda renewal: renewal[0].name)
        calls = [(lease.name, self._renewal(lease, ttl, None)) for lease, ttl in ordered]
        answers = await self._run_many(scripts.renew, calls, f"renewing {len(calls)} leases", urgent=True)
        return [
            (_lease(lease.name, answer), answer[0] == 1)
            for (lease, _), answer in zip(ordered, answers, strict=True)
            if answer is not None
        ]

    async def release(self, lease: Lease, data: Mapping[str, str] | None) -> bool:
        """See `LeaseStore.release`. An undo ends only when what it undoes cannot be done any more."""
        arguments = (lease.holder, self._me, lease.fence, self._kept(lease.name), *_encoded(data))
        while True:
            late = None if lease.fence else self._late.get(lease.holder)
            settled = late is None or late.is_settled
            answer = await self._run(scripts.release, lease.name, arguments, f"releasing {lease.name!r}")
            if answer == scripts.DONE:
                return True
            if late is None or settled or answer is None or answer > late.latest:
                return False
            await late.wait((late.latest - answer) / 1e6)

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""
        arguments = (lease.holder, self._me, lease.fence, least)
        answer = await self._run(scripts.raise_fence, lease.name, arguments, f"raising the fence of {lease.name!r}")
        return None if answer is None else _lease(lease.name, answer)

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        answer = await self._run(scripts.read, name, (b"", self._me), f"reading {name!r}", changes=False)
        return None if answer is None else _lease(name, answer)

    async def scan(self, prefix: str) -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        names = sorted({name async for page in self._pages(prefix) for name in page})
        for begin in range(0, len(names), BATCH):
            batch = names[begin : begin + BATCH]
            calls: list[tuple[str, Arguments]] = [(name, (b"", self._me)) for name in batch]
            answers = await self._run_many(scripts.read, calls, "reading records", changes=False)
            for name, answer in zip(batch, answers, strict=True):
                if answer is not None:
                    yield _lease(name, answer)

    async def tidy(self) -> None:
        """Set free what expired."""
        async for names in self._pages(""):
            await self._vacate(names)

    async def sweep(self, cursor: bytes) -> bytes:
        """Set free those that expired among the next few locks; where to go on from, which is `BEGIN` at the end."""
        cursor, names = await self._page("", cursor, SWEEP_PAGE)
        await self._vacate([name for name in names if name.startswith(DROPPED_KINDS)])
        return cursor

    async def _vacate(self, names: Sequence[str]) -> None:
        """Set free those of the records that expired."""
        calls = [(name, self._vacation(name)) for name in names]
        await self._run_many(scripts.vacate, calls, "vacating expired leases")

    def _vacation(self, name: str) -> Arguments:
        """What `vacate` needs to set a record free: the data of a note is void then."""
        return (b"", b"", self._kept(name), *_encoded({} if name.startswith(NOTES) else None))

    def _renewal(self, lease: Lease, ttl: float, data: Mapping[str, str] | None) -> Arguments:
        return (lease.holder, self._me, lease.fence, _micros(ttl), *_encoded(data))

    def _kept(self, name: str) -> int:
        """Milliseconds for which its record is kept once it is free and without data."""
        return self._retention if name.startswith(DROPPED_KINDS) else FOR_GOOD

    def _key(self, name: str) -> bytes:
        return self.prefix + name.encode()

    async def _pages(self, prefix: str) -> AsyncIterator[list[str]]:
        """The names that begin with `prefix`, a few at a time, in no order, and some of them more than once."""
        cursor = BEGIN
        while True:
            cursor, names = await self._page(prefix, cursor, PAGE)
            if names:
                yield names
            if cursor == BEGIN:
                return

    async def _page(self, prefix: str, cursor: bytes, size: int) -> tuple[bytes, list[str]]:
        """Where to go on from, and the names that begin with `prefix` among about `size` keys of the server."""
        pattern = _literally(self._key(prefix)) + b"*"
        [answer] = await self._connections.ask(
            pack(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", size), 1, "looking for records", changes=False
        )
        if isinstance(answer, ResponseError):
            raise _refusal(answer, "looking for records")
        cursor, keys = answer
        return cursor, [key[len(self.prefix) :].decode(errors="replace") for key in keys]

    async def _run(
        self,
        script: Script,
        name: str,
        arguments: Arguments,
        what: str,
        *,
        urgent: bool = False,
        changes: bool = True,
        unanswered: Unanswered | None = None,
    ) -> Any:
        """Run a script on one record; its answer, None for nil."""
        key = self._key(name)
        ask = partial(
            self._connections.ask, replies=1, what=what, urgent=urgent, changes=changes, unanswered=unanswered
        )
        [answer] = await ask(script.call(key, arguments))
        if isinstance(answer, NoScriptError):  # so it did not run
            [answer] = await ask(script.full_call(key, arguments))
        if isinstance(answer, ResponseError):
            raise _refusal(answer, what)
        return answer

    async def _run_many(
        self,
        script: Script,
        calls: Sequence[tuple[str, Arguments]],
        what: str,
        *,
        urgent: bool = False,
        changes: bool = True,
    ) -> list[Any]:
        """Run a script on each of several records, one key a call, in one round trip; the answers, None for nil."""
        if not calls:
            return []
        commands = [(self._key(name), arguments) for name, arguments in calls]
        answers = await self._connections.ask(
            b"".join(script.call(*command) for command in commands), len(calls), what, urgent=urgent, changes=changes
        )
        unknown = [number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            text = b"".join(script.full_call(*commands[number]) for number in unknown)
            again = await self._connections.ask(text, len(unknown), what, urgent=urgent, changes=changes)
            for number, answer in zip(unknown, again, strict=True):
                answers[number] = answer
        for number, answer in enumerate(answers):
            if isinstance(answer, ResponseError):
                if code(answer) != "WRONGTYPE":
                    raise _refusal(answer, what)
                answers[number] = None  # what holds something else holds no lease
        return answers


def _late_twice(what: str) -> BackendUnavailableError:
    """The error where the server calls a request late that it answered in time: its clock was set, more than once."""
    return BackendUnavailableError(f"{what}: it came too late to the server twice: check its clock and the network")


def _refusal(error: ResponseError, what: str) -> BackendUnavailableError:
    return BackendUnavailableError(f"{what}: Redis did not do it: {reason(error)}", lasting=is_lasting(error))


def _lease(name: str, answer: Sequence[Any]) -> Lease:
    """What `answer` of the scripts means."""
    _, holder, fence, transitions, acquired_at, renewed_at, expires_at, now, data, waited = answer
    return Lease(
        name,
        holder.decode(errors="replace"),
        fence,
        transitions,
        acquired_at / 1e6,
        renewed_at / 1e6,
        expires_at / 1e6,
        now / 1e6,
        json.loads(data) if data else NO_DATA,
        waited == 1,
    )


def _encoded(data: Mapping[str, str] | None) -> Arguments:
    """The last argument of a script: none when the data stays, nothing in it when there is to be none."""
    if data is None:
        return ()
    return (json.dumps(dict(data)) if data else "",)


def _micros(ttl: float) -> int:
    return round(check_seconds("ttl", ttl) * 1e6) or 1


def _literally(text: bytes) -> bytes:
    """A pattern of Redis that matches nothing but `text`."""
    return b"".join(b"\\" + bytes((byte,)) if byte in b"*?[]\\" else bytes((byte,)) for byte in text)
