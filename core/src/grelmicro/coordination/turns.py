"""Turns: a process whose own line is long lets the other processes that wait have the lease now and then."""

from dataclasses import dataclass

from grelmicro.leases import Lease

LOCAL_RUN = 4
"""Grants in a row to one process before it lets another one, if one waits, go first."""

LONGEST_PAUSE = 8
"""How many times the usual time until another process knows of a release is waited at most."""

MOST_RUNS = 1000
"""Names for which such grants are counted at most."""


@dataclass(slots=True)
class _Run:
    """Grants in a row to this process while another one waits."""

    fence: int  # of the last one
    length: int = 1  # since others were let go first
    pause: int = 1  # the next one: where others did not come in time, they get more of it


class Turns:
    """The runs of one backend, by name."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def granted(self, lease: Lease) -> None:
        """This process got it."""
        if not lease.waited:
            self._runs.pop(lease.name, None)
            return
        run = self._runs.get(lease.name)
        if run is not None and lease.fence == run.fence + 1:
            run.fence = lease.fence
            run.length += 1
            return
        if len(self._runs) >= MOST_RUNS:
            self._runs.clear()  # of names that nobody may ask for again
        self._runs[lease.name] = _Run(lease.fence)

    def are_over(self, name: str) -> bool:
        """Whether this process had it so often in a row that another one, which waits, is to go first."""
        run = self._runs.get(name)
        return run is not None and run.length >= LOCAL_RUN

    def begin_pause(self, name: str) -> int:
        """Let others go first now: for how many times the usual time; 0 if it is not their turn."""
        if not self.are_over(name):
            return 0
        run = self._runs[name]
        run.length = 0
        pause, run.pause = run.pause, min(run.pause * 2, LONGEST_PAUSE)
        return pause

    def clear(self) -> None:
        """Forget the runs of an event loop that is gone."""
        self._runs.clear()
