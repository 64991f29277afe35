"""Hints that a server pushes, believed only while those that a process sends to itself come round."""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from secrets import token_hex

from grelmicro.clock import Clock, Signal, TimeLimit, expect, sleep
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases.lease import SignalWaiter, Waiter
from grelmicro.leases.outage import Outage
from grelmicro.lifecycle import distinguish_cancellation

logger = logging.getLogger("grelmicro.coordination")

ANSWER_LIMIT = 3.0
"""Seconds within which a connection, a subscription or a hint to oneself has to be there."""

TEST_INTERVAL = 30.0
"""Seconds after which hints that somebody relies on are tested again."""

OPENING_LIMIT = 1.0
"""Seconds for which opening waits for the first test: without its outcome the first waiters poll."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds between two tries to get hints: doubled from the first to the longest."""

SOURCE = "hints"
"""What notices an outage here, for the log."""

MOST_UNUSED = 100
"""Topics that stay subscribed at most although nobody waits: a contended name is soon waited for again."""


class Feed(ABC):
    """The connection on which the messages of a server arrive."""

    @abstractmethod
    async def listen(self, heard: Callable[[str], None], connected: Callable[[], None]) -> None:
        """Connect, call `connected`, and call `heard` with the topic of each message, until cancelled.

        `connected` is called again whenever messages were missed, but come now. It raises when the connection cannot
        be made, or breaks.
        """

    @abstractmethod
    async def follow(self, topic: str) -> None:
        """Subscribe to `topic`; once it returns, no message is missed."""

    @abstractmethod
    async def unfollow(self, topic: str) -> None:
        """End the subscription to `topic`."""

    @abstractmethod
    async def send(self, topic: str) -> None:
        """Send a message to `topic` the way a release does, over an ordinary connection."""

    @abstractmethod
    async def ping(self) -> None:
        """Ask the server for something over an ordinary connection; it raises when the server does not answer."""


@dataclass(slots=True, eq=False)
class _Topic:
    """Something that is waited for, or was a while ago."""

    signal: Signal = field(default_factory=Signal)
    followed: bool = False
    following: "asyncio.Task[None] | None" = None  # while the subscription is under way


class _HintWaiter(SignalWaiter):
    """A subscription to one topic."""

    def __init__(self, hints: "Hints", topic: _Topic, clock: Clock) -> None:
        super().__init__(topic.signal, clock)
        self._hints = hints
        self._topic = topic

    @property
    def pushes(self) -> bool:
        """Whether hints come at present."""
        return self._hints.trusted and self._topic.followed


