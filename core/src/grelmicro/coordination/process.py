"""The record of this process at each store: host, pid and application, for operators."""

import asyncio
import logging
from collections.abc import Mapping
from contextvars import Context
from random import random

from grelmicro.clock import TimeLimit, sleep
from grelmicro.leases import DroppingLeases, Lease, LeaseStore
from grelmicro.leases.identity import describe_process, mint, process_id
from grelmicro.leases.retention import NOTES
from grelmicro.lifecycle import carry_out, distinguish_cancellation, end_or_leave, outlast, raise_if_cancelled

logger = logging.getLogger("grelmicro.coordination")

PROCESS_LEASE = 900.0
"""Seconds for which the record of a process lives without being renewed."""

PUBLISH_DELAY = 1.0
"""Seconds between opening and the first request: a program that is done by then needs no record."""

REQUEST_LIMIT = 5.0
"""Seconds for one request."""

RETRY_PAUSE = 60.0
"""Seconds between two tries, while the store fails."""

CLOSE_LIMIT = 1.0
"""Seconds for which closing takes the record back."""

OLD_NOTE_S = 24 * 3600.0
"""Seconds after its last renewal at which a note is dropped where the store drops none itself.

Clocks of hosts are compared here, so it is much longer than they differ; should they, its process publishes it again.
"""

MAX_DROPS = 100
"""Old notes that one process drops, at most."""


def process_name(process: str) -> str:
    """The name of the record of a process."""
    return f"process:{process}"


class ProcessRecord:
    """Publishes this process at one store, and renews that, in the background.

    It is no lock, so it is best effort: what fails is tried again, and never fails or delays anything else. Every
    request is the same one, by which the holder extends its lease, so that one without an answer does no harm.

    Args:
        store: where.
        worker: the readable name of this process; empty: none.
    """

    def __init__(self, store: LeaseStore, worker: str) -> None:
        self._store = store
        self._clock = store.clock
        self._name = process_name(process_id())
        self._holder = f"{worker or 'process'}:{mint()}"
        self._data: Mapping[str, str] = {**describe_process(), "worker": worker}
        self._published: Lease | None = None
        self._allowed = True
        # In a context of its own: it outlives the request, or the block, that happened to open the app.
        self._task = asyncio.get_running_loop().create_task(
            self._keep_published(), name="grelmicro-process", context=Context()
        )

    async def close(self) -> None:
        """Take it back, as far as the store answers in a moment."""
        await outlast(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await end_or_leave({self._task})
        if self._published is not None:
            await carry_out(self._take_back(self._published), 2 * CLOSE_LIMIT, "taking back the record of this process")

    async def _take_back(self, published: Lease) -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT):
                await self._store.release(published, data={})
                if isinstance(self._store, DroppingLeases):
                    await self._store.drop(self._name)
        except Exception as error:
            logger.debug("the record of this process ends by itself: %s", error)

    async def _keep_published(self) -> None:
        await sleep(self._clock, PUBLISH_DELAY * (1 + random()))  # the processes of a server start together
        tidied = False
        while self._allowed:
            raise_if_cancelled()
            pause = RETRY_PAUSE
            try:
                with distinguish_cancellation():
                    async with TimeLimit(self._clock, REQUEST_LIMIT):
                        await self._publish()
                    if not tidied:
                        tidied = True
                        await self._drop_old()
                pause = PROCESS_LEASE / 3
            except Exception as error:
                logger.debug("this process could not be published: %s", error)
            await sleep(self._clock, pause)

    async def _publish(self) -> None:
        if self._published is None and isinstance(self._store, DroppingLeases):
            # Where nothing is ever dropped, each start of a process would leave a record behind.
            self._allowed = await self._store.drop(self._name)
            if not self._allowed:
                return
        lease = await self._store.acquire(self._name, self._holder, PROCESS_LEASE, data=self._data)
        self._published = lease if lease.granted_to(self._holder) else None

    async def _drop_old(self) -> None:
        """Drop what killed processes left, and notes about broken leases, where the store does not."""
        store = self._store
        if not isinstance(store, DroppingLeases) or not self._allowed:
            return
        oldest = self._clock.wall() - OLD_NOTE_S
        async with TimeLimit(self._clock, REQUEST_LIMIT):
            notes = [lease async for lease in store.scan() if lease.name.startswith(NOTES)]
        for name in [lease.name for lease in notes if lease.renewed_at < oldest][:MAX_DROPS]:
            async with TimeLimit(self._clock, REQUEST_LIMIT):
                await store.drop(name)
