"""PostgreSQL."""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg

from tests.servers.found import Binary
from tests.servers.home import Home, Identity, unprivileged
from tests.servers.server import Server

T = TypeVar("T")
Setting = str | int | float

FAST = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
"""What was committed may be lost with the machine or by SIGKILL: for the server that tests share."""


class PostgresServer(Server):
    """One PostgreSQL server. Its only user is postgres, who needs no password."""

    stop_signal = signal.SIGINT  # without waiting for clients to leave

    def __init__(self, home: Home, binary: Binary, settings: Mapping[str, Setting]) -> None:
        identity = unprivileged()
        super().__init__(home, reachable(home, binary, identity), identity)
        self.settings = dict(settings)
        self.data = self.folder / "data"
        initialise(self.binary, self.data, identity)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def socket_url(self) -> str:
        """The same server by its Unix socket."""
        return f"postgresql://postgres@/postgres?host={self.folder}&port={self.port}"

    def command(self) -> Sequence[str | Path]:
        values: dict[str, Setting] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": str(self.folder),
            **self.settings,
        }
        return [
            self.binary.path,
            "-D",
            self.data,
            *(part for name, value in values.items() for part in ("-c", f"{name}={value}")),
        ]

    def ready(self) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # One that was killed left its file.
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


def initialise(binary: Binary, data: Path, identity: Identity) -> None:
    """Make a data folder."""
    subprocess.run(
        [
            *(binary.path.with_name("initdb"), "--pgdata", data, "--username", "postgres", "--auth", "trust"),
            *("--encoding", "UTF8", "--no-locale", "--wal-segsize", "1", "--no-sync", "--no-instructions"),
        ],
        cwd=data.parent,
        check=True,
        capture_output=True,
        **identity,
    )


def reachable(home: Home, binary: Binary, identity: Identity) -> Binary:
    """The same program where it may be run: an environment below root's home is closed to others."""
    try:
        subprocess.run([binary.path, "--version"], check=True, capture_output=True, cwd=home.path, **identity)
    except PermissionError:
        package = binary.path.parents[2]
        copy = home.path / str(binary)
        for part in (package, package.with_name(f"{package.name}.libs")):
            if part.exists() and not (copy / part.name).exists():
                shutil.copytree(part, copy / part.name)
        copy.chmod(0o755)
        return Binary(binary.kind, binary.version, copy / binary.path.relative_to(package.parent))
    return binary


@contextmanager
def fresh_database(url: str) -> Iterator[str]:
    """The URL of a new, empty database on the server that `url` leads to; it is dropped at the end."""
    name = f"test_{uuid4().hex[:16]}"
    run(execute(url, f"CREATE DATABASE {name} TEMPLATE template0"))
    try:
        yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
    finally:
        run(execute(url, f"DROP DATABASE {name} WITH (FORCE)"))


async def execute(url: str, *statements: str) -> None:
    """Execute statements, each in a transaction of its own."""
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


def run(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end, whether or not this thread has an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
