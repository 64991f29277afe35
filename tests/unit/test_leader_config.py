"""The settings of an election: rules between them, where they come from, and how they change while it runs."""

import re
from typing import Any

import pytest

from grelmicro.coordination import LeaderElection, LeaderElectionConfig
from grelmicro.coordination.memory import MemoryLeaderElectionAdapter, MemoryLockAdapter
from grelmicro.errors import OutOfContextError, SettingsValidationError

ORDERED = r"\(settings\) should keep lease_duration > renew_deadline > retry_interval: give values that satisfy it "


def test_the_defaults() -> None:
    config = LeaderElection("job").config
    assert config.model_dump() == {
        "worker": None,
        "lease_duration": 15.0,
        "renew_deadline": 10.0,
        "retry_interval": 2.0,
        "retry_jitter": 0.1,
        "backend_timeout": 5.0,
        "error_interval": 30.0,
    }


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lease_duration": 10, "renew_deadline": 10}, ORDERED),
        ({"lease_duration": 10, "retry_interval": 10}, ORDERED),
        ({"renew_deadline": 2, "retry_interval": 2}, ORDERED),
        ({"renew_deadline": 15}, ORDERED),
        ({"retry_interval": 10}, ORDERED),
        (
            {"renew_deadline": 2, "backend_timeout": 2.1},
            r"\(settings\) backend_timeout should be at most renew_deadline: give values that ",
        ),
        (
            {"backend_timeout": 10.1},
            r"\(settings\) backend_timeout should be at most renew_deadline: give values that ",
        ),
        (
            {"lease_duration": 1e-9},
            r"\(settings\) lease_duration and renew_deadline should leave time for a retry_interval",
        ),
        (
            {"renew_deadline": 0.001},
            r"\(settings\) lease_duration and renew_deadline should leave time for a retry_interval",
        ),
        ({"retry_interval": 0}, r"retry_interval \(keyword\) should be greater than 0: "),
        ({"lease_duration": float("inf")}, r"lease_duration \(keyword\) should be "),
        ({"retry_jitter": 1}, r"retry_jitter \(keyword\) should be less than 1: "),
        ({"error_interval": True}, r"error_interval \(keyword\) should be a number of seconds, not true or false: "),
    ],
)
def test_rules(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsValidationError, match=f"^LeaderElection 'job': {text}"):
        LeaderElection("job", **settings)


@pytest.mark.parametrize(
    ("given", "rest"),
    [
        ({"renew_deadline": 2}, {"lease_duration": 15, "retry_interval": 0.4, "backend_timeout": 1}),
        ({"renew_deadline": 4}, {"lease_duration": 15, "retry_interval": 2, "backend_timeout": 2}),
        ({"lease_duration": 12}, {"renew_deadline": 10, "retry_interval": 2, "backend_timeout": 5}),
        ({"lease_duration": 9}, {"renew_deadline": 6, "retry_interval": 2, "backend_timeout": 5}),
        ({"lease_duration": 3}, {"renew_deadline": 2, "retry_interval": 0.4, "backend_timeout": 1}),
        ({"lease_duration": 4, "retry_interval": 3}, {"renew_deadline": 3.5, "backend_timeout": 1.75}),
        ({"lease_duration": 4, "backend_timeout": 3}, {"renew_deadline": 3.5, "retry_interval": 2}),
        ({"lease_duration": 0.1}, {"renew_deadline": 0.2 / 3, "retry_interval": 0.04 / 3, "backend_timeout": 0.1 / 3}),
    ],
)
async def test_a_default_becomes_shorter_to_go_with_what_is_given(given: dict[str, Any], rest: dict[str, Any]) -> None:
    built = LeaderElection("job", **given).config
    assert {field: getattr(built, field) for field in rest} == pytest.approx(rest)
    assert built == LeaderElectionConfig(**given)
    assert built.model_fields_set == given.keys()
    reconfigured = LeaderElection("job")
    await reconfigured.reconfigure(LeaderElectionConfig().model_copy(update=given))
    assert reconfigured.config == built
    await reconfigured.reconfigure(reconfigured.config.model_copy(update={"lease_duration": 15, "renew_deadline": 10}))
    others = {"retry_interval": 2.0, "backend_timeout": 5.0} | {
        field: value for field, value in given.items() if field in ("retry_interval", "backend_timeout")
    }
    assert {field: getattr(reconfigured.config, field) for field in others} == others


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 256, None])
def test_names(name: Any) -> None:
    with pytest.raises(SettingsValidationError, match="^LeaderElection: name "):
        LeaderElection(name)
    with pytest.raises(SettingsValidationError, match="^LeaderElection: name "):
        LeaderElection.from_config(name, LeaderElectionConfig())


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LEADERELECTION_LEASE_DURATION", "60")
    monkeypatch.setenv("GREL_LEADERELECTION_NIGHT_JOB_RENEW_DEADLINE", "50")
    monkeypatch.setenv("GREL_LEADERELECTION_NIGHT_JOB_WORKER", "web-1")
    monkeypatch.setenv("GREL_LEADERELECTION_WORKER", "everybody")
    job, other = LeaderElection("night-job", retry_interval=3), LeaderElection("other")
    assert (job.config.lease_duration, job.config.renew_deadline, job.config.retry_interval) == (60, 50, 3)
    assert job.worker == "web-1"
    assert (other.config.lease_duration, other.config.renew_deadline) == (60, 10)
    assert other.worker != "everybody"
    assert LeaderElection("night-job", env_prefix="APP_").config == LeaderElectionConfig()


