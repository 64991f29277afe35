"""The highest fence that this process has seen of each name, so that it never hands one out again."""

from collections import OrderedDict
from collections.abc import Hashable

from grelmicro.leases.lease import Lease

MAX_FENCES = 10_000
"""Names whose highest fence is remembered; the one that was used longest ago is forgotten first."""


class Fences:
    """What this process has seen, over all stores and event loops: a store that is opened anew may have old records."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[Hashable, str], tuple[int, str]] = OrderedDict()

    def see(self, place: Hashable, lease: Lease, holder: str = "") -> int:
        """Take note of a record; if it is a grant to `holder` that repeats a fence, the lowest one that may be given.

        Args:
            place: where the record is; see `LeaseStore.place`.
            lease: the record as the store answered it.
            holder: the one that asked for it.

        Returns:
            0 if nothing is wrong.
        """
        key = (place, lease.name)
        seen = self._seen.pop(key, None)
        if seen is None or lease.fence > seen[0]:
            self._seen[key] = (lease.fence, lease.holder)
            if len(self._seen) > MAX_FENCES:
                self._seen.popitem(last=False)
            return 0
        self._seen[key] = seen
        if not holder or not lease.granted_to(holder):
            return 0
        # The holder's own lease is extended under the same fence.
        return 0 if seen == (lease.fence, holder) else seen[0] + 1


fences = Fences()
"""Those of this process."""
