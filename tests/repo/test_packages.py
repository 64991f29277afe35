"""Each distribution carries what it should, and they fit each other."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.repo.source import ROOT

FOLDERS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("integrations/*/pyproject.toml"))]


def project(folder: Path) -> dict[str, Any]:
    """The metadata of the distribution in a folder."""
    metadata: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return metadata


def wheel(folder: Path, target: Path) -> list[str]:
    """The names of the files in the wheel that is built from a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    with ZipFile(built) as archive:
        return archive.namelist()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_wheel_ships_types_and_license(folder: Path, tmp_path: Path) -> None:
    (package,) = (path.name for path in (folder / "src").iterdir())
    names = wheel(folder, tmp_path)
    assert f"{package}/__init__.py" in names
    assert f"{package}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_license_is_the_one_of_the_repository(folder: Path) -> None:
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.name)
def test_integration_pins_the_minor_version_of_the_core(folder: Path) -> None:
    major, minor, _ = project(ROOT / "core")["version"].split(".")
    assert f"grelmicro-suite~={major}.{minor}.0" in project(folder)["dependencies"]


def test_extra_all_is_every_extra() -> None:
    extras = project(ROOT / "core")["optional-dependencies"]
    others = ",".join(name for name in extras if name != "all")
    assert extras["all"] == [f"grelmicro-suite[{others}]"]
