"""The aids for the tests of a project: `grelmicro_locks`, the pytest plugin and the mixin of `manage.py test`."""

import asyncio
import subprocess
import sys
import unittest
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from time import monotonic

import pytest
from django.test import SimpleTestCase, override_settings
from django.test.utils import setup_test_environment, teardown_test_environment

from grelmicro.errors import LockLostError, LockNotOwnedError, LockTimeoutError, OutOfContextError
from grelmicro_django import SKIPPED, lock, singleton
from grelmicro_django.testing import GrelmicroLocks, GrelmicroTestMixin, fresh_locks
from tests.django.helpers import SECONDS, make_project


@pytest.fixture
def locks() -> Iterator[GrelmicroLocks]:
    with fresh_locks() as locks:
        yield locks


def test_a_lock_that_is_held_elsewhere_is_busy(locks: GrelmicroLocks) -> None:
    with locks.held_elsewhere("order:1") as other:
        assert other.valid
        with pytest.raises(LockTimeoutError), lock("order:{pk}", pk=1, timeout=0):
            raise AssertionError
        holder = locks.holder("order:1")
        assert holder is not None
        assert holder.worker == "elsewhere"
    assert locks.holder("order:1") is None
    with lock("order:{pk}", pk=1, timeout=0), pytest.raises(LockTimeoutError):
        locks.held_elsewhere("order:1", timeout=0).__enter__()


def test_time_passes_while_a_thread_waits(locks: GrelmicroLocks) -> None:
    with locks.held_elsewhere("order:1"):
        began = monotonic()
        with pytest.raises(LockTimeoutError), lock("order:{pk}", pk=1, timeout=0.2):
            raise AssertionError
        assert monotonic() >= began + 0.2


def test_a_lease_that_is_not_renewed_ends_when_time_is_moved(locks: GrelmicroLocks) -> None:
    with locks.held_elsewhere("order:1", lease_duration=60) as other:
        locks.advance(50)
        assert not other.lost
        locks.advance(11)
        assert other.lost
        with lock("order:{pk}", pk=1, timeout=0):
            pass


def test_a_lock_of_the_project_is_renewed_however_far_time_is_moved(locks: GrelmicroLocks) -> None:
    with lock("order:{pk}", pk=1) as held:
        locks.advance(3600)
        held.raise_if_lost()


def test_a_lock_that_is_lost(locks: GrelmicroLocks) -> None:
    with pytest.raises(LockLostError), lock("order:{pk}", pk=1) as held:
        fence = held.fencing_token
        assert locks.lose("order:1").fence == fence
        held.raise_if_lost()
    with pytest.raises(LockNotOwnedError, match="lock 'order:1' is free"):
        locks.lose("order:1")


def test_a_singleton_that_another_worker_runs_is_skipped(locks: GrelmicroLocks) -> None:
    ran: list[int] = []

    @singleton("reindex")
    def reindex() -> None:
        ran.append(1)

    with locks.held_elsewhere("reindex"):
        assert reindex() is SKIPPED
    reindex()
    assert ran == [1]


async def test_coroutines_use_the_same_aids(locks: GrelmicroLocks) -> None:
    async with locks.held_elsewhere("order:1"):
        with pytest.raises(LockTimeoutError):
            async with lock("order:{pk}", pk=1, timeout=0):
                raise AssertionError
    with pytest.raises(LockLostError):
        async with lock("order:{pk}", pk=1):
            locks.lose("order:1")
            await asyncio.sleep(SECONDS)
    async with locks.held_elsewhere("order:1", lease_duration=30) as other:
        locks.advance(31)
        assert other.lost
        assert locks.holder("order:1") is None


def test_each_begins_without_leases() -> None:
    with fresh_locks() as first, first.held_elsewhere("order:1"):
        assert first.holder("order:1") is not None
        with fresh_locks() as second:
            assert second.holder("order:1") is None


def test_it_needs_a_test_run() -> None:
    teardown_test_environment()
    try:
        with pytest.raises(OutOfContextError, match="no test run has begun"), fresh_locks():
            raise AssertionError
    finally:
        setup_test_environment()


