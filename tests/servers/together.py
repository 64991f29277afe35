"""One API server for all test processes of a run: it takes seconds to start, and hundreds of megabytes."""

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import found
from tests.servers.home import WATCH, Home
from tests.servers.kubernetes import Api, KubernetesServer

_KEPT: list[object] = []
"""What other processes may still use when this one is done with it."""


class SharedHome(Home):
    """A home that ends when no process has the lock of its users' file any more, even if all were killed."""

    def __init__(self, users: Path) -> None:
        self._users = users
        super().__init__()

    def watch(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-I", WATCH, "unused", self._users, self.path], start_new_session=True)


@contextmanager
def shared_api(run: Path) -> Iterator[Api]:
    """The API server of the run that this folder belongs to; the first who asks starts it, the last ends it."""
    users, about = run / "kubernetes.users", run / "kubernetes.users.about"
    with users.open("a") as user:
        with (run / "kubernetes.start").open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(user, fcntl.LOCK_SH)  # until this process ends: it waits while a former server is ended
            if not about.exists():
                about.write_text(json.dumps(_start(users)))
        address, folder = json.loads(about.read_text())
        yield Api(address, Path(folder))


def _start(users: Path) -> tuple[str, str]:
    """Start a server; its address and folder."""
    home = SharedHome(users)
    server = KubernetesServer(home, found.kubernetes_binaries(), {})
    _KEPT.extend((home, server))
    server.start()
    return server.api.address, str(server.api.folder)
