"""Things that an app can use, which write down what becomes of them."""

from typing import Self


class Part:
    """Writes into `log` when it opens and closes, and fails where it is told to."""

    def __init__(
        self, name: str, log: list[str], *, opening: BaseException | None = None, closing: BaseException | None = None
    ) -> None:
        self.name = name
        self.log = log
        self.opening = opening
        self.closing = closing

    async def __aenter__(self) -> Self:
        if self.opening is not None:
            raise self.opening
        self.log.append(f"open {self.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.log.append(f"close {self.name}")
        if self.closing is not None:
            raise self.closing
