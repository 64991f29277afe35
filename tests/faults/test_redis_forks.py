"""A forked child, however it ends, leaves the connections to Redis to its parent: encrypted ones and others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.api_server import certificate
from tests.helpers.forking import CASES, CHILDREN, RUN
from tests.helpers.scripts import script
from tests.servers.fixtures import StartRedis

PROGRAM = """
from grelmicro.coordination.redis import RedisLockAdapter
from redis import Redis

backend = RedisLockAdapter(url)
server = Redis.from_url(plain)

def connections():
    return sorted(client["id"] for client in server.client_list() if client["name"] != "watcher")

async def main():
    server.client_setname("watcher")
    async with backend:
        lease = await backend.acquire("lock:a", "h", 300.0)
        async with backend.watch("lock:a") as waiter:
            assert waiter.pushes
            await asyncio.gather(*(backend.renew(lease, 300.0) for _ in range(3)))
            before = connections()
            waiting = asyncio.ensure_future(waiter.wait(60))
            await asyncio.sleep(0)
            for _ in range(3):
                await fork()
                for _ in range(5):
                    await asyncio.gather(*(asyncio.wait_for(backend.renew(lease, 300.0), 3) for _ in range(3)))
            assert waiter.pushes and not waiting.done()
            server.publish(backend.store._get_open().table.prefix + b"lock:a", b"")
            assert await asyncio.wait_for(waiting, 3), "its message came"
            assert connections() == before, (before, connections())
    print("parent", flush=True)
    if way == "ends the loop":
        os._exit(0)  # asyncio.run would wait for a thread
"""


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_child_that_ends_leaves_the_connections_to_its_parent(
    start_redis: StartRedis, tmp_path: Path, unused_tcp_port_factory: Callable[[], int], kind: str, way: str
) -> None:
    folder, port = certificate(tmp_path), unused_tcp_port_factory()
    files = {"tls_cert_file": str(folder / "cert.pem"), "tls_key_file": str(folder / "key.pem")}
    server = start_redis(tls_port=port, tls_auth_clients="no", **files)
    url = server.url if kind == "plain" else f"rediss://127.0.0.1:{port}?ssl_ca_certs={folder / 'cert.pem'}"
    with script(CHILDREN + PROGRAM + RUN, url, server.url, way, strict=False) as process:
        assert process.end() == (0, "parent\n", "")
