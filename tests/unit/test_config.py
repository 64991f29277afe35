"""Settings come from the keyword, then from the environment, then from the default, and break no rule."""

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from grelmicro.config import Reconfigurable, WorkerConfig
from grelmicro.coordination import Coordination, LeaderElection, Lock, LockConfig, TaskLock, TaskLockConfig
from grelmicro.errors import SettingsValidationError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.testing.clock import MovableClock
from tests.helpers.worlds import World


def test_defaults() -> None:
    lock, task = Lock("cart").config, TaskLock("report").config
    assert lock == LockConfig()
    assert (lock.lease_duration, lock.retry_interval, lock.retry_jitter) == (60, 0.1, 0.1)
    assert (lock.auto_renew, lock.max_hold, lock.worker) == (False, None, None)
    assert (task.lease_duration, task.min_hold_duration, task.auto_renew, task.max_hold) == (60, 1, False, None)


def test_what_is_to_be_renewed_is_unless_somebody_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Lock("cart", lease_duration=7).config.renewing() == LockConfig(lease_duration=7, auto_renew=True)
    assert Lock("cart", lease_duration=60, auto_renew=True).config.renewing().lease_duration == 60
    assert not Lock("cart", auto_renew=False).config.renewing().auto_renew
    monkeypatch.setenv("GREL_LOCK_CART_AUTO_RENEW", "0")
    assert not Lock("cart").config.renewing().auto_renew


def test_a_lease_that_is_renewed_for_a_handler_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Lock("cart").config.renewing().lease_duration == 30
    assert Lock("cart", auto_renew=True).config.renewing().lease_duration == 30
    assert Lock("cart", auto_renew=False).config.renewing().lease_duration == 60
    assert TaskLock("report").config.renewing().lease_duration == 30
    assert TaskLock("report", min_hold_duration=45).config.renewing().lease_duration == 45
    monkeypatch.setenv("GREL_LOCK_LEASE_DURATION", "90")
    assert Lock("cart").config.renewing().lease_duration == 90


def test_the_nearest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Lock("cart").config.lease_duration == 60
    monkeypatch.setenv("GREL_LOCK_LEASE_DURATION", "10")
    assert Lock("cart").config.lease_duration == 10
    monkeypatch.setenv("GREL_LOCK_CART_LEASE_DURATION", "20")
    assert Lock("cart").config.lease_duration == 20
    assert Lock("cart", lease_duration=30).config.lease_duration == 30
    assert Lock("other").config.lease_duration == 10
    assert TaskLock("cart").config.lease_duration == 60


def test_each_setting_of_a_lock_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "WORKER": "web-1",
        "LEASE_DURATION": "7",
        "AUTO_RENEW": "true",
        "MAX_HOLD": "70",
        "RETRY_INTERVAL": "0.7",
        "RETRY_JITTER": "0.07",
    }
    for field, value in values.items():
        monkeypatch.setenv(f"GREL_LOCK_CART_{field}", value)
    expected = LockConfig(
        worker="web-1", lease_duration=7, auto_renew=True, max_hold=70, retry_interval=0.7, retry_jitter=0.07
    )
    assert Lock("cart").config == expected
    assert Lock("cart").worker == "web-1"


def test_each_setting_of_a_task_lock_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"WORKER": "w", "LEASE_DURATION": "7", "AUTO_RENEW": "1", "MAX_HOLD": "70", "MIN_HOLD_DURATION": "2"}
    for field, value in values.items():
        monkeypatch.setenv(f"GREL_TASKLOCK_REPORT_{field}", value)
    assert TaskLock("report").config == TaskLockConfig(
        worker="w", lease_duration=7, auto_renew=True, max_hold=70, min_hold_duration=2
    )


def test_a_worker_is_never_every_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LOCK_WORKER", "web-1")
    assert Lock("cart").worker != "web-1"
    monkeypatch.setenv("GREL_TASKLOCK_WORKER", "web-1")
    assert TaskLock().worker == "web-1", "the nameless one's own variable has no name in it"
    assert TaskLock("report").worker != "web-1"


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("cart", "CART"),
        ("shopping-cart", "SHOPPING_CART"),
        ("shop.cart", "SHOP_CART"),
        ("order:{id}", "ORDER"),
        ("{tenant}:order:{id}", "ORDER"),
        ("a {x} b", "A_B"),
        ("2fa", "2FA"),
        ("42", "42"),
        ("Größe", "GR_SSE"),
    ],
)
def test_the_variable_follows_from_the_name(monkeypatch: pytest.MonkeyPatch, name: str, segment: str) -> None:
    monkeypatch.setenv(f"GREL_LOCK_{segment}_LEASE_DURATION", "7")
    assert Lock(name).config.lease_duration == 7


