"""Edit the data of a record as one step: whoever edits it holds the record's own short lease meanwhile."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

from grelmicro.clock import Clock, sleep
from grelmicro.errors import CoordinationBackendError, OutcomeUnknownError
from grelmicro.leases.identity import mint
from grelmicro.leases.lease import Lease, Waiter

EDIT_LEASE = 5.0
"""Seconds for which an editor holds a record; one that dies meanwhile delays the others by this at most."""

RETRY_PAUSE = 0.1
"""Seconds between two looks at a record whose release ended unknown."""

POLL = 0.1
"""Seconds between two tries to take a record that another editor has, where the store gives no hints."""

Change = Callable[[Mapping[str, str]], Mapping[str, str] | None]


class Records(Protocol):
    """What an edit needs of a backend, whose `release` repeats itself when it ended unknown."""

    @property
    def clock(self) -> Clock: ...

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease: ...

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool: ...

    async def read(self, name: str) -> Lease | None: ...

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]: ...


async def edit(records: Records, name: str, change: Change) -> bool:
    """Replace the data of `name` by `change(data)`; whether this edit did it (no when `change` returns None).

    Raises:
        CoordinationBackendError: the store failed, or gave no answer by which the outcome could be told.
    """
    while True:
        editor = f"edit:{mint()}"
        lease = await _take(records, name, editor)
        try:
            data = change(lease.data)
        except BaseException:
            await _give_back(records, lease)
            raise
        if data is None:
            await _give_back(records, lease)
            return False
        if await _put_back(records, lease, {**data, "edit": editor}):
            return True
        # The lease ended before the change arrived, as when this process stood still: it begins with what is there now.


async def _take(records: Records, name: str, editor: str) -> Lease:
    lease = await records.acquire(name, editor, EDIT_LEASE)
    if lease.granted_to(editor):  # nobody else edits it: a subscription would be for nothing
        return lease
    try:
        async with records.watch(name) as waiter:
            while not (lease := await records.acquire(name, editor, EDIT_LEASE, waiting=True)).granted_to(editor):
                await waiter.wait(lease.remaining + 0.001 if waiter.pushes else min(lease.remaining + 0.001, POLL))
    except BaseException:
        if lease.granted_to(editor):  # and then the end of the subscription was cancelled, or failed
            await _give_back(records, lease)
        raise
    return lease


async def _give_back(records: Records, lease: Lease) -> None:
    with suppress(CoordinationBackendError):  # then it ends by itself
        await records.release(lease)


async def _put_back(records: Records, lease: Lease, data: Mapping[str, str]) -> bool:
    """Release with the new data; if the answer does not tell, the record does, once it is no longer the editor's."""
    until = records.clock.now() + EDIT_LEASE
    failure: CoordinationBackendError | None = None
    try:
        if await records.release(lease, data=data):
            return True
    except CoordinationBackendError as error:
        failure = error  # it is repeated in the background
    while True:
        try:
            record = await records.read(lease.name)
            if record is None or not record.granted_to(lease.holder):
                return record is not None and record.data.get("edit") == data["edit"]
        except CoordinationBackendError as error:
            failure = error
        if records.clock.now() + RETRY_PAUSE > until:
            raise OutcomeUnknownError(
                f"changing {lease.name!r}: the store gave no answer for {EDIT_LEASE:g} s: check the store"
            ) from failure
        await sleep(records.clock, RETRY_PAUSE)
