"""Redis and Valkey."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from tests.servers.found import Binary
from tests.servers.home import Home
from tests.servers.server import Server

Config = str | int | Sequence[str]
NOTHING = '""'

FAST = {"save": "", "appendonly": "no"}
"""Nothing is kept: for the server that tests share."""

DURABLE = {"save": "", "appendonly": "yes", "appendfsync": "always"}
"""Every acknowledged write is kept."""


class RedisServer(Server):
    """One Redis or Valkey server."""

    def __init__(self, home: Home, binary: Binary, config: Mapping[str, Config]) -> None:
        super().__init__(home, binary)
        self.config = dict(config)
        self.socket = self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"redis://{self._login}127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        """The same server by its Unix socket."""
        return f"unix://{self._login}{self.socket}"

    @property
    def _login(self) -> str:
        password = self.config.get("requirepass")
        return f":{quote(str(password), safe='')}@" if password else ""

    def command(self) -> Sequence[str | Path]:
        path = self.folder / "redis.conf"
        path.write_text("".join(f"{line}\n" for line in self._lines()))
        return [self.binary.path, path]

    def _lines(self) -> list[str]:
        """The configuration; a value that is a list makes a line for each."""
        values: dict[str, Config] = {
            "bind": "127.0.0.1",
            "port": self.port,
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            **{name.replace("_", "-"): value for name, value in self.config.items()},
        }
        return [
            f"{name} {each if each != '' else NOTHING}"
            for name, value in values.items()
            for each in ([value] if isinstance(value, str | int) else value)
        ]

    def ready(self) -> bool:
        if password := self.config.get("requirepass"):  # without it, a server that loads its data says only -NOAUTH
            return self.ask(f"AUTH {password}\r\nPING").endswith(("+PONG\r\n", "-MASTERDOWN\r\n"))
        return self.ask("PING").startswith(("+PONG", "-NOAUTH", "-NOPERM", "-MASTERDOWN"))

    def flush(self) -> None:
        """Remove everything in it."""
        answer = self.ask("FLUSHALL")
        assert answer.startswith("+OK"), answer

    def ask(self, command: str) -> str:
        """The beginning of what it answers; nothing when it does not run."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as connection:
                connection.sendall(f"{command}\r\n".encode())
                return connection.recv(1024).decode(errors="replace")
        except OSError:
            return ""
