"""Lease objects: read, and written only where they are still as they were read."""

from grelmicro.backends.kubernetes.observation import Observations, Sight, is_newer
from grelmicro.backends.kubernetes.record import Body, record_of
from grelmicro.backends.kubernetes.requests import Answer, Gone, Requests
from grelmicro.clock import Clock
from grelmicro.errors import BackendUnavailableError

PAGE = 500
"""Objects that are listed in one request."""

SCANS = 5
"""How often a list is begun that the server forgets before its end."""


class Objects:
    """Lease objects by their names, with what this process saw of them.

    Args:
        requests: to the API server.
        clock: the time of this process.
    """

    def __init__(self, requests: Requests, clock: Clock) -> None:
        self.seen = Observations(clock)
        self._requests = requests
        self._clock = clock
        self._ahead: float | None = None  # seconds by which the server's time is ahead of the clock

    @property
    def server_time(self) -> int:
        """The server's time in seconds since 1970, as far as it told it."""
        if self._ahead is None:
            return int(self._clock.wall())
        return int(round(self._clock.now() + self._ahead, 3))  # the sum may be a little less than what was told

    async def look(self, name: str, what: str, *, urgent: bool = False) -> Sight:
        """Read an object.

        Raises:
            BackendUnavailableError: there was no answer.
        """
        answer = await self._requests.read(name, what, urgent=urgent)
        self._learn_time(answer)
        return self.seen.see(name, None if answer.status == 404 else record_of(answer.body), answer.date)

    async def write(self, name: str, body: Body, what: str, *, urgent: bool = False) -> Sight | None:
        """Write an object that is still as it was read, or create one that did not exist; None: it has changed.

        Raises:
            BackendUnavailableError: it was not done.
            OutcomeUnknownError: it may have been done, or may be done yet.
        """
        if "resourceVersion" in body["metadata"]:
            # With it goes the uid: without that, the server creates anew what was deleted meanwhile.
            answer = await self._requests.replace(name, body, what, urgent=urgent)
        else:
            answer = await self._requests.create(body, what, urgent=urgent)
        self._learn_time(answer)
        if answer.status in (200, 201):
            return self.seen.see(name, record_of(answer.body))
        return None

    async def delete(self, name: str, what: str) -> bool:
        """Delete an object, if it exists; False: that is not allowed.

        Raises:
            BackendUnavailableError: it was not done.
            OutcomeUnknownError: it may have been done.
        """
        return await self._requests.delete(name, what)

    async def look_at_all(self, selector: str, what: str) -> list[tuple[str, Sight]]:
        """The names of all objects with the labels, with what was seen of them.

        Raises:
            BackendUnavailableError: there was no answer.
        """
        for _ in range(SCANS):
            found: list[tuple[str, Sight]] = []
            token = ""
            try:
                while True:
                    answer = await self._requests.list(selector, what, limit=PAGE, token=token)
                    found += self._take_list(answer)
                    token = answer.body["metadata"].get("continue") or ""
                    if not token:
                        return found
            except Gone:  # it took so long that this state of the list is no longer known
                continue
        raise BackendUnavailableError(f"{what}: the server forgot each list before it was read: check its load")

    def learn(self, body: Body, *, deleted: bool = False) -> Body | None:
        """Take in an object that the watch brought, unless a newer one is known; the one that was known before.

        None also where who waits for it should ask: others go before it again and again.
        """
        name = body["metadata"]["name"]
        record = record_of(body)
        sight = self.seen.get(name)
        known = None if sight is None else sight.record
        if known is None or is_newer(record, known):
            if not deleted:
                self.seen.see(name, record, keep=sight is not None)
            elif known is not None:
                self.seen.see(name, None)
        if known is None or (sight is not None and sight.is_overtaken(self._clock.now())):
            return None
        return known.body

    def _take_list(self, answer: Answer) -> list[tuple[str, Sight]]:
        self._learn_time(answer)
        found = []
        for body in answer.body.get("items") or []:
            record, name = record_of(body), body["metadata"]["name"]
            keep = self.seen.get(name) is not None
            found.append((name, self.seen.see(name, record, answer.date, keep=keep)))
        return found

    def _learn_time(self, answer: Answer) -> None:
        if answer.date is not None:
            self._ahead = answer.date - self._clock.now()
