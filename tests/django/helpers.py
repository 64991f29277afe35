"""Django projects with processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from time import monotonic, sleep

SETTINGS = """
SECRET_KEY = "tests"  # of nothing
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "grelmicro_django", "shop"]
DATABASES = {databases!r}
GRELMICRO = {grelmicro!r}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

MANAGE = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""

SECONDS = 60.0
"""Seconds after which a process is given up."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Project:
    """A project in a folder."""

    folder: Path

    def add_command(self, name: str, source: str) -> None:
        """Add a management command to the app `shop`."""
        (self.folder / f"shop/management/commands/{name}.py").write_text(dedent(source))

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of its processes, which stand outside any test run."""
        return {**os.environ, "PYTHONPATH": str(self.folder), **(more or {})}

    def start(self, *args: str, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start `manage.py` with these arguments."""
        return subprocess.Popen(
            [sys.executable, "manage.py", *args],
            cwd=self.folder,
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def manage(self, *args: str, environment: Mapping[str, str] | None = None) -> Ended:
        """Run `manage.py` with these arguments to its end."""
        return ended(self.start(*args, environment=environment))

    @contextmanager
    def running(self, *args: str) -> Iterator["subprocess.Popen[str]"]:
        """A process of `manage.py`, which is killed at the end of the block."""
        process = self.start(*args)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def lines(self, name: str = "log") -> list[str]:
        """The lines of a file that commands write."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, line: str, *, times: int = 1) -> None:
        """Wait until commands have written a line so often."""
        limit = monotonic() + SECONDS
        while sum(line in each for each in self.lines()) < times:
            assert monotonic() < limit, f"no {line!r} in {self.lines()}"
            sleep(0.02)


def ended(process: "subprocess.Popen[str]") -> Ended:
    """The end of a process."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, out, err)


def make_project(folder: Path, store: str, databases: Mapping[str, Mapping[str, object]] | None = None) -> Project:
    """A project with an app `shop`, a store and a database in SQLite unless another is given."""
    if databases is None:
        databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "db.sqlite3")}}
    commands = folder / "shop/management/commands"
    commands.mkdir(parents=True)
    for package in (folder / "shop", folder / "shop/management", commands):
        (package / "__init__.py").touch()
    (folder / "manage.py").write_text(MANAGE)
    (folder / "settings.py").write_text(SETTINGS.format(databases=databases, grelmicro={"STORE": store}))
    return Project(folder)
