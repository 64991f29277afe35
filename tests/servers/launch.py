"""A server for a program that is no test: the benchmarks, the demonstration.

`python -m tests.servers.launch COMMAND ...` runs a command whose environment names a server of each kind; a Kubernetes
API server is left out where there is none.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.servers import found, kubernetes, redis
from tests.servers.found import Binary
from tests.servers.home import Home
from tests.servers.kubernetes import KubernetesServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.servers.server import Server

VARIABLES = {"redis": "REDIS_URL", "postgres": "POSTGRES_URL", "kubernetes": "KUBECONFIG"}
"""What names a server that runs already, by the kind of server: its URL, or the kubeconfig file of a cluster."""

STARTERS: dict[str, tuple[Callable[[], tuple[Binary, ...]], Callable[[Home, Binary], Server]]] = {
    "redis": (found.redis_binaries, lambda home, binary: RedisServer(home, binary, redis.FAST)),
    "postgres": (found.postgres_binaries, lambda home, binary: PostgresServer(home, binary, {})),
    "kubernetes": (found.kubernetes_binaries, lambda home, _: KubernetesServer(home, found.kubernetes_binaries(), {})),
}


def is_here(kind: str) -> bool:
    """Whether there is a server of that kind, or a program that is one."""
    return bool(os.environ.get(VARIABLES[kind]) or STARTERS[kind][0]())


@contextmanager
def launched(kind: str) -> Iterator[str]:
    """The URL of a server: the one that the environment names, else one that runs until the block ends.

    The program ends when there is none to start.
    """
    variable = VARIABLES[kind]
    if named := os.environ.get(variable):
        yield kubernetes.url_of(named) if kind == "kubernetes" else named
        return
    binaries, build = STARTERS[kind]
    if not binaries():
        sys.exit(f"no {kind} server here: set {variable} for one that runs, or {found.REMEDIES[kind]}")
    with Home() as home:
        server = build(home, binaries()[0])
        server.start()
        try:
            yield server.url
        finally:
            server.kill()


def main(command: Sequence[str]) -> int:
    """Run a command; its exit code."""
    kinds = [kind for kind in VARIABLES if kind != "kubernetes" or found.kubernetes_binaries()]
    with ExitStack() as stack:
        urls = {VARIABLES[kind]: stack.enter_context(launched(kind)) for kind in kinds}
        if "KUBECONFIG" in urls:
            urls["KUBECONFIG"] = kubernetes.kubeconfig_of(urls["KUBECONFIG"])
        return subprocess.run(command, env={**os.environ, **urls}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
