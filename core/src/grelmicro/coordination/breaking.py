"""Take a lease away from its holder: for operators, where a holder hangs and goes on to renew."""

import logging
from contextlib import suppress

from grelmicro.clock import sleep
from grelmicro.coordination.holders import LeaseHolder, describe
from grelmicro.coordination.losses import note_name
from grelmicro.coordination.protocols import LeaseBackend
from grelmicro.errors import CoordinationBackendError, OutcomeUnknownError
from grelmicro.leases import Lease
from grelmicro.leases.identity import mint

logger = logging.getLogger("grelmicro.coordination")

BREAK_LIMIT = 10.0
"""Seconds for which a release without an answer is tried again."""

RETRY_PAUSE = 0.2
"""Seconds between two such tries."""

FENCE_LEASE = 5.0
"""Seconds for which the lease is taken to raise its fence; it is given back at once."""

NOTE_LEASE = 3600.0
"""Seconds for which the note about a broken lease is kept, at least."""


async def break_lease(backend: LeaseBackend, name: str, if_fence: int | None, worker: str) -> LeaseHolder | None:
    """Set the lease of a stored name free; the holder from which it was taken, or None if there was none to break.

    The one step that counts is the store's own release, under the holder and the fence that were read: a holder that
    renews meanwhile still loses it, and one that came meanwhile keeps it.

    Args:
        backend: where it is.
        name: the stored name.
        if_fence: break it only under this fence; None: under any.
        worker: the readable name of the operator.

    Raises:
        BackendUnavailableError: the store failed.
        OutcomeUnknownError: the store did not answer. The release is repeated in the background until the lease ends.
    """
    lease = await backend.read(name)
    if lease is None or not lease.live or if_fence not in (None, lease.fence):
        return None
    holder = await describe(backend, lease)
    await _leave_note(backend, lease, worker)
    if not await _vacate(backend, lease):
        return None
    logger.warning("%s was broken: it was held by %r under fence %d", name, lease.worker, lease.fence)
    await _raise_fence(backend, name, worker)
    return holder


async def _leave_note(backend: LeaseBackend, lease: Lease, worker: str) -> None:
    """Leave a note for the holder before the release, so that its error names the operator."""
    # The store's own operations: a note is no lock, so one that was written without an answer needs no undo.
    records = getattr(backend, "store", backend)
    name, holder = note_name(lease.name), f"{worker}:{mint()}"
    try:
        for _ in range(2):
            note = await records.acquire(name, holder, NOTE_LEASE, data={"fence": str(lease.fence), "worker": worker})
            if note.granted_to(holder):
                return
            await records.release(note)  # that of an earlier break
    except Exception as error:
        logger.debug("%s is broken without a note: %s", lease.name, error)


async def _vacate(backend: LeaseBackend, lease: Lease) -> bool:
    """Release `lease`; whether it was held until then, as far as that is known."""
    until = backend.clock.now() + BREAK_LIMIT
    unknown = False
    while True:
        try:
            # After a request without an answer, a "no" means that it was done then, or that the holder gave it back.
            return await backend.release(lease) or unknown
        except OutcomeUnknownError:
            unknown = True
            if backend.clock.now() + RETRY_PAUSE > until:
                raise
        await sleep(backend.clock, RETRY_PAUSE)


async def _raise_fence(backend: LeaseBackend, name: str, worker: str) -> None:
    """Let the fence of the broken lease be an old one, also before anybody else acquires it."""
    holder = f"{worker}:{mint()}"
    with suppress(CoordinationBackendError):  # then the next holder does it
        lease = await backend.acquire(name, holder, FENCE_LEASE)
        if lease.granted_to(holder):
            await backend.release(lease)