def test_ready_settings_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LEADERELECTION_LEASE_DURATION", "60")
    config = LeaderElectionConfig(worker="web-1")
    election = LeaderElection.from_config("job", config, metadata={"a": "b"})
    assert election.config is config
    assert (election.worker, election.metadata) == ("web-1", {"a": "b"})


async def test_the_worker_stays() -> None:
    election = LeaderElection("job", worker="web-1")
    with pytest.raises(SettingsValidationError, match="cannot change the worker"):
        await election.reconfigure(LeaderElectionConfig(worker="web-2"))
    await election.reconfigure(LeaderElectionConfig(lease_duration=30))
    assert (election.worker, election.config.worker, election.config.lease_duration) == ("web-1", "web-1", 30)


async def test_broken_rules_do_not_come_into_force() -> None:
    election = LeaderElection("job")
    with pytest.raises(SettingsValidationError, match="should keep lease_duration > renew_deadline > retry_interval"):
        await election.reconfigure(election.config.model_copy(update={"lease_duration": 5.0, "renew_deadline": 6.0}))
    assert election.config.lease_duration == 15.0


def test_the_backend_is_one_of_elections() -> None:
    backend = MemoryLeaderElectionAdapter()
    assert LeaderElection("job", backend=backend).backend is backend
    with pytest.raises(OutOfContextError, match="^LeaderElection 'job': no app is open"):
        _ = LeaderElection("job").backend
    with pytest.raises(
        SettingsValidationError,
        match=re.escape(
            "LeaderElection 'job': backend should be a LeaderElectionBackend, a Coordination or the name of one, "
            "not int: "
        ),
    ):
        LeaderElection("job", backend=5)  # type: ignore[arg-type]
    assert MemoryLockAdapter().scope == "process"


def test_before_it_runs_nobody_leads() -> None:
    election = LeaderElection("job")
    assert not election.is_leader()
    assert not election.is_running()
    assert not election.is_leader_confirmed_within(1e9)
    assert election.record is None
    assert election.last_confirmation_age() == float("inf")
    assert repr(election) == "<LeaderElection 'job' follows>"


@pytest.mark.parametrize("metadata", [5, [("a", "b")], {"a": 1}, {1: "a"}])
def test_metadata_is_text_by_text(metadata: Any) -> None:
    with pytest.raises(SettingsValidationError, match="^LeaderElection metadata should be text by text: "):
        LeaderElection("job", metadata=metadata)
