"""What a store refuses to do with a Lease object, in words with a remedy."""

from grelmicro.backends.kubernetes.observation import Sight
from grelmicro.backends.kubernetes.record import MOST, NAME
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases.lease import Lease


def check_name(sight: Sight, name: str, what: str) -> None:
    """Refuse an object that stores another name."""
    if sight.record is not None and sight.record.name not in (None, name):
        raise BackendUnavailableError(
            f"{what}: the Lease {sight.record.body['metadata']['name']!r} keeps another name: somebody changed its "
            f"annotation {NAME}: correct it, or delete the Lease while nobody holds it"
        )


def check_fence(lease: Lease, what: str) -> None:
    """Refuse a fence that a Lease object cannot hold."""
    if lease.fence > MOST:
        raise BackendUnavailableError(
            f"{what}: its fencing tokens are used up, since a Lease counts to {MOST} in leaseTransitions: use another "
            "name, or delete the Lease if nobody compares its tokens with earlier ones"
        )


def crowded(what: str, rounds: int) -> BackendUnavailableError:
    """The error of an operation that others came before each time."""
    return BackendUnavailableError(
        f"{what}: others changed the Lease before each of {rounds} tries: look for what writes to it so often"
    )
