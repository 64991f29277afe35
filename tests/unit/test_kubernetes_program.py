"""A program that gives credentials ends with all that it has begun, wherever it is given up."""

import asyncio
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

import psutil
import pytest

from grelmicro.backends.kubernetes.program import Program
from tests.helpers.cancelling import Cancel, Suspended, When, at_once, in_flight
from tests.helpers.worlds import eventually

VERSION = "client.authentication.k8s.io/v1"

BEGINS_ANOTHER = 'sleep 60 & echo $! > "$BEGUN"; wait'
"""A shell program that waits for another one."""

SOON = 0.5
"""Seconds for a program that may have been started to begin another one."""


def when_begun(begun: Path, when: When) -> When:
    """As `when`, after the program has begun another one, if it does soon."""

    def wait(cancel: Cancel, awaited: object) -> object:
        until = monotonic() + SOON
        while not begun.exists() and monotonic() < until:
            sleep(0.01)
        return when(cancel, awaited)

    return wait


def marked(mark: str) -> list[psutil.Process]:
    """The processes that run with a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


async def give_up(program: Program, at: int, when: When) -> None:
    """Run it, and cancel that at its suspension number `at`, or when it comes to no more of them."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        await Suspended(program.run(), at, when, task.cancel)

    running = asyncio.create_task(run())
    await asyncio.wait({running}, timeout=2 * SOON)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("when", [at_once, in_flight])
@pytest.mark.parametrize("at", [1, 2, 3])
async def test_given_up_anywhere_nothing_of_it_runs_on(at: int, when: When, tmp_path: Path) -> None:
    mark, begun = uuid4().hex, tmp_path / "begun"
    program = Program(VERSION, "sh", ("-c", BEGINS_ANOTHER), (("BEGUN", str(begun)), ("MARK", mark)))
    await give_up(program, at, when_begun(begun, when))
    await eventually(lambda: not marked(mark), "nothing runs on")


async def test_one_that_cannot_be_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await Program(VERSION, str(tmp_path / "none")).run()


async def test_given_up_while_it_cannot_be_run_is_given_up(tmp_path: Path) -> None:
    await give_up(Program(VERSION, str(tmp_path / "none")), 1, at_once)
