"""Where the servers of one test process live, and who they run as."""

import os
import pwd
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict

WATCH = Path(__file__).with_name("watch.py")

# Below the ports that systems give to outgoing connections: while a server is down, a client that keeps trying to
# connect could be given the very port that it calls, and be connected to itself.
PORTS = range(20_000, 32_000)


class Identity(TypedDict):
    """Whom a program is run as: what `subprocess` takes. None is who this process is."""

    user: int | None
    group: int | None
    extra_groups: list[int] | None


SELF = Identity(user=None, group=None, extra_groups=None)


class Home:
    """A temporary folder. Its servers end and it is removed when this process ends, even by SIGKILL."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="grelmicro-tests-")).resolve()
        self.path.chmod(0o711)  # servers that run as another user pass through
        self.ending = self.watch()
        """The process that ends it."""

    def watch(self) -> "subprocess.Popen[bytes]":
        """Start what ends it."""
        return subprocess.Popen(
            [sys.executable, "-I", WATCH, "process", str(os.getpid()), self.path],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C does not reach it
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.ending.communicate()

    def folder(self, name: str, owner: Identity = SELF) -> Path:
        """A new folder, which belongs to `owner`."""
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.path))
        if owner["user"] is not None and owner["group"] is not None:
            os.chown(path, owner["user"], owner["group"])
        return path


def unprivileged() -> Identity:
    """Who servers run as that refuse to be root."""
    if os.geteuid() != 0:
        return SELF
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = next(known[name] for name in ("postgres", "nobody") if name in known)
    return Identity(user=entry.pw_uid, group=entry.pw_gid, extra_groups=[])


def free_port() -> int:
    """A port that nobody listens on."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
