"""`@singleton` and the commands of one process."""

import asyncio
import json
import logging
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from grelmicro.coordination import LockLostError, LockTimeoutError
from grelmicro.errors import SettingsValidationError
from grelmicro_django import SKIPPED, SingletonCommand, lock, singleton

celery: Any = import_module("celery")  # which has no types


@contextmanager
def held_elsewhere(name: str) -> Iterator[None]:
    """Another thread holds this lock."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock(name):
            begun.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        over.set()
        thread.join(30)


@singleton("reindex")
def reindex(number: int = 1) -> int:
    return number + 1


@singleton("reindex")
async def areindex(number: int = 1) -> int:
    return number + 1


def test_a_function_runs_or_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "grelmicro.django")
    assert reindex(2) == 3
    with held_elsewhere("reindex"):
        assert reindex() is SKIPPED
    assert reindex() == 2
    (record,) = [each for each in caplog.records if each.name == "grelmicro.django"]
    assert record.levelno == logging.INFO
    assert "singleton 'reindex' was skipped: held since 20" in record.message


async def test_a_coroutine_runs_or_is_skipped() -> None:
    assert await areindex(2) == 3
    with held_elsewhere("reindex"):
        assert await areindex() is SKIPPED


def test_a_skip_is_json_and_stays_itself() -> None:
    assert json.loads(json.dumps(SKIPPED)) == {"grelmicro": "skipped"}
    assert pickle.loads(pickle.dumps(SKIPPED)) is SKIPPED


def test_a_busy_function_may_fail_or_wait() -> None:
    fails = singleton("reindex", on_busy="fail")(lambda: 1)
    waits = singleton("reindex", wait=0.1)(lambda: 1)
    with held_elsewhere("reindex"):
        for function in (fails, waits):
            with pytest.raises(LockTimeoutError):
                function()
    assert waits() == 1


def test_a_singleton_is_kept_for_its_minimum() -> None:
    brief = singleton("reindex", min_hold=30)(lambda: 1)
    assert (brief(), brief()) == (1, SKIPPED)


def test_the_errors_of_a_function_are_its_own() -> None:
    @singleton("reindex")
    def fails() -> None:
        raise LockTimeoutError("of another lock")

    with pytest.raises(LockTimeoutError, match="of another lock"):
        fails()
    assert reindex() == 2


def test_a_loss_interrupts_the_main_thread() -> None:
    @singleton("reindex", max_hold=0.2)
    def works() -> None:
        threading.Event().wait(60)

    with pytest.raises(LockLostError, match="max_hold of 0.2 s"):
        works()
    assert reindex() == 2


async def test_a_coroutine_is_stopped_at_its_maximum() -> None:
    @singleton("reindex", max_hold=0.2)
    async def works() -> None:
        await asyncio.sleep(60)

    with pytest.raises(LockLostError, match="max_hold of 0.2 s"):
        await works()
    assert await areindex() == 2


@pytest.mark.parametrize(
    "settings",
    [{"on_busy": "maybe"}, {"on_lost": "run"}, {"lease_duration": 0}, {"min_hold": 9, "max_hold": 3}, {"wait": -1}],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsValidationError):
        singleton("reindex", **settings)


def test_a_celery_task_runs_or_is_skipped() -> None:
    app = celery.Celery("tests", broker="memory://", backend="cache+memory://")
    app.conf.task_always_eager = app.conf.task_store_eager_result = True

    @singleton("reindex")
    def work() -> int:
        return 5

    task = celery.shared_task(name="reindex")(work)

    assert task.delay().get() == 5
    with held_elsewhere("reindex"):
        result = task.delay()
        assert result.state == "SUCCESS"
        assert result.get() == {"grelmicro": "skipped"}
    with pytest.raises(TypeError, match="write @task or @shared_task above it"):
        singleton("reindex")(task)


class Nightly(SingletonCommand):
    singleton_name = "nightly"

    def handle(self, *args: Any, **options: Any) -> str:
        return f"{self.lease.name} {self.lease.valid}"


def test_a_command_that_is_called() -> None:
    out = StringIO()
    assert call_command(Nightly(), stdout=out) == "nightly True"
    with held_elsewhere("nightly"):
        assert call_command(Nightly()) is None


def test_singleton_that_is_called_neither_exits_nor_closes_connections() -> None:
    out = StringIO()
    call_command("singleton", "--", "diffsettings", stdout=out)
    assert "GRELMICRO" in out.getvalue()
    with held_elsewhere("diffsettings"):
        assert call_command("singleton", "diffsettings") is None
        with pytest.raises(CommandError) as busy:
            call_command("singleton", "diffsettings", on_busy="fail")
        assert busy.value.returncode == 75
    with pytest.raises(CommandError) as wrong:
        call_command("singleton")
    assert wrong.value.returncode == 64
