"""A variable that is misspelt sets nothing, and one warning in a process names it and the nearest known one."""

import logging

import pytest

from grelmicro import spelling
from grelmicro.coordination import LeaderElection, Lock, LockConfig, TaskLock
from grelmicro.task import Tasks

MISSPELT = [
    ("GREL_LOCK_LEASE_DURATON", "did you mean GREL_LOCK_LEASE_DURATION?"),
    ("GREL_LOCK_CART_LEASE_DURATON", "did you mean GREL_LOCK_CART_LEASE_DURATION?"),
    ("GREL_LOCK_CART_ITEM_AUTORENEW", "did you mean GREL_LOCK_CART_ITEM_AUTO_RENEW?"),
    ("GREL_LEADERELECTION_FEED_RENEW_DEADINE", "did you mean GREL_LEADERELECTION_FEED_RENEW_DEADLINE?"),
    ("GREL_LEADER_ELECTION_LEASE_DURATION", "did you mean GREL_LEADERELECTION_LEASE_DURATION?"),
    ("GREL_TASK_LOCK_REPORT_MIN_HOLD_DURATION", "did you mean GREL_TASKLOCK_REPORT_MIN_HOLD_DURATION?"),
    ("GREL_TASK_SHUTDOWN_TIMEOUTS", "did you mean GREL_TASK_SHUTDOWN_TIMEOUT?"),
    ("GREL_TASKLOCK_TTL", "the settings of GREL_TASKLOCK_... are "),
]

KNOWN = [
    "GREL_LOCK_LEASE_DURATION",
    "GREL_LOCK_CART_LEASE_DURATION",
    "GREL_LOCK_LEASE_LEASE_DURATION",
    "GREL_LEADERELECTION_RETRY_INTERVAL",
    "GREL_SOMETHING_ELSE",
    "GREL_LOCKER_LEASE_DURATON",
    "SHOP_LOCK_LEASE_DURATON",
]


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spelling, "_warned", set())


def build_all() -> None:
    Tasks()
    Lock("cart")
    TaskLock("report")
    LeaderElection("feed")


@pytest.mark.parametrize(("variable", "remedy"), MISSPELT)
def test_a_misspelt_variable_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, remedy: str
) -> None:
    monkeypatch.setenv(variable, "10")
    build_all()
    monkeypatch.setenv("GREL_LOCK_MAX_HOLD", "10")  # the environment is looked at again
    build_all()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("grelmicro.config", logging.WARNING)
    text = f"environment variable {variable} is not known and sets nothing: {remedy}"
    assert record.getMessage().startswith(text)


@pytest.mark.parametrize("variable", KNOWN)
def test_others_are_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    monkeypatch.setenv(variable, "8")
    build_all()
    assert not caplog.records


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GREL_LOCK_LEASE_DURATON", "")
    build_all()
    assert not caplog.records


def test_settings_that_an_application_added_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OwnConfig(LockConfig):
        colour: str = "red"

    monkeypatch.setenv("GREL_LOCK_COLOUR", "blue")
    build_all()
    assert not caplog.records
    assert OwnConfig().colour == "red"


def test_no_value_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GREL_LOCK_PASSWORD", "s3cret")
    build_all()
    assert len(caplog.records) == 1
    assert "s3cret" not in caplog.text
