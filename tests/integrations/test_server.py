"""A real server: signals, open connections, clients that go away."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import httpx2
import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.task import Tasks
from tests.integrations.asgi import is_free
from tests.repo.source import ROOT

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def served(store: str) -> AsyncIterator[tuple[httpx2.AsyncClient, "subprocess.Popen[bytes]"]]:
    """A server in a process of its own, and a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "tests.integrations.served_app:app", "--port", str(port)]
    command += ["--log-level", "warning", "--timeout-graceful-shutdown", "20"]
    server = _start(command, store)
    try:
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=False
        ) as client:
            until = monotonic() + 30
            while True:
                try:
                    await client.get("/leads")
                    break
                except httpx2.TransportError:
                    assert monotonic() < until, "the server does not answer"
                    await asyncio.sleep(0.05)
            yield client, server
    finally:
        server.kill()
        server.wait()


def _start(command: list[str], store: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "STORE": store})


async def test_leadership_is_handed_over_at_the_signal_while_the_server_still_serves(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/locks.db"
    successor = LeaderElection("duty")
    other = Grelmicro(uses=[Coordination.from_url(store), Tasks(tasks=[successor])])
    async with served(store) as (client, server):
        until = monotonic() + 20
        while not (await client.get("/leads")).json():
            assert monotonic() < until
            await asyncio.sleep(0.05)
        async with other, client.stream("GET", "/stream") as response:
            chunks = response.aiter_text()
            await anext(chunks)
            assert not successor.is_leader()
            server.send_signal(signal.SIGTERM)
            began = monotonic()
            await asyncio.wait_for(successor.wait_for_leader(), 10)  # the lease lasts 15 s
            took = monotonic() - began
            await anext(chunks)
            assert server.poll() is None, "the server has not stopped yet"
        assert took < 5
        assert server.wait(20) in (0, -signal.SIGTERM)


async def test_request_whose_client_left_while_it_waited_frees_the_lock(tmp_path: Path) -> None:
    """The server does not cancel it, so it takes its turn, and gives the lock back."""
    store = f"sqlite:///{tmp_path}/locks.db"
    micro = Grelmicro(uses=[Coordination.from_url(store)])
    async with served(store) as (client, _), micro:
        async with micro.coordination.lock("cart:1"):
            with pytest.raises(httpx2.ReadTimeout):
                await client.get("/carts/1", timeout=0.3)
        assert await is_free(micro, "cart:1", within=10)
        assert (await client.get("/carts/1")).json() == "cart:1"