def test_the_time_of_another_store_cannot_be_moved(locks: GrelmicroLocks, tmp_path: Path) -> None:
    with override_settings(GRELMICRO={"STORE": f"sqlite:///{tmp_path}/locks.db"}):
        with locks.held_elsewhere("order:1"), pytest.raises(OutOfContextError, match="a store of its own"):
            locks.advance(1)
        assert locks.holder("order:1") is None


def test_the_mixin_gives_each_test_locks_of_its_own() -> None:
    seen: list[bool] = []
    left = ExitStack()

    class ShipTests(GrelmicroTestMixin, SimpleTestCase):
        def test_first(self) -> None:
            self._ship()

        def test_second(self) -> None:
            self._ship()

        def _ship(self) -> None:
            seen.append(self.grelmicro_locks.holder("order:1") is None)
            left.enter_context(self.grelmicro_locks.held_elsewhere("order:1"))

    result = unittest.TestResult()
    with left:
        unittest.defaultTestLoader.loadTestsFromTestCase(ShipTests).run(result)
        assert (result.testsRun, result.errors, result.failures) == (2, [], [])
        ShipTests("test_first").debug()
    assert seen == [True] * 3


PYTEST = """
    import sys

    import pytest

    from grelmicro_django import lock


    def test_no_setting_was_read_for_the_plugin():
        assert "grelmicro_django.pytest_plugin" in sys.modules


    @pytest.mark.parametrize("number", [1, 2])
    def test_ship_busy(client, grelmicro_locks, number):
        assert grelmicro_locks.holder("order:1") is None
        with grelmicro_locks.held_elsewhere("order:1"):
            assert client.post("/orders/1/ship").status_code == 409
        assert client.post("/orders/1/ship").status_code == 200


    @pytest.mark.parametrize("number", [1, 2])
    def test_leases_are_cleared_without_the_fixture(number):
        lock("order:{pk}", pk=1, timeout=0).__enter__()
"""

URLS = """
    from django.http import HttpResponse
    from django.urls import path

    from grelmicro.errors import LockTimeoutError
    from grelmicro_django import lock


    def ship(request, pk):
        try:
            with lock("order:{pk}", pk=pk, timeout=0):
                return HttpResponse("shipped")
        except LockTimeoutError:
            return HttpResponse("busy", status=409)


    urlpatterns = [path("orders/<int:pk>/ship", ship)]
"""

UNITTEST = """
    from django.test import TestCase

    from grelmicro_django.testing import GrelmicroTestMixin


    class ShipTests(GrelmicroTestMixin, TestCase):
        def test_busy(self):
            with self.grelmicro_locks.held_elsewhere("order:1"):
                self.assertEqual(self.client.post("/orders/1/ship").status_code, 409)
            self.assertEqual(self.client.post("/orders/1/ship").status_code, 200)
"""


def test_a_project_runs_its_tests_by_pytest_and_by_manage(tmp_path: Path) -> None:
    project = make_project(tmp_path, "redis://nowhere.invalid/0")  # it would fail if it were asked
    with (tmp_path / "settings.py").open("a") as settings:
        settings.write("ROOT_URLCONF = 'urls'\nALLOWED_HOSTS = ['testserver']\n")
    (tmp_path / "urls.py").write_text(dedent(URLS))
    (tmp_path / "test_ship.py").write_text(dedent(PYTEST))
    (tmp_path / "shop/tests.py").write_text(dedent(UNITTEST))
    (tmp_path / "pytest.ini").write_text("[pytest]\nDJANGO_SETTINGS_MODULE = settings\n")
    by_pytest = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_ship.py"],
        cwd=tmp_path,
        env=project.environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "5 passed" in by_pytest.stdout, by_pytest.stdout + by_pytest.stderr
    by_manage = project.manage("test", "shop")
    assert by_manage.code == 0, by_manage.err
    assert "Ran 1 test" in by_manage.err
