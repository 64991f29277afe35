"""A server for a program that is no test: the benchmarks, the demonstration.

`python -m tests.servers.launch COMMAND ...` runs a command with the URLs of a server of each kind in its environment.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.servers import found, redis
from tests.servers.found import Binary
from tests.servers.home import Home
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.servers.server import Server

VARIABLES = {"redis": "REDIS_URL", "postgres": "POSTGRES_URL"}
"""What names a server that runs already, by the kind of server."""

STARTERS: dict[str, tuple[Callable[[], tuple[Binary, ...]], Callable[[Home, Binary], Server]]] = {
    "redis": (found.redis_binaries, lambda home, binary: RedisServer(home, binary, redis.FAST)),
    "postgres": (found.postgres_binaries, lambda home, binary: PostgresServer(home, binary, {})),
}


@contextmanager
def launched(kind: str) -> Iterator[str]:
    """The URL of a server: the one that the environment names, else one that runs until the block ends.

    The program ends when there is none to start.
    """
    variable = VARIABLES[kind]
    if url := os.environ.get(variable):
        yield url
        return
    binaries, build = STARTERS[kind]
    if not binaries():
        sys.exit(f"no {kind} server here: set {variable} to the URL of one, or {found.REMEDIES[kind]}")
    with Home() as home:
        server = build(home, binaries()[0])
        server.start()
        try:
            yield server.url
        finally:
            server.kill()


def main(command: Sequence[str]) -> int:
    """Run a command; its exit code."""
    with ExitStack() as stack:
        urls = {variable: stack.enter_context(launched(kind)) for kind, variable in VARIABLES.items()}
        return subprocess.run(command, env={**os.environ, **urls}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
