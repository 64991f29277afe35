"""What the demonstration writes: lines, and in a terminal a spinner while something goes on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Screen:
    """The terminal, or the plain text of whoever reads a pipe.

    Args:
        silent: write nothing.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self._console = Console(quiet=silent, highlight=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        """One line; words that a terminal shows in a style are plain elsewhere."""
        self._console.print(text, style=style or None, markup=False)
        sys.stdout.flush()

    def told(self, title: str, found: str, verdict: str, *, good: bool) -> None:
        """What was tried, what was found, and what that means."""
        self._console.print(f"{title:<56} {found:<36} ", end="", markup=False)
        self._console.print(verdict, style="bold green" if good else "bold red", markup=False)
        sys.stdout.flush()

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner while the block runs, where somebody can see it."""
        if self._console.is_terminal and not self._console.quiet:
            with self._console.status(text):
                yield
        else:
            yield
