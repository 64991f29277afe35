"""Another distribution that owns the folder `grelmicro`, and replaces files of this one, is named with the remedy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import CORE, INTEGRATIONS

COMMANDS = "run `pip uninstall -y grelmicro grelmicro-suite`, then `pip install --force-reinstall grelmicro-suite`"
BOTH = (
    "the distributions 'grelmicro' and 'grelmicro-suite' are both installed, and both are imported as grelmicro: "
    f"{COMMANDS}"
)
REPLACED = f"files of the distribution 'grelmicro-suite' were replaced or removed: {COMMANDS}"

SHARED = ("__init__.py", "errors.py", "coordination/__init__.py", "coordination/lock.py", "task/__init__.py")
"""Files that the other one has, too."""

OPENED = "import asyncio; from grelmicro.app import Grelmicro; asyncio.run(Grelmicro().open())"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with copies of what is installed, in which files can be replaced."""
    folder = tmp_path / "site"
    for source in (CORE, *INTEGRATIONS):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


def ends_with(code: str, site: Path) -> str:
    """The last line that a program writes to standard error."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=site, env=environment, capture_output=True, text=True, check=False
    )
    return (done.stderr.splitlines() or [""])[-1]


def install_the_other(site: Path) -> None:
    for name in SHARED:
        (site / "grelmicro" / name).write_text("class Grelmicro: ...\n")
    (site / "grelmicro-0.41.1.dist-info").mkdir()


OURS = [
    "import grelmicro_fastapi",
    "import grelmicro_starlette",
    "import grelmicro_django",
    "import grelmicro.leases",
    "import grelmicro.backends.memory",
    "import grelmicro.testing",
]


@pytest.mark.parametrize("code", OURS)
def test_one_that_is_installed_later_is_noticed_by_what_it_cannot_replace(site: Path, code: str) -> None:
    assert ends_with(code, site) == ""
    install_the_other(site)
    assert ends_with(code, site).startswith(f"ImportError: {BOTH}")
    (site / "grelmicro-0.41.1.dist-info").rmdir()  # also where only its files tell of it
    assert ends_with(code, site).startswith(f"ImportError: {REPLACED}")


def test_one_that_was_installed_before_is_noticed_at_once(site: Path) -> None:
    (site / "grelmicro-0.41.1.dist-info").mkdir()
    for code in ("import grelmicro", "import grelmicro.coordination", "import grelmicro.task", *OURS):
        assert ends_with(code, site).startswith(f"ImportError: {BOTH}")


def test_one_without_these_files_is_noticed_by_the_packages_that_are_left(site: Path) -> None:
    install_the_other(site)
    for name in SHARED[1:]:
        shutil.copy(CORE / "grelmicro" / name, site / "grelmicro" / name)
    for code in ("import grelmicro.coordination", "import grelmicro.task", OPENED):
        assert ends_with(code, site).startswith(f"ImportError: {BOTH}")


def test_a_file_of_another_name_is_no_other_distribution(site: Path) -> None:
    for name in ("grelmicro_suite-0.1.0.dist-info", "grelmicro-notes", "mygrelmicro-1.0.dist-info"):
        (site / name).mkdir()
    assert ends_with("import grelmicro", site) == ""
