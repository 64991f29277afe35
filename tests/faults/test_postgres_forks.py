"""A forked child, however it ends, leaves the connections to PostgreSQL to its parent: encrypted ones and others."""

import asyncio
import shutil
from pathlib import Path

import pytest
from asyncpg import InvalidParameterValueError

from tests.helpers.api_server import certificate
from tests.helpers.forking import CASES, CHILDREN, RUN
from tests.helpers.scripts import script
from tests.servers.fixtures import StartPostgres
from tests.servers.postgres import PostgresServer, execute

PROGRAM = """
import asyncpg
from grelmicro.backends.postgres import PostgresStore
from grelmicro.coordination.adapters import LockAdapter

backend = LockAdapter(PostgresStore(url))

async def connections():
    server = await asyncpg.connect(plain)
    rows = await server.fetch(
        "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    await server.close()
    return {row["pid"] for row in rows}

async def main():
    async with backend:
        lease = await backend.acquire("lock:a", "h", 300.0)
        async with backend.watch("lock:a") as waiter:
            assert waiter.pushes
            await asyncio.gather(*(backend.renew(lease, 300.0) for _ in range(2)), backend.read("lock:a"))
            before = await connections()
            waiting = asyncio.ensure_future(waiter.wait(60))
            await asyncio.sleep(0)
            for _ in range(3):
                await fork()
                for _ in range(5):
                    await asyncio.gather(*(asyncio.wait_for(backend.renew(lease, 300.0), 3) for _ in range(2)))
                    await asyncio.wait_for(backend.read("lock:a"), 3)
            assert waiter.pushes and not waiting.done()
            async with LockAdapter(PostgresStore(url)) as other:
                await backend.acquire("lock:a", "b", 300.0, waiting=True)
                assert await other.release(lease)
            assert await asyncio.wait_for(waiting, 3), "its message came"
            after = await connections()
            assert before <= after, (before, after)
    print("parent", flush=True)
    if way == "ends the loop":
        os._exit(0)  # asyncio.run would wait for a thread
"""


def certify(server: PostgresServer, folder: Path) -> None:
    """Give the server a certificate."""
    certificate(folder)
    owner = server.data.stat()
    for name in ("cert.pem", "key.pem"):
        copy = Path(shutil.copy(folder / name, server.data))
        shutil.chown(copy, owner.st_uid, owner.st_gid)
        copy.chmod(0o600)


async def encrypt(server: PostgresServer) -> str:
    """Have the server take encrypted connections, too; a URL that asks for one."""
    settings = {"ssl_cert_file": "cert.pem", "ssl_key_file": "key.pem", "ssl": "on"}
    commands = [f"ALTER SYSTEM SET {name} = '{value}'" for name, value in settings.items()]
    try:
        await execute(server.url, *commands, "SELECT pg_reload_conf()")
    except InvalidParameterValueError:
        pytest.skip(f"{server.binary} was built without encryption")
    url = f"{server.url}?sslmode=require"
    async with asyncio.timeout(30.0):
        while not await takes(url):
            await asyncio.sleep(0.05)
    return url


async def takes(url: str) -> bool:
    """Whether the server takes this kind of connection."""
    try:
        await execute(url)
    except ConnectionError:
        return False
    return True


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_child_that_ends_leaves_the_connections_to_its_parent(
    start_postgres: StartPostgres, tmp_path: Path, kind: str, way: str
) -> None:
    server = start_postgres()
    certify(server, tmp_path)
    url = server.url if kind == "plain" else asyncio.run(encrypt(server))
    with script(CHILDREN + PROGRAM + RUN, url, server.url, way, strict=False) as process:
        assert process.end() == (0, "parent\n", "")
