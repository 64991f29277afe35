"""Acquires that ended without an answer: their writes may still come, and must find the object changed."""

from collections.abc import Iterator
from contextlib import contextmanager

from grelmicro.errors import BackendUnavailableError

MOST = 100_000
"""Holders that are remembered, each until its undo is done. Only an undo that was given up leaves one behind."""

NOTHING = ""
"""The version of an object that did not exist."""


class Late:
    """On which versions of objects the unanswered writes of each holder are based: once that has changed, they fail."""

    def __init__(self) -> None:
        self._versions: dict[str, set[str]] = {}

    @contextmanager
    def expect(self, holder: str, version: str) -> Iterator[None]:
        """Send a write for `holder` in this block; it is remembered until the block ends with an answer."""
        self._versions.setdefault(holder, set()).add(version)
        try:
            yield
        except BackendUnavailableError:
            self._came(holder, version)
            raise
        except BaseException:
            while len(self._versions) > MOST:
                del self._versions[next(iter(self._versions))]
            raise
        self._came(holder, version)

    def may_come(self, holder: str, version: str) -> bool:
        """Whether a write for `holder` is under way that succeeds while the object has this version."""
        return version in self._versions.get(holder, ())

    def settle(self, holder: str) -> None:
        """None of its writes can succeed any more."""
        self._versions.pop(holder, None)

    def _came(self, holder: str, version: str) -> None:
        versions = self._versions.get(holder)
        if versions is not None:
            versions.discard(version)
            if not versions:
                del self._versions[holder]
