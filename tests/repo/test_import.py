"""What `import grelmicro` does to the process that says it, seen from a fresh interpreter."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import CORE, modules

STRANGERS = ("asyncpg", "django", "fastapi", "kubernetes_asyncio", "pytest", "redis", "sqlite3", "starlette")

# Far above the 150 ms that the benchmarks watch: this fails for a heavy import, not for a busy machine.
LIMIT = 0.3


def run(code: str, cwd: Path, *flags: str) -> str:
    """What the code printed, in an interpreter of its own and away from the sources."""
    command = [sys.executable, *flags, "-c", code]
    # A coverage run would enter the process too, with modules of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(code: str, cwd: Path) -> float:
    """The processor time of the shortest of five runs: a busy machine can only make a run longer."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(code, cwd)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(5))


def test_import_gives_no_warning(tmp_path: Path) -> None:
    run("import grelmicro", tmp_path, "-W", "error", "-X", "dev")


def test_import_brings_no_client_and_no_framework(tmp_path: Path) -> None:
    code = f"import sys, grelmicro; print(*sorted({set(STRANGERS)} & set(sys.modules)))"
    assert run(code, tmp_path).split() == []


def test_import_is_quick(tmp_path: Path) -> None:
    assert seconds("import grelmicro", tmp_path) - seconds("pass", tmp_path) < LIMIT


@pytest.mark.exhaustive
@pytest.mark.timeout(180)  # a program for each module
def test_every_module_can_be_the_first_one_imported(tmp_path: Path) -> None:
    # Importing a module runs the packages above it first, which may come back for the module half way.
    code = f"""
import importlib, sys
for name in {list(modules(CORE))}:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "grelmicro"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    assert run(code, tmp_path).splitlines() == []
