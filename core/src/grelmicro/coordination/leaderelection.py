"""`LeaderElection`: one worker of all plays a role, for one uninterrupted term at a time."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Never, Self, TypeVar, cast
from uuid import UUID

from pydantic import model_validator

from grelmicro import lifecycle
from grelmicro.clock import sleep
from grelmicro.config import (
    SHORTEST_INTERVAL,
    Duration,
    Interval,
    Ratio,
    Reconfigurable,
    Seconds,
    WorkerConfig,
    build,
    check_config,
    check_name,
    in_seconds,
)
from grelmicro.coordination.campaign import Campaign
from grelmicro.coordination.identity import WorkerName
from grelmicro.coordination.protocols import ElectionBackendSource, LeaderElectionBackend
from grelmicro.coordination.records import LeaderRecord
from grelmicro.coordination.resolve import BackendSource
from grelmicro.coordination.standing import Standing, StrayCancellationError, begin, check_work
from grelmicro.errors import LeadershipLostError, NotLeaderError, OutOfContextError, SettingsValidationError, TaskError
from grelmicro.keywords import refuse_keywords
from grelmicro.leases.lease import NO_DATA
from grelmicro.leases.outage import Outage, shared_outage

logger = logging.getLogger("grelmicro.leader_election")

T = TypeVar("T")

UNATTENDED_S = 5.0
"""Seconds after which a wait for the leader is logged, when the election does not run in this process."""


class LeaderElectionConfig(WorkerConfig):
    """Settings of a `LeaderElection`; each can be set by `GREL_LEADERELECTION_{NAME}_{FIELD}` or without the name.

    The timing contract is client-go's: `lease_duration > renew_deadline > retry_interval`.
    """

    kind = "LEADERELECTION"

    lease_duration: Seconds = 15.0
    """Seconds after which another worker may lead, if the leader is gone."""
    renew_deadline: Seconds = 10.0
    """Seconds after its last confirmed renewal, counted from when that was sent, at which a leader gives up."""
    retry_interval: Interval = 2.0
    """Seconds between two renewals, and between two tries to lead where the store cannot wake a candidate."""
    retry_jitter: Ratio = 0.1
    """The share by which `retry_interval` varies."""
    backend_timeout: Seconds = 5.0
    """Seconds after which one request to the store is given up."""
    error_interval: Seconds = 30.0
    """Seconds between two log lines about an outage that goes on."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        self._let_defaults_yield()
        if not self.lease_duration > self.renew_deadline > self.retry_interval:
            raise ValueError("should keep lease_duration > renew_deadline > retry_interval")
        if self.retry_interval < SHORTEST_INTERVAL:  # a default that yielded
            raise ValueError(
                f"lease_duration and renew_deadline should leave time for a retry_interval of {SHORTEST_INTERVAL:g} s"
            )
        if self.backend_timeout > self.renew_deadline:
            raise ValueError("backend_timeout should be at most renew_deadline")
        return self

    def _let_defaults_yield(self) -> None:
        """Defaults become shorter to go with shorter settings that were given; none becomes longer."""
        lease = self.lease_duration
        if self.renew_deadline >= lease:
            given = [
                getattr(self, field)
                for field in ("retry_interval", "backend_timeout")
                if field in self.model_fields_set
            ]
            self._yield(renew_deadline=max(lease * 2 / 3, (max(given, default=0.0) + lease) / 2))
        if self.retry_interval >= self.renew_deadline:
            self._yield(retry_interval=self.renew_deadline / 5)
        if self.backend_timeout > self.renew_deadline:
            self._yield(backend_timeout=self.renew_deadline / 2)


