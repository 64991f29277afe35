"""The fixtures, in projects of their own that pytest runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

APP = """
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock, TaskLock
from grelmicro.task import Tasks

leader = LeaderElection("feed")
tasks = Tasks(tasks=[leader])
micro = Grelmicro(uses=[Coordination.from_url("redis://127.0.0.1:1/0"), tasks])
cart = micro.coordination.lock("cart", lease_duration=60)


@tasks.every(seconds=60, lock=TaskLock(), name="tick")
async def tick() -> None: ...
"""

CONFTEST = """
import pytest

from grelmicro import Grelmicro
from shop import micro

pytest_plugins = ["grelmicro.testing.pytest_plugin"]


@pytest.fixture
def grelmicro_app() -> Grelmicro:
    return micro
"""

AUTOUSE = """

@pytest.fixture(autouse=True)
def in_memory(grelmicro_memory: Grelmicro) -> None: ...
"""

ASYNC_TESTS = """
import asyncio

import pytest

from grelmicro.coordination import Lock, LockTimeoutError
from grelmicro.testing import held_elsewhere, leads, leads_elsewhere
from shop import cart, leader, micro, tasks

{mark}


@pytest.mark.parametrize("turn", range(2))
async def test_each_test_has_a_store_of_its_own(turn, grelmicro_memory):
    assert grelmicro_memory is micro
    async with micro:
        handle = await cart.acquire()
        assert handle.fencing_token == 1


async def test_time(grelmicro_clock):
    async with micro:
        await cart.acquire()
        await grelmicro_clock.advance(59)
        assert await Lock("cart").locked()
        await grelmicro_clock.advance(2)
        assert not await Lock("cart").locked()
        assert tasks.tasks[1].outcomes["success"] == 2


async def test_both(grelmicro_memory, grelmicro_clock):
    async with micro, held_elsewhere(micro, "cart"):
        waiting = asyncio.create_task(cart.acquire(timeout=5))
        await grelmicro_clock.advance(6)
        with pytest.raises(LockTimeoutError):
            await waiting


async def test_leaders(grelmicro_memory):
    async with micro, leads(micro, leader), leads_elsewhere(micro, leader):
        assert not leader.is_leader()
"""

ANYIO = """
@pytest.fixture
def anyio_backend():
    return "asyncio"


pytestmark = pytest.mark.anyio
"""

SYNC_TESTS = """
import asyncio

import pytest

from shop import cart, micro


def test_a_failure_on_a_loop():
    async def steps():
        await micro.__aenter__()
        await cart.acquire()
        raise LookupError("of the test")

    asyncio.run(steps())


def test_a_failure_in_a_thread():
    with micro:
        cart.from_thread.acquire()
        raise LookupError("of the test")


@pytest.mark.parametrize("number", range(2))
def test_alone(number):
    with micro:
        assert cart.from_thread.acquire().fencing_token == 1


def test_time(grelmicro_clock):
    with micro:
        handle = cart.from_thread.acquire()
        grelmicro_clock.from_thread.advance(61)
        assert not handle.valid


def test_left_open():
    micro.__enter__()


def test_after_that(): ...
"""

WRONG_TESTS = """
import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination


def test_without_an_app(grelmicro_memory): ...


class TestLate:
    @pytest.fixture
    def grelmicro_app(self):
        return Grelmicro(uses=[Coordination.from_url("memory://")])

    def test_a_late_clock(self, grelmicro_memory, request):
        request.getfixturevalue("grelmicro_clock")
"""


def run(folder: Path, *options: str, **files: str) -> str:
    """What pytest says about a project of these modules."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GREL_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-W", "error", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )
    return done.stdout + done.stderr


def outcomes(said: str) -> dict[str, str]:
    """What became of each test, in what pytest said."""
    return {name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) .*::(\S+)", said, re.MULTILINE)}


@pytest.mark.parametrize(
    ("mark", "options"),
    [
        ("pytestmark = pytest.mark.asyncio", ["-o", "asyncio_default_fixture_loop_scope=function"]),
        (ANYIO, ["-p", "no:asyncio"]),
    ],
    ids=["pytest-asyncio", "anyio"],
)
def test_async_tests(mark: str, options: list[str], tmp_path: Path) -> None:
    said = run(tmp_path, *options, shop=APP, conftest=CONFTEST, test_shop=ASYNC_TESTS.format(mark=mark))
    assert list(outcomes(said).values()) == ["PASSED"] * 5, said


def test_no_test_harms_another_one(tmp_path: Path) -> None:
    said = run(tmp_path, "-p", "no:asyncio", shop=APP, conftest=CONFTEST + AUTOUSE, test_shop=SYNC_TESTS)
    assert outcomes(said) == {
        "test_a_failure_on_a_loop": "FAILED",
        "test_a_failure_in_a_thread": "FAILED",
        "test_alone[0]": "PASSED",
        "test_alone[1]": "PASSED",
        "test_time": "PASSED",
        "test_left_open": "ERROR",
        "test_after_that": "ERROR",
    }, said
    assert said.count(" - LookupError: of the test") == 2
    assert "close it inside the block, also when the test fails" in said
    assert "enter it before the app is opened" in said


def test_what_is_used_wrongly_is_told(tmp_path: Path) -> None:
    conftest = 'pytest_plugins = ["grelmicro.testing.pytest_plugin"]\n'
    said = run(tmp_path, "-p", "no:asyncio", conftest=conftest, test_shop=WRONG_TESTS)
    assert outcomes(said) == {"test_without_an_app": "ERROR", "test_a_late_clock": "FAILED"}, said
    assert "define a fixture grelmicro_app that returns your Grelmicro" in said
    assert "name grelmicro_clock among the arguments of the test" in said


def test_a_project_that_does_not_ask_for_it_sees_nothing_of_it(tmp_path: Path) -> None:
    tests = "import sys\n\n\ndef test_it():\n    assert not [name for name in sys.modules if 'grelmicro' in name]\n"
    alone = ("-p", "no:asyncio", "-p", "no:grelmicro_django")
    assert outcomes(run(tmp_path, *alone, test_shop=tests)) == {"test_it": "PASSED"}
