"""pgbouncer before a PostgreSQL server, in transaction mode."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers.found import Binary
from tests.servers.home import Home, unprivileged
from tests.servers.postgres import PostgresServer
from tests.servers.server import Server


class Pgbouncer(Server):
    """One pgbouncer, with every database and the one user of its PostgreSQL server."""

    def __init__(self, home: Home, binary: Binary, postgres: PostgresServer, settings: Mapping[str, str | int]) -> None:
        super().__init__(home, binary, unprivileged())
        self.postgres = postgres
        self.settings = dict(settings)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def command(self) -> Sequence[str | Path]:
        users = self.folder / "users"
        users.write_text('"postgres" ""\n')
        settings: dict[str, str | int] = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": str(users),
            "pool_mode": "transaction",
            **self.settings,
        }
        path = self.folder / "pgbouncer.ini"
        lines = [f"{name} = {value}" for name, value in settings.items()]
        database = f"* = host=127.0.0.1 port={self.postgres.port}"
        path.write_text("\n".join(["[databases]", database, "[pgbouncer]", *lines, ""]))
        return [self.binary.path, path]

    def ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
