"""Releases under way: who waits in this process asks right behind one, and need not wait for its answer."""

from collections.abc import Awaitable, Callable

from grelmicro.leases.lease import Lease


class Release:
    """A release whose answer is awaited, and what became of those who asked behind it."""

    __slots__ = ("followed", "over", "refused")

    def __init__(self) -> None:
        self.followed = False
        self.refused = False
        self.over = False


class Releases:
    """Wakes who waits in this process: when a release is sent, and at its end if nobody has got the lease since.

    Whoever asks early mostly gets it: the server carries the release out first, or lets the request wait for it.

    Args:
        wake: hints those who wait for a name.
    """

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._wake = wake
        self._under_way: dict[str, Release] = {}

    def begin(self, name: str) -> Release:
        """A release is about to be sent; give what this returns to `end`, whatever becomes of it."""
        release = self._under_way[name] = Release()
        self._wake(name)
        return release

    def end(self, name: str, release: Release) -> None:
        """It was answered, or given up: then too, since it may have been done."""
        release.over = True
        if self._under_way.get(name) is release:
            del self._under_way[name]
        if release.refused or not release.followed:
            self._wake(name)

    async def follow(self, name: str, holder: str, request: Awaitable[Lease]) -> Lease:
        """The answer to a request for the lease, which is sent behind the release of that name if one is under way."""
        release = self._under_way.get(name)
        if release is None:
            return await request
        release.followed = True
        granted = False
        try:
            lease = await request
            granted = lease.granted_to(holder)
            return lease
        finally:
            if not granted:  # it came too early
                release.refused = True
                if release.over:
                    self._wake(name)
