"""The open blocks of one lock: which lease each of them guards, also where it is left elsewhere than it was entered."""

from typing import Protocol, TypeVar

from grelmicro.coordination.identity import Owner


class Owned(Protocol):
    """What was acquired for a block."""

    @property
    def owner(self) -> Owner:
        """The task or thread that holds it."""


H = TypeVar("H", bound=Owned)


class Blocks(list[H]):
    """The handles of the blocks that were entered through one object and not left yet."""

    def leave(self, owner: Owner) -> H | None:
        """The handle of the block that `owner` leaves; None when that cannot be told.

        It is the last one that `owner` entered. A framework may enter a block in one task or thread and leave it in
        another; then it is the only one whose owner has ended, or else the only one.
        """
        for handle in reversed(self):
            if handle.owner is owner:
                break
        else:
            others = [handle for handle in self if handle.owner.done()] or self
            if len(others) != 1:
                return None
            handle = others[0]
        try:
            self.remove(handle)
        except ValueError:  # another thread left it in this very moment
            return None
        return handle
