"""`lock` in code without an event loop."""

import threading
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.test import override_settings

from grelmicro.coordination import LockTimeoutError
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro_django import lock
from grelmicro_django.serving import served, serving


def in_thread(work: object) -> BaseException | None:
    """What `work` raises in a thread of its own."""
    assert callable(work)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return raised[0] if raised else None


def enter(name: str, **values: Any) -> None:
    with lock(name, timeout=0, **values):
        return


def test_one_block_at_a_time() -> None:
    with lock("order:{pk}", pk=7) as held:
        assert held.fencing_token > 0
        assert isinstance(in_thread(lambda: enter("order:{pk}", pk=7)), LockTimeoutError)
        assert in_thread(lambda: enter("order:{pk}", pk=8)) is None
    assert in_thread(lambda: enter("order:{pk}", pk=7)) is None


def test_a_block_that_raises_releases() -> None:
    with pytest.raises(ZeroDivisionError), lock("order"):
        raise ZeroDivisionError
    assert in_thread(lambda: enter("order")) is None


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("order:{pk}", {}, "has the field {pk}: give its value"),
        ("order", {"pk": 1}, "has no field {pk}"),
        ("order:{}", {}, "no plain name"),
        ("", {}, "lock name"),
    ],
)
def test_a_name_that_is_none_is_refused_before_anything_is_opened(name: str, values: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        lock(name, **values)
    assert text in str(caught.value)
    assert serving.enter_at_once() is None


async def test_a_thread_that_runs_an_event_loop_is_refused() -> None:
    with pytest.raises(SynchronousOnlyOperation, match="use `async with`"), lock("order"):
        pass


def test_one_lock_guards_one_block() -> None:
    once = lock("order")
    with once, pytest.raises(OutOfContextError, match="guards a block already"), once:
        pass


def test_a_test_run_never_opens_the_store_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with lock("order"):
        assert list(tmp_path.iterdir()) == []


def test_overridden_settings_count(tmp_path: Path) -> None:
    with override_settings(GRELMICRO={"STORE": f"sqlite:///{tmp_path}/locks.db"}), lock("order"):
        assert (tmp_path / "locks.db").exists()
    with lock("order"), served() as micro:
        assert micro.coordination.lock_backend.scope == "process"


def test_a_store_that_is_replaced_stays_open_for_the_lease_that_is_held(tmp_path: Path) -> None:
    here = {"STORE": f"sqlite:///{tmp_path}/here.db"}
    there = {"STORE": f"sqlite:///{tmp_path}/there.db"}
    with override_settings(GRELMICRO=here):
        with lock("order") as held:
            with served() as micro:
                pass
            with override_settings(GRELMICRO=there), lock("order", timeout=0):
                assert held.valid
            assert micro.is_open
            held.extend()
        assert not micro.is_open
