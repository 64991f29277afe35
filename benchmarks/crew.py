"""The processes that are measured: one for each contender, told what to do one command at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.places import Places

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Peer:
    """An interpreter that has the PyPI package."""

    interpreter: str
    version: str
    python: str

    @classmethod
    def find(cls, interpreter: str) -> Self:
        """Ask an interpreter for it; ends the program when it has none."""
        code = "import importlib.metadata as m, platform; print(m.version('grelmicro'), platform.python_version())"
        try:
            done = subprocess.run(
                [interpreter, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            sys.exit(f"PEER: {interpreter} has no package grelmicro: name an interpreter that has, or unset PEER")
        version, python = done.stdout.split()
        return cls(interpreter, version, python)


class Worker:
    """One process with one contender.

    Args:
        interpreter: what runs it.
        module: the contender's module: it reads commands and prints answers, one JSON line each.
        arguments: those of the module.
    """

    def __init__(self, interpreter: str, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [interpreter, "-m", f"benchmarks.{module}", *arguments],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, do: str, **arguments: float) -> None:
        """Have it begin something; `answer` waits for the end."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """What became of the command that was sent first of those unanswered."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"{self._process.args!r} ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]

    def ask(self, do: str, **arguments: float) -> Any:
        """Have it do something, and wait for the answer."""
        self.send(do, **arguments)
        return self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        # The end of its input ends it.
        self._process.communicate()


class Crew:
    """A worker for each contender of one store.

    Args:
        store: which one.
        peer: the peer's interpreter, if there is one.
        places: where leases are.
        floor: whether the bare floor takes part.
        count: whether all count the calls of their stores, which slows them down.
    """

    def __init__(
        self, store: str, peer: Peer | None, places: Places, *, floor: bool = False, count: bool = False
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self._stack = ExitStack()
        given = [store, *(["--count"] if count else [])]
        self._start("ours", sys.executable, "package", places, given)
        if floor:
            self._start("floor", sys.executable, "floor", places, given)
        if peer is not None:
            self._start("peer", peer.interpreter, "package", places, given)
        self.send("ready")
        self.answers()

    def _start(self, name: str, interpreter: str, module: str, places: Places, given: list[str]) -> None:
        worker = Worker(interpreter, module, *given, "--place", places.of(given[0], name))
        self.workers[name] = self._stack.enter_context(worker)

    def rounds(self, count: int, do: str, commands: Mapping[str, Mapping[str, float]]) -> dict[str, list[Any]]:
        """The answers of the workers that have a command, asked in turn, `count` times."""
        names = [name for name in self.workers if name in commands]
        answers: dict[str, list[Any]] = {name: [] for name in names}
        for number in range(count):
            for name in in_turn(names, number):
                answers[name].append(self.workers[name].ask(do, **commands[name]))
        return answers

    def send(self, do: str, **arguments: float) -> None:
        """Have all workers begin something."""
        for worker in self.workers.values():
            worker.send(do, **arguments)

    def answers(self) -> dict[str, Any]:
        """What became of it."""
        return {name: worker.answer() for name, worker in self.workers.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def for_each(*names: str, **arguments: float) -> dict[str, Mapping[str, float]]:
    """One command for several workers."""
    return dict.fromkeys(names, arguments)


def in_turn(names: list[str], number: int) -> list[str]:
    """The names, beginning with another one each time."""
    start = number % len(names)
    return names[start:] + names[:start]


def clean_environment() -> dict[str, str]:
    """The environment without settings of locks, and without what brings other code into a process."""
    foreign = ("GREL_", "SQLITE_", "REDIS_", "POSTGRES_", "COVERAGE_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
