"""What callers read about an election."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from grelmicro.leases import Lease
from grelmicro.leases.identity import public_name

LEASE_DURATION = "grelmicro/lease_duration"
"""The key under which a leader stores, beside its metadata, for how long it asked."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """Who leads, as the store last said. The shape follows client-go's LeaderElectionRecord, with a fence."""

    holder: str
    """The leader: its worker's name and a public part that differs in each term; `""` when there is no leader."""
    fence: int
    """The number of this term: it grows with every new one. Give it to the resources that the leader writes to."""
    lease_duration: float
    """Seconds for which the lease was last asked."""
    acquired_at: datetime
    """When this term began, by the store's clock; for display."""
    renewed_at: datetime
    """When it was last renewed, by the store's clock; for display."""
    transitions: int
    """How often leadership changed hands."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the leader attached."""
    worker: str = ""
    """The readable name of the leader's worker; `""` when there is no leader."""

    @classmethod
    def of(cls, lease: Lease) -> "LeaderRecord":
        """The record that `lease` holds."""
        metadata = dict(lease.data)
        duration = metadata.pop(LEASE_DURATION, "0")
        return cls(
            holder=public_name(lease.name, lease.holder),
            fence=lease.fence,
            lease_duration=float(duration),
            acquired_at=datetime.fromtimestamp(lease.acquired_at, UTC),
            renewed_at=datetime.fromtimestamp(lease.renewed_at, UTC),
            transitions=lease.transitions,
            metadata=metadata,
            worker=lease.worker,
        )
