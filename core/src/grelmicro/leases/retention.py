"""How long the record of a free lease is kept."""

from grelmicro.leases.lease import Lease

RETENTION = 7 * 24 * 3600.0
"""Seconds for which the record of a free lock without data is kept: names made per request must not grow a store."""

DROPPED_KINDS = ("lock:", "tasklock:")
"""The kinds whose free records are dropped. Leaders and schedules are kept for good."""


def droppable(record: Lease) -> bool:
    """Whether the record may be dropped once it has been free for the retention."""
    return not record.holder and not record.data and record.name.startswith(DROPPED_KINDS)
