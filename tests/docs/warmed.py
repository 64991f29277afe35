"""A process that has imported what examples import, and runs each example in a forked child of its own.

Requests and answers are JSON objects, one a line. A child runs its program at the end of this module, so that the
interpreter ends as it does after any program.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from _pytest.config import default_plugins

WARM = (
    "grelmicro_fastapi",
    "grelmicro.backends.memory",
    "grelmicro.backends.postgres",
    "grelmicro.backends.redis",
    "grelmicro.backends.sqlite",
    "grelmicro.task",
    "grelmicro.testing",
    "fastapi.testclient",
    "pytest_asyncio.plugin",
    *(f"_pytest.{name}" for name in default_plugins),
)
"""The modules that it has imported. None of them may read the environment, as the client of Kubernetes does."""

POLL_INTERVAL = 0.002
"""Seconds between two looks for the end of a child."""


@dataclass(frozen=True)
class Request:
    """A program to run."""

    folder: str
    file: str
    env: dict[str, str]
    output: str
    """Where its standard output goes; its errors go to the same path with `.err`."""
    limit: float
    """Seconds after which it is killed."""


@dataclass(frozen=True)
class Answer:
    """How it ended."""

    code: int | None
    """Its exit code; None if it did not end in time."""


def serve() -> Request:
    """Fork a child for each request. In the child this returns the request; the parent ends with its input."""
    for line in sys.stdin:
        request = Request(**json.loads(line))
        child = os.fork()
        if child == 0:
            return request
        sys.stdout.write(json.dumps(asdict(Answer(ended(child, request.limit)))) + "\n")
        sys.stdout.flush()
    sys.exit()


def ended(child: int, limit: float) -> int | None:
    """Wait for the end of a child; its exit code."""
    until = time.monotonic() + limit
    while (waited := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return None
        time.sleep(POLL_INTERVAL)
    return os.waitstatus_to_exitcode(waited[1])


def become(request: Request) -> None:
    """Have the folder, the environment, the files and the arguments of a program that was just started."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request.output, os.O_WRONLY | os.O_CREAT),
        (2, f"{request.output}.err", os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv[:] = [request.file]
    sys.path[0] = request.folder


def run(file: str) -> None:
    """Run a program, or the tests of a file."""
    if file.startswith("test_"):
        # What grelmicro-suite[testing] brings; all plugins that are installed here take longer to load than most tests.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ["-q", "-p", "asyncio", "-p", "no:cacheprovider", "-W", "error"]
        # What follows silences warnings that are not the reader's: of this process, and of pytest-asyncio.
        options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        options += ["-o", "asyncio_default_fixture_loop_scope=function"]
        if Path("pytest.ini").exists():  # a Django project
            options += ["-p", "django", "-p", "grelmicro_django"]
        sys.argv[1:] = [*options, file]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
        return
    program = ModuleType("__main__")
    program.__file__ = file
    sys.modules["__main__"] = program
    exec(compile(Path(file).read_text(encoding="utf-8"), file, "exec"), vars(program))


if __name__ == "__main__":
    for name in WARM:
        importlib.import_module(name)
    # Collections in the children leave alone what was imported here: looking through it would copy its memory.
    gc.collect()
    gc.freeze()
    asked = serve()
    become(asked)
    run(asked.file)
