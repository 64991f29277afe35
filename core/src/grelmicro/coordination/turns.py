"""Turns: a process whose own line is long lets the other processes that wait have the lease now and then."""

from dataclasses import dataclass

from grelmicro.leases import Lease

LOCAL_RUN = 4
"""Grants in a row to one process before it lets another one, if one waits, go first."""

SHORTEST_TURN_S = 0.015
"""Seconds that such a row lasts at least: letting others go first costs about as much as a grant."""

LONGEST_PAUSE = 8
"""How many times the usual time until another process knows of a release is waited at most."""

TURN_TO_PAUSE = 16
"""How many times longer than the longest pause the turn after it lasts, if no other process came: none may be left."""

MOST_RUNS = 1000
"""Names for which such grants are counted at most."""


@dataclass(slots=True)
class _Run:
    """Grants in a row to this process while another one waits."""

    fence: int  # of the last one
    began_at: float  # when others were last let go first, by the store's clock
    lasted: float = 0.0  # seconds from then until the last one
    least: float = SHORTEST_TURN_S  # seconds that it lasts at least
    length: int = 1  # since then
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
            if not run.length:  # no other process came during the pause
                run.began_at = lease.now
            run.fence = lease.fence
            run.lasted = lease.now - run.began_at
            run.length += 1
            return
        if len(self._runs) >= MOST_RUNS:
            self._runs.clear()  # of names that nobody may ask for again
        self._runs[lease.name] = _Run(lease.fence, lease.now)

    def are_over(self, name: str) -> bool:
        """Whether this process had it so often in a row that another one, which waits, is to go first."""
        run = self._runs.get(name)
        return run is not None and run.length >= LOCAL_RUN and run.lasted >= run.least

    def begin_pause(self, name: str, notice: float) -> float:
        """Let others go first now: for how many seconds; 0.0 if it is not their turn.

        Args:
            name: what is waited for.
            notice: the usual seconds until another process knows of a release.
        """
        if not self.are_over(name):
            return 0.0
        run = self._runs[name]
        seconds = run.pause * notice
        if run.pause == LONGEST_PAUSE:
            run.least = max(SHORTEST_TURN_S, seconds * TURN_TO_PAUSE)
        run.pause = min(run.pause * 2, LONGEST_PAUSE)
        run.length = 0
        return seconds

    def clear(self) -> None:
        """Forget the runs of an event loop that is gone."""
        self._runs.clear()