@pytest.mark.parametrize("name", ["日本語", "?", "{id}", "_"])
def test_a_name_without_a_segment_reads_what_is_for_all(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert Lock(name).config.lease_duration == 60
    monkeypatch.setenv("GREL_LOCK_LEASE_DURATION", "7")
    assert Lock(name).config.lease_duration == 7


def test_changes_of_the_environment_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("5", "6", "7"):
        monkeypatch.setenv("GREL_LOCK_CART_LEASE_DURATION", value)
        assert Lock("cart").config.lease_duration == float(value)
    monkeypatch.delenv("GREL_LOCK_CART_LEASE_DURATION")
    assert Lock("cart").config.lease_duration == 60


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("LEASE_DURATION", "AUTO_RENEW", "MAX_HOLD", "WORKER"):
        monkeypatch.setenv(f"GREL_LOCK_CART_{field}", "")
        monkeypatch.setenv(f"SHOP_{field}", "")
    assert Lock("cart").config == LockConfig()
    assert Lock("cart", env_prefix="SHOP_").config == LockConfig()
    monkeypatch.setenv("GREL_LOCK_LEASE_DURATION", "6")
    assert Lock("cart").config.lease_duration == 6
    monkeypatch.setenv("GREL_LOCK_LEASE_DURATION", "")
    assert Lock("cart").config.lease_duration == 60


def test_a_prefix_replaces_the_usual_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LOCK_CART_LEASE_DURATION", "5")
    monkeypatch.setenv("GREL_LOCK_LEASE_DURATION", "6")
    assert Lock("cart", env_prefix="SHOP_").config.lease_duration == 60
    monkeypatch.setenv("SHOP_LEASE_DURATION", "7")
    assert Lock("cart", env_prefix="SHOP_").config.lease_duration == 7
    monkeypatch.setenv("SHOP_LEASE_DURATION", "-7")
    with pytest.raises(SettingsValidationError, match="environment variable SHOP_LEASE_DURATION"):
        Lock("cart", env_prefix="SHOP_")


def test_ready_settings_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LOCK_CART_LEASE_DURATION", "5")
    assert Lock.from_config("cart", LockConfig()).config.lease_duration == 60
    assert TaskLock.from_config("cart", TaskLockConfig(worker="w")).worker == "w"
    backend = MemoryProvider().lock()
    assert Lock.from_config("cart", LockConfig(), backend=backend).given_backend is backend
    with pytest.raises(SettingsValidationError, match="Lock: name is empty"):
        Lock.from_config("", LockConfig())


@pytest.mark.parametrize("config", [None, {"lease_duration": 3}, WorkerConfig()])
@pytest.mark.parametrize("kind", [Lock, TaskLock, LeaderElection])
def test_ready_settings_of_another_kind_are_refused(kind: Any, config: object) -> None:
    given = type(config).__name__
    with pytest.raises(SettingsValidationError, match=rf"takes a {kind.__name__}Config, not a {given}: build one"):
        kind.from_config("cart", config)


def test_settings_compose_in_an_applications_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings(BaseSettings):
        model_config = SettingsConfigDict(env_prefix="SHOP_", env_nested_delimiter="__")

        cart: LockConfig = LockConfig(lease_duration=5)
        report: TaskLockConfig = TaskLockConfig()

    monkeypatch.setenv("SHOP_CART__LEASE_DURATION", "7")
    monkeypatch.setenv("SHOP_REPORT__MIN_HOLD_DURATION", "3")
    settings = Settings()
    assert Lock.from_config("cart", settings.cart).config.lease_duration == 7
    assert TaskLock.from_config("report", settings.report).config.min_hold_duration == 3
    monkeypatch.setenv("SHOP_CART__LEASE_DURATION", "-7")
    with pytest.raises(ValidationError):
        Settings()


def test_settings_are_frozen_and_know_their_fields() -> None:
    config = LockConfig()
    with pytest.raises(ValidationError):
        config.lease_duration = 5
    with pytest.raises(ValidationError) as caught:
        LockConfig(lease="secret")  # type: ignore[call-arg]
    assert "secret" not in str(caught.value)
    with pytest.raises(TypeError):
        Lock("cart", lease=5)  # type: ignore[arg-type]


async def test_new_settings_are_in_force_from_the_next_acquire(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock: Lock = Lock("cart", backend=client, lease_duration=10)
        assert isinstance(lock, Reconfigurable)
        first = await lock.acquire()
        await lock.reconfigure(LockConfig(lease_duration=100))
        assert first.expires_in < 10
        await first.extend()
        assert first.expires_in < 10, "a lease keeps the settings under which it was taken"
        await first.release()
        assert (await lock.acquire()).expires_in > 90


async def test_settings_that_break_a_rule_are_never_in_force() -> None:
    lock = Lock("cart", worker="web-1")
    before = lock.config
    broken: list[tuple[object, str]] = [
        (
            TaskLockConfig(),
            "reconfigure() takes a LockConfig, not a TaskLockConfig: "
            "build one, or change the present one with config.model_copy(update={...})",
        ),
        (
            5,
            "reconfigure() takes a LockConfig, not a int: "
            "build one, or change the present one with config.model_copy(update={...})",
        ),
        (
            before.model_copy(update={"worker": "web-2"}),
            "reconfigure() cannot change the worker, since leases are held under its name: "
            "leave worker out, or build a new instance",
        ),
        (
            before.model_copy(update={"lease_duration": -1}),
            "reconfigure(): lease_duration (keyword) should be greater than 0: "
            "give a value within the rule, or leave it out for the default 60.0",
        ),
    ]
    for config, text in broken:
        with pytest.raises(SettingsValidationError) as caught:
            await lock.reconfigure(config)  # type: ignore[arg-type]
        assert str(caught.value) == text
        assert lock.config == before
    with pytest.raises(SettingsValidationError, match="min_hold_duration should be at most lease_duration"):
        await TaskLock("a").reconfigure(TaskLockConfig().model_copy(update={"min_hold_duration": 100}))


async def test_a_default_yields_to_a_shorter_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TaskLock("a", lease_duration=0.5).config.min_hold_duration == 0.5
    assert TaskLockConfig(lease_duration=0.5).min_hold_duration == 0.5
    assert TaskLock("a", lease_duration=5).config.min_hold_duration == 1
    with pytest.raises(SettingsValidationError, match="min_hold_duration should be at most lease_duration"):
        TaskLock("a", lease_duration=0.5, min_hold_duration=1)
    monkeypatch.setenv("GREL_TASKLOCK_LEASE_DURATION", "0.5")
    assert TaskLock("a").config.min_hold_duration == 0.5
    monkeypatch.setenv("GREL_TASKLOCK_MIN_HOLD_DURATION", "1")
    with pytest.raises(SettingsValidationError, match="min_hold_duration should be at most lease_duration"):
        TaskLock("a")


async def test_a_default_yields_to_a_new_lease_and_no_longer() -> None:
    lock = TaskLock("a")
    await lock.reconfigure(lock.config.model_copy(update={"lease_duration": 0.5}))
    assert (lock.config.lease_duration, lock.config.min_hold_duration) == (0.5, 0.5)
    await lock.reconfigure(lock.config.model_copy(update={"lease_duration": 5}))
    assert (lock.config.lease_duration, lock.config.min_hold_duration) == (5, 1)
    await lock.reconfigure(TaskLockConfig(min_hold_duration=2))
    assert (lock.config.lease_duration, lock.config.min_hold_duration) == (60, 2)
    with pytest.raises(SettingsValidationError, match="min_hold_duration should be at most lease_duration"):
        await lock.reconfigure(lock.config.model_copy(update={"lease_duration": 0.5}))


async def test_new_settings_of_a_subclass_keep_its_defaults() -> None:
    class Short(LockConfig):
        lease_duration: float = 5.0

    lock = Lock("cart")
    await lock.reconfigure(Short())
    assert lock.config.lease_duration == 5


async def test_new_settings_keep_the_worker() -> None:
    lock = Lock("cart", worker="web-1")
    await lock.reconfigure(LockConfig(lease_duration=5))
    assert lock.config.worker == lock.worker == "web-1"
    await lock.reconfigure(lock.config.model_copy(update={"lease_duration": 6}))
    assert lock.config.lease_duration == 6
    nameless = Lock("cart")
    worker = nameless.worker
    await nameless.reconfigure(LockConfig(lease_duration=5))
    assert nameless.worker == worker


def test_the_coordination_builds_with_settings() -> None:
    coordination = Coordination(MemoryProvider())
    assert coordination.lock("cart", lease_duration=5).config.lease_duration == 5
    assert coordination.tasklock(min_hold_duration=5).config.min_hold_duration == 5
    assert coordination.lock("cart").given_backend is coordination.lock_backend
