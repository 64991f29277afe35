"""Wherever seconds are given, a timedelta can be given."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import (
    Coordination,
    HealthCheck,
    LeaderElection,
    Lock,
    LockConfig,
    LockTimeoutError,
    MultiLock,
    TaskLock,
)
from grelmicro.errors import SettingsValidationError
from grelmicro.providers.kubernetes import KubernetesProvider
from grelmicro.providers.memory import MemoryProvider
from grelmicro.providers.postgres import PostgresProvider
from grelmicro.providers.redis import RedisProvider
from grelmicro.providers.sqlite import SQLiteProvider
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock, held_elsewhere, leads, leads_elsewhere
from grelmicro_fastapi import LockDep, LocksDep
from grelmicro_starlette import exception_handlers, locked

FIVE, MINUTE = timedelta(seconds=5), timedelta(minutes=1)

SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Lock("cart", lease_duration=FIVE).config, "lease_duration"),
    (lambda: Lock("cart", retry_interval=FIVE).config, "retry_interval"),
    (lambda: Lock("cart", max_hold=FIVE).config, "max_hold"),
    (lambda: TaskLock("report", min_hold_duration=FIVE).config, "min_hold_duration"),
    (lambda: LeaderElection("feed", renew_deadline=FIVE).config, "renew_deadline"),
    (lambda: LeaderElection("feed", lease_duration=MINUTE, backend_timeout=FIVE).config, "backend_timeout"),
    (lambda: LockConfig.model_validate({"lease_duration": FIVE}), "lease_duration"),
    (lambda: Tasks(shutdown_timeout=FIVE).config, "shutdown_timeout"),
    (lambda: IntervalTask("job", lambda: None, FIVE), "seconds"),
    (lambda: HealthCheck(Coordination(MemoryProvider()), interval=FIVE), "interval"),
]


@pytest.mark.parametrize(("build", "setting"), SETTINGS)
def test_a_setting_is_kept_in_seconds(build: Callable[[], Any], setting: str) -> None:
    value = getattr(build(), setting)
    assert (type(value), value) == (float, 5.0)


@pytest.mark.parametrize("duration", [timedelta(), timedelta(seconds=-1), timedelta.max])
def test_the_rules_are_those_of_seconds(duration: timedelta) -> None:
    with pytest.raises(SettingsValidationError, match="lease_duration"):
        Lock("cart", lease_duration=duration)
    with pytest.raises(SettingsValidationError, match="retention"):
        SQLiteProvider("locks.db", retention=duration)


def test_providers_take_one(tmp_path: Path) -> None:
    day = timedelta(days=1)
    RedisProvider("redis://localhost", command_timeout=FIVE, retention=day)
    PostgresProvider("postgresql://localhost/shop", command_timeout=FIVE, retention=day)
    SQLiteProvider(tmp_path / "locks.db", retention=day)
    KubernetesProvider("shop", request_timeout=FIVE)


def test_a_coordination_waits_for_one() -> None:
    Coordination.from_url("memory://", wait=FIVE)


def test_integrations_take_one() -> None:
    LockDep("cart:{cart_id}", timeout=FIVE, lease_duration=FIVE)
    LocksDep("a:{x}", "b:{y}", timeout=FIVE)
    locked("cart:{cart_id}", timeout=FIVE)
    exception_handlers(retry_after=FIVE)


async def test_a_wait_takes_one() -> None:
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    async with micro, held_elsewhere(micro, "cart", timeout=FIVE, lease_duration=MINUTE):
        for lock in (Lock("cart"), MultiLock(Lock("cart"))):
            for moment in (timedelta(milliseconds=10), timedelta()):
                with pytest.raises(LockTimeoutError):
                    await lock.acquire(timeout=moment)


async def test_leadership_takes_one() -> None:
    leader = LeaderElection("feed")
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    async with micro, leads(micro, leader, timeout=FIVE):
        assert leader.is_leader_confirmed_within(FIVE)
        assert not leader.is_leader_confirmed_within(timedelta(seconds=-1))
    async with micro, leads_elsewhere(micro, leader, timeout=FIVE, lease_duration=FIVE):
        assert not leader.is_leader()


async def test_a_clock_is_moved_by_one() -> None:
    clock = MovableClock()
    before = clock.now()
    await clock.advance(FIVE)
    await clock.shift(FIVE)
    assert clock.now() == before + 10