class LeaderElection(lifecycle.BoundToProcess, Reconfigurable[LeaderElectionConfig]):
    """Elects one of all workers. It is a task: add it to `Tasks`, or await it in a task of your own.

    Settings left None come from the environment, then from the defaults of `LeaderElectionConfig`.

    Args:
        name: the role: any text of 1 to 255 characters without control characters.
        backend: where: a backend, a `Coordination` or the name of one; None: that of the app which serves the code in
            which the election runs.
        worker: readable prefix of the holder; a random one by default. Two instances never count as one.
        lease_duration: seconds after which another worker may lead, if the leader is gone.
        renew_deadline: seconds after which a leader that cannot renew gives up.
        retry_interval: seconds between two renewals.
        retry_jitter: the share by which `retry_interval` varies.
        backend_timeout: seconds after which one request to the store is given up.
        error_interval: seconds between two log lines about an outage that goes on.
        metadata: text by text that every worker can read while this one leads, such as its address.
        env_prefix: prefix of its environment variables, in place of `GREL_LEADERELECTION_{NAME}_`.
        env_load: whether the environment is read; None: it is.

    Raises:
        SettingsValidationError: a setting or the name breaks a rule.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: ElectionBackendSource | None = None,
        worker: str | UUID | None = None,
        lease_duration: Duration | None = None,
        renew_deadline: Duration | None = None,
        retry_interval: Duration | None = None,
        retry_jitter: float | None = None,
        backend_timeout: Duration | None = None,
        error_interval: Duration | None = None,
        metadata: Mapping[str, str] | None = None,
        env_prefix: str | None = None,
        env_load: bool | None = None,
        **unknown: Never,
    ) -> None:
        given = {
            "worker": worker,
            "lease_duration": lease_duration,
            "renew_deadline": renew_deadline,
            "retry_interval": retry_interval,
            "retry_jitter": retry_jitter,
            "backend_timeout": backend_timeout,
            "error_interval": error_interval,
        }
        if unknown:
            refuse_keywords("LeaderElection", unknown, ["backend", *given, "metadata", "env_prefix", "env_load"])
        check_name("LeaderElection", name)
        named = None if env_load is False else name
        config = build(LeaderElectionConfig, f"LeaderElection {name!r}", given, name=named, prefix=env_prefix)
        self._set_up(name, config, backend, metadata)

    @classmethod
    def from_config(
        cls,
        name: str,
        config: LeaderElectionConfig,
        *,
        backend: ElectionBackendSource | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Self:
        """An election with ready settings: no environment is read, and nothing is checked again.

        Raises:
            SettingsValidationError: `config` is of another class, or the name or the metadata break a rule.
        """
        election = cls.__new__(cls)
        config = check_config(config, LeaderElectionConfig)
        election._set_up(check_name("LeaderElection", name), config, backend, metadata)
        return election

    def _set_up(
        self,
        name: str,
        config: LeaderElectionConfig,
        backend: ElectionBackendSource | None,
        metadata: Mapping[str, str] | None,
    ) -> None:
        self._name = name
        self._config = config
        self._metadata = _checked(metadata)
        self._inherited = Standing(WorkerName(config.worker))
        title = f"LeaderElection {name!r}"
        self._source: BackendSource[LeaderElectionBackend] = BackendSource(
            title,
            "election_backend",
            LeaderElectionBackend,
            backend,
        )

    @property
    def _standing(self) -> Standing:
        """Where it stands in this process: a fork begins anew, since what it inherits is the parent's."""
        if self._inherited.generation is not lifecycle.generation:
            self._inherited = Standing(WorkerName(self._config.worker))
        return self._inherited

    @property
    def name(self) -> str:
        """The role."""
        return self._name

    @property
    def worker(self) -> str:
        """The readable prefix of this instance's holder."""
        return self._standing.worker.text

    @property
    def metadata(self) -> Mapping[str, str]:
        """What every worker can read while this one leads."""
        return self._metadata

    @property
    def backend(self) -> LeaderElectionBackend:
        """The backend it would use now.

        Raises:
            OutOfContextError: it was given none and no app serves this code.
        """
        return self._source.find()

    @property
    def record(self) -> LeaderRecord | None:
        """The leader, as the store last said; None before its first answer.

        It is as old as `last_round_age()` says. Without a change, a leader asks every `retry_interval`, and so does a
        candidate where the store is in memory; elsewhere a candidate asks every 10 seconds.
        """
        return self._standing.record

    def is_running(self) -> bool:
        """Whether it takes part in the election."""
        service = self._standing.service
        return service is not None and not service.done()

    def is_leader(self) -> bool:
        """Whether this instance leads now; computed from the clock, so it is right even if nothing else ran."""
        return self._standing.leading_for() > 0

    def last_confirmation_age(self) -> float:
        """Seconds since the last confirmed request of this term was sent; infinite when not leading."""
        term = self._standing.term
        if term is None or not self.is_leader():
            return math.inf
        return self._standing.clock.now() - term.sent_at

    def last_round_age(self) -> float:
        """Seconds since the last request was sent that the store answered, whoever leads; infinite before the first."""
        return self._standing.clock.now() - self._standing.heard_at

    def is_cut_off(self) -> bool:
        """Whether the store fails and has not answered for longer than a lease: then no worker may lead."""
        return self._standing.is_cut_off(self._config.lease_duration)

    def is_leader_confirmed_within(self, max_age: Duration) -> bool:
        """Whether it leads and the store confirmed so at most `max_age` (seconds, or a timedelta) ago."""
        return self.is_leader() and self.last_confirmation_age() <= in_seconds(max_age)

    def guard(self) -> LeaderRecord:
        """The record of the present term, if this instance leads.

        Raises:
            NotLeaderError: it does not.
        """
        term = self._standing.term
        if term is None or not self.is_leader():
            raise self._not_leader()
        return LeaderRecord.of(term.lease)

    async def wait_for_leader(self) -> None:
        """Wait until this instance leads.

        Raises:
            OutOfContextError: it takes part in the election on another event loop.
        """
        self._check_loop()
        while not self.is_leader():
            came = await self._standing.changed.wait(self._standing.clock, self._unattended_in())
            if not came and self._unattended_in() == 0:
                self._standing.unattended_told = True
                logger.warning(
                    "the leader of '%s' is waited for, and nothing runs that election in this process: "
                    "add it to the Tasks of an open app, or run it in a task of its own",
                    self._name,
                )

    def _unattended_in(self) -> float | None:
        """Seconds after which a wait is one for an election that nothing runs; None when that is no matter."""
        standing = self._standing
        if standing.unattended_told or self.is_running():
            standing.unattended_since = None
            return None
        now = standing.clock.now()
        if standing.unattended_since is None:
            standing.unattended_since = now
        return max(standing.unattended_since + UNATTENDED_S - now, 0.0)

    async def wait_lose_leader(self) -> None:
        """Wait until the present term is over; returns at once when not leading.

        Raises:
            OutOfContextError: it takes part in the election on another event loop.
        """
        self._check_loop()
        if (term := self._standing.term) is not None:
            await self._standing.wait_over(term)

    async def lead(
        self, func: Callable[..., Coroutine[object, object, T]], *args: object, repeat: bool = False
    ) -> T | None:
        """Wait for leadership, run `func(*args)` in a task of its own, and cancel that when the term ends.

        Args:
            func: a coroutine function.
            args: its arguments.
            repeat: after a loss, run it again in the next term. When something that it awaits was cancelled, that is
                logged, and it begins anew after the `retry_interval`.

        Returns:
            What it returned while leading, or None when it was cancelled by a loss.

        Raises:
            TaskError: `func` is no coroutine function; or something that it awaits was cancelled, and with `repeat` it
                would begin anew.
            OutOfContextError: it takes part in the election on another event loop.
        """
        check_work("lead()", func)
        while True:
            await self.wait_for_leader()
            if (term := self._standing.term) is None:
                continue
            try:
                lost, result = await self._standing.run(term, begin(func, *args))
            except StrayCancellationError:
                if not repeat:
                    raise
                pause = self._config.retry_interval
                logger.exception("the work of leader '%s' failed, and begins anew in %g s", self._name, pause)
                await sleep(self._standing.clock, pause)
                continue
            if not lost:
                return result
            if not repeat:
                return None

    async def run_in_term(self, func: Callable[..., Coroutine[object, object, T]], *args: object) -> T:
        """Run `func(*args)` if this instance leads now, and cancel it when the term ends.

        Raises:
            NotLeaderError: it does not lead; nothing was run.
            LeadershipLostError: the term ended meanwhile.
            TaskError: `func` is no coroutine function, or something that it awaits was cancelled.
            OutOfContextError: it takes part in the election on another event loop.
        """
        check_work("run_in_term()", func)
        self._check_loop()
        term = self._standing.term
        if term is None or not self.is_leader():
            raise self._not_leader()
        lost, result = await self._standing.run(term, begin(func, *args))
        if lost:
            raise LeadershipLostError(
                f"leadership of '{self._name}' was lost while its work was running: it was cancelled, "
                "and the next term runs it again",
                name=self._name,
            )
        return cast(T, result)

    def _check_loop(self) -> None:
        """Nobody waits, or works, where the end of a term cannot reach him."""
        service = self._standing.service
        if service is None or service.done():
            return
        loop = service.get_loop()
        if loop is not asyncio.get_running_loop() and not loop.is_closed():
            raise OutOfContextError(
                f"election '{self._name}' runs on another event loop than this code: await it there, "
                "or run the work as a task of its app, with every(leader=...)"
            )

    async def __call__(self, *, ready: asyncio.Future[None] | None = None, stop: asyncio.Event | None = None) -> None:
        """Take part in the election until cancelled or stopped; then end the term and release the lease.

        No outage, slow call or missing backend ends it.

        Args:
            ready: completed once it takes part.
            stop: ends it when set.

        Raises:
            TaskError: it takes part already.
        """
        if self.is_running():
            raise TaskError(f"election '{self._name}' runs already: start it once, or build a second instance")
        loop = asyncio.get_running_loop()
        standing = self._standing
        standing.ending = False
        standing.service = service = loop.create_task(self._serve(), name=f"grelmicro-election-{self._name}")
        stopped = loop.create_task(stop.wait()) if stop is not None else None
        if ready is not None and not ready.done():
            ready.set_result(None)
        try:
            await asyncio.wait(
                {service} if stopped is None else {service, stopped}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            if stopped is not None:
                stopped.cancel()
            standing.resign()  # at once, whatever becomes of the rest
            if not standing.ending:  # a second cancellation would cut its end short
                service.cancel()
            ended = asyncio.ensure_future(self._end(service))
            with lifecycle.shielded():
                try:
                    await asyncio.shield(ended)
                except asyncio.CancelledError:
                    # Whoever cancels this now, perhaps after it was stopped, closes the store next, or ends the
                    # process: work that still runs is not waited for, but that the lease is given back is.
                    if standing.is_idle():
                        await lifecycle.outlast(ended)
                    raise

    async def _end(self, service: "asyncio.Task[None]") -> None:
        """Wait for the end of `service`, which was cancelled, no longer than its work and its last request can take."""
        await asyncio.wait({service}, timeout=self._config.lease_duration + self._config.backend_timeout)
        if not service.done():
            await lifecycle.end_or_leave({service})

    async def _serve(self) -> None:
        source = f"election '{self._name}'"
        outage = Outage(source, logger)
        standing = self._standing
        standing.began_at = standing.clock.now()
        while True:
            noted = outage
            try:
                backend = self._source.find()
                noted = shared_outage(backend, outage)
                if standing.clock is not backend.clock:
                    standing.clock, standing.began_at = backend.clock, backend.clock.now()
                standing.worker.use(backend)
                with lifecycle.distinguish_cancellation():
                    async with backend:
                        await Campaign(self, standing, backend, outage).run()
            except Exception as error:
                standing.failing = True
                noted.note(error, standing.clock.now(), self._config.error_interval, "" if noted is outage else source)
            await sleep(standing.clock, self._config.retry_interval)

    def _not_leader(self) -> NotLeaderError:
        return NotLeaderError(
            f"this worker does not lead '{self._name}': send the work to the leader, or try again after it changes",
            name=self._name,
        )

    def __repr__(self) -> str:
        return f"<LeaderElection {self._name!r} {'leads' if self.is_leader() else 'follows'}>"


def _checked(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    if metadata is None:
        return NO_DATA
    if not isinstance(metadata, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()
    ):
        raise SettingsValidationError("LeaderElection metadata should be text by text: convert its values with str()")
    return MappingProxyType(dict(metadata))
