"""The reason of a loss that a store reports: an operator broke the lease, or it is unknown."""

from typing import Protocol

from grelmicro.clock import Clock, TimeLimit
from grelmicro.leases import Lease
from grelmicro.lifecycle import distinguish_cancellation

TAKEN = "it expired or was taken over"
"""Why a lease is lost that the store does not find any more."""

BROKEN = "it was broken by "
"""How the reason begins when an operator took it away; the operator's worker name follows."""

CLOSED = "its backend was closed"
"""How the reason begins when the app that served it closed."""

REASON_LIMIT = 1.0
"""Seconds for which the reason is looked for; the holder waits for it."""


class Readable(Protocol):
    """What the reason is read from."""

    @property
    def clock(self) -> Clock: ...

    async def read(self, name: str) -> Lease | None: ...


def note_name(name: str) -> str:
    """The name of the record with the operator that broke the lease `name`, and the fence that it had."""
    return f"break:{name}"


async def why_lost(records: Readable, lease: Lease, deadline: float) -> str:
    """Why `lease` was lost, as its holder asks that was sure of it until `deadline`."""
    if records.clock.now() < deadline:  # else it ran out, as leases do
        try:
            with distinguish_cancellation():
                async with TimeLimit(records.clock, REASON_LIMIT):
                    note = await records.read(note_name(lease.name))
        except Exception:
            return TAKEN
        if note is not None and note.data.get("fence") == str(lease.fence):
            return BROKEN + (note.data.get("worker") or "an operator")
    return TAKEN