class Hints:
    """The hints of one server, for all names on one connection, which is made anew whenever it breaks.

    Args:
        feed: the connection; nothing else uses it.
        clock: the time of pauses and limits.
        store: the trouble of the store as a whole.
        silence: what may be wrong where none of its messages come, for the log.
        lazy: connect only when somebody waits, where a connection costs the server much.
    """

    def __init__(self, feed: Feed, clock: Clock, store: Outage, *, silence: str = "", lazy: bool = False) -> None:
        self._feed = feed
        self._clock = clock
        self._silence = f"a message to itself did not come within {ANSWER_LIMIT:g} s{silence and ': '}{silence}"
        self._lazy = lazy
        self._store = store
        self._outage = Outage(f"{store.title}: waking waiters at once (they poll meanwhile)", logger)
        self._topics: dict[str, _Topic] = {}
        self._unused: dict[str, None] = {}  # topics that nobody waits for, the longest unused first
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._own = f"self:{token_hex(8)}"
        self._echo = Signal()
        self._doubt = Signal()  # somebody relies on what was not tested for a while
        self._doubted = False  # since the present test began
        self._outcome = Signal()  # of a test
        self._tested_at = -math.inf
        self._connection: asyncio.TaskGroup | None = None  # and what goes on over it
        self._supervisor: asyncio.Task[None] | None = None
        self.trusted = False
        """Whether a hint that this process sent to itself came round on the present connection."""

    async def start(self) -> None:
        """Connect, and stay connected in the background. It does not fail: without a connection, waiters poll."""
        self._supervisor = asyncio.get_running_loop().create_task(self._run(), name="grelmicro-hints")
        if not self._lazy:
            await self._outcome.wait(self._clock, OPENING_LIMIT)

    async def close(self) -> None:
        """Disconnect."""
        supervisor, self._supervisor = self._supervisor, None
        try:
            if supervisor is not None:
                supervisor.cancel()
                await asyncio.wait({supervisor})
        finally:
            self._forget()

    def abandon(self) -> None:
        """Forget the connection and the waiters of an event loop that is gone."""
        self._supervisor = None
        self._forget()

    @property
    def used(self) -> bool:
        """Whether anybody waits, or did a while ago."""
        return bool(self._topics)

    def send(self, topic: str) -> None:
        """Wake the waiters of this process for `topic`."""
        if topic in self._topics:
            self._topics[topic].signal.send()

    def doubt(self) -> None:
        """Have waiters poll until a hint to oneself came round again: the connection may lead to the wrong server."""
        self._tested_at = -math.inf
        self._doubted = True
        if self.trusted:
            self.trusted = False
            self._wake_all()
        self._doubt.send()

    @asynccontextmanager
    async def watch(self, topic: str) -> AsyncIterator[Waiter]:
        """Subscribe to `topic`; see `LeaseStore.watch`."""
        known = self._topics.setdefault(topic, _Topic())
        self._unused.pop(topic, None)
        waiter = _HintWaiter(self, known, self._clock)
        try:
            await self._follow(topic, known)
            if self._clock.now() - self._tested_at > TEST_INTERVAL:
                self._doubt.send()
            yield waiter
        finally:
            waiter.close()
            if known.signal.idle and self._topics.get(topic) is known:
                self._unused[topic] = None
                self._drop_unused()

    # The connection

    async def _run(self) -> None:
        """Get hints, and again whenever that ends."""
        task = asyncio.current_task()
        assert task is not None
        pause = FIRST_PAUSE
        while True:
            self._tested_at = -math.inf
            if self._lazy and not self.used:
                await self._doubt.wait(self._clock)
            try:
                async with asyncio.TaskGroup() as connection:
                    with distinguish_cancellation():
                        await self._use(connection)
            except* Exception as errors:
                failure = _first(errors)
                self._outcome.send()
                # A connection that was good until now is made anew: that it ended, as one that is idle may, is no news.
                if self._tested_at > 0:
                    logger.debug("the connection for hints ended, and is made anew: %s", failure)
                else:
                    await self._tell(failure)
            if task.cancelling():  # closing came just when the connection broke, and the group tells only of that
                raise asyncio.CancelledError
            pause = FIRST_PAUSE if self._tested_at > 0 else min(pause * 2, LONGEST_PAUSE)
            await sleep(self._clock, pause)

    async def _tell(self, error: BaseException) -> None:
        """Tell that no hints come; if the store as a whole has trouble, that is the trouble."""
        if not self._outage.is_on and (self._store.is_on or await self._is_away()):
            self._store.note(error, self._clock.now(), source=SOURCE, awaited=False)
        else:
            self._outage.note(error, self._clock.now())

    async def _is_away(self) -> bool:
        """Whether the store does not answer ordinary requests either."""
        try:
            async with TimeLimit(self._clock, ANSWER_LIMIT):
                await self._feed.ping()
        except Exception:
            return True
        return False

    async def _use(self, connection: asyncio.TaskGroup) -> None:
        """Listen, and test now and then whether hints come; it ends with an error."""
        connected = asyncio.Event()

        def begun() -> None:
            if connected.is_set():
                self._wake_all()
            connected.set()

        connection.create_task(self._listen(begun))
        try:
            async with TimeLimit(self._clock, ANSWER_LIMIT):
                await connected.wait()
                await self._feed.follow(self._own)
            self._connection = connection
            await asyncio.gather(*(self._follow(topic, known) for topic, known in self._topics.items()))
            self._wake_all()  # nobody tells what was missed until now
            while True:
                self._doubted = False
                await self._test()
                if self._doubted:
                    continue
                self.trusted = True
                self._outage.over(self._clock.now())
                self._store.over(self._clock.now(), SOURCE)
                self._outcome.send()
                await self._until_doubtful()
        finally:
            self._disconnected()

    async def _listen(self, connected: Callable[[], None]) -> None:
        try:
            with distinguish_cancellation():  # a group takes a task that was cancelled for one that has ended in order
                await self._feed.listen(self._heard, connected)
        finally:
            self._disconnected()

    def _disconnected(self) -> None:
        """Nothing more goes on over the connection, and everybody polls."""
        self._connection = None
        self.trusted = False
        self._ending.clear()
        for known in self._topics.values():
            known.followed, known.following = False, None
        self._wake_all()

    def _heard(self, topic: str) -> None:
        if topic == self._own:
            self._echo.send()
        else:
            self.send(topic)

    async def _test(self) -> None:
        """Send a hint to oneself, and wait for it."""
        echo = self._echo.subscribe()
        try:
            await self._feed.send(self._own)
            if not await expect(echo, self._clock, ANSWER_LIMIT):
                raise BackendUnavailableError(self._silence)
        finally:
            self._echo.unsubscribe(echo)
        self._tested_at = self._clock.now()

    async def _until_doubtful(self) -> None:
        """Wait until somebody relies on hints that were not tested for a while."""
        while True:
            await self._doubt.wait(self._clock, TEST_INTERVAL)
            untested = self._clock.now() - self._tested_at >= TEST_INTERVAL
            if untested and len(self._unused) < len(self._topics):
                return

    def _wake_all(self) -> None:
        for known in self._topics.values():
            known.signal.send()

    def _forget(self) -> None:
        self._topics.clear()
        self._unused.clear()
        self._disconnected()

    # Topics

    async def _follow(self, topic: str, known: _Topic) -> None:
        """Wait for the subscription, if there is a connection. It goes on when whoever waits for it is cancelled."""
        if known.followed or self._connection is None:
            return
        if known.following is None:
            known.following = self._connection.create_task(self._subscribe(topic, known))
        await asyncio.wait({known.following})

    async def _subscribe(self, topic: str, known: _Topic) -> None:
        if topic in self._ending:
            await asyncio.wait({self._ending[topic]})
        try:
            with distinguish_cancellation():
                async with TimeLimit(self._clock, ANSWER_LIMIT):
                    await self._feed.follow(topic)
                    if self._topics.get(topic) is not known:  # it has no waiter any more
                        await self._feed.unfollow(topic)
        except Exception as error:  # this topic is polled; the next waiter tries again
            logger.debug("no hints about one name: %s", error)
            self._tested_at = -math.inf
            self._doubt.send()
        else:
            known.followed = True
        known.following = None

    def _drop_unused(self) -> None:
        """End the subscriptions that were not used for the longest time."""
        while len(self._unused) > MOST_UNUSED:
            topic = next(iter(self._unused))
            del self._unused[topic]
            if self._topics.pop(topic).followed and self._connection is not None:
                self._ending[topic] = self._connection.create_task(self._unsubscribe(topic))

    async def _unsubscribe(self, topic: str) -> None:
        async with TimeLimit(self._clock, ANSWER_LIMIT):
            await self._feed.unfollow(topic)
        self._ending.pop(topic, None)


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
