"""Starts a server of each kind, says where they live, and waits for the end of its input."""

import sys

from tests.servers import found, redis
from tests.servers.home import Home
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer


def main() -> None:
    """Do that."""
    with Home() as home:
        RedisServer(home, found.redis_binaries()[0], redis.FAST).start()
        PostgresServer(home, found.postgres_binaries()[0], {}).start()
        sys.stdout.write(f"{home.path}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
