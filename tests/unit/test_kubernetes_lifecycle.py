"""Connections to an API server end with whatever opened them, and belong to one process and one event loop."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic

import pytest

from grelmicro.backends.kubernetes import access
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.requests import Requests
from grelmicro.errors import CoordinationBackendError
from tests.helpers.api_server import ApiServer, certificate, kubeconfig, silence, status
from tests.helpers.worlds import eventually

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, os, sys
from contextlib import suppress
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.requests import Requests

LEASE = {"kind": "Lease", "metadata": {"name": "a"}}
cluster = Cluster.at(kubeconfig=sys.argv[1], request_timeout=3)

async def use(requests, number=3):
    await asyncio.gather(*(requests.replace("a", LEASE, "writing") for _ in range(number)))
"""


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiServer]:
    """With TLS, whose connections end in several steps."""
    async with ApiServer(certificate=certificate(tmp_path / "server")) as api:
        yield api


@pytest.fixture
def config(api: ApiServer, tmp_path: Path) -> Path:
    trust = {"certificate-authority": str(tmp_path / "server" / "cert.pem")}
    return kubeconfig(tmp_path / "config", api.url, cluster=trust)


async def run(code: str, config: Path, condition: Callable[[], bool] | None = None) -> str:
    """What a program prints; it must not complain about anything. It can read a line once `condition` holds."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "dev", "-W", "error", "-W", "ignore::DeprecationWarning", "-c", PROGRAM + code, config),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60.0):
            while condition is not None and not condition() and program.returncode is None:
                await asyncio.sleep(0.01)
            out, complaints = await program.communicate(b"\n")
    except TimeoutError:
        program.kill()
        await program.communicate()
        raise
    told = [line for line in complaints.decode().splitlines() if not line.startswith("Executing <")]  # how long it took
    assert told == []
    assert program.returncode == 0
    return out.decode()


@pytest.mark.parametrize("pause", ["", "await asyncio.sleep(0)"])
async def test_a_program_that_closes_nothing_leaves_nothing(config: Path, pause: str) -> None:
    code = f"""
async def main():
    requests = Requests(cluster)
    await requests.open()
    {pause}

asyncio.run(main())
print("done")
"""
    assert await run(code, config) == "done\n"


async def test_a_program_that_ends_amid_requests_leaves_nothing(config: Path, api: ApiServer) -> None:
    api.answers += [status(404)] * 3 + [silence] * 2
    code = """
async def watch(requests):
    async for event in requests.watch("", "1"):
        pass

async def main():
    requests = Requests(cluster)
    await requests.open()
    await use(requests)
    tasks = [asyncio.create_task(watch(requests)), asyncio.create_task(use(requests, 1))]
    await asyncio.to_thread(sys.stdin.readline)  # asyncio leaves a socket whose TLS handshake is cancelled at the end
    tasks.append(asyncio.create_task(use(requests, 5)))
    await asyncio.sleep(0)

asyncio.run(main())
print("done")
"""
    assert await run(code, config, lambda: len(api.seen) == 5) == "done\n"


async def test_what_outlasts_the_end_of_the_event_loop_can_still_ask(config: Path, api: ApiServer) -> None:
    code = """
async def main():
    requests = Requests(cluster)
    await requests.open()
    await use(requests)

    async def give_back():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await use(requests, 1)
            await asyncio.sleep(0.2)
            await use(requests, 2)
            print("given back")

    task = asyncio.create_task(give_back())
    await asyncio.sleep(0)

asyncio.run(main())
print("done")
"""
    assert await run(code, config) == "given back\ndone\n"
    assert len(api.seen) == 6


async def test_an_opening_that_fails_or_is_cancelled_leaves_nothing(config: Path, tmp_path: Path) -> None:
    bad = kubeconfig(tmp_path / "bad", "https://127.0.0.1:1", {"client-certificate": __file__, "client-key": __file__})
    begun = tmp_path / "begun"
    arguments = ["-c", f"echo > {begun}; exec sleep 60"]
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": arguments}
    slow = kubeconfig(tmp_path / "slow", "https://127.0.0.1:1", {"exec": program})
    none = kubeconfig(tmp_path / "none", "https://[127.0.0.1:1")
    code = f"""
async def main():
    for path in ({str(bad)!r}, {str(none)!r}):
        try:
            await Requests(Cluster.at(kubeconfig=path)).open()
        except Exception as error:
            print(type(error).__name__)
    task = asyncio.create_task(Requests(Cluster.at(kubeconfig={str(slow)!r})).open())
    while not os.path.exists({str(begun)!r}):
        await asyncio.sleep(0.01)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
        print("opened")
    task = asyncio.create_task(Requests(cluster).open())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
        print("opened")

asyncio.run(main())
print("done")
"""
    assert await run(code, config) == "BackendUnavailableError\nSettingsValidationError\ndone\n"


async def test_a_fork_leaves_the_connections_to_its_parent(config: Path, api: ApiServer) -> None:
    code = """
async def main():
    requests = Requests(cluster)
    await requests.open()
    await use(requests)
    for _ in range(3):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            return requests, True
        assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
        await use(requests)
    await requests.close()
    return requests, False

async def own():
    requests = Requests(cluster)
    await requests.open()
    await use(requests)
    await requests.close()

loop = asyncio.new_event_loop()
requests, is_child = loop.run_until_complete(main())
if is_child:
    requests.abandon()
    del requests, loop, main
    import gc
    gc.collect()
    asyncio.run(own())
    print("child")
else:
    loop.close()
    print("parent")
"""
    assert await run(code, config) == "child\nchild\nchild\nparent\n"
    # Those of the parent were used on, whatever the children did at their end.
    assert len(api.connections) == 3 + 3 * 3, "three of the parent and of each child"


async def test_a_fork_that_ends_the_loop_leaves_the_connections_to_its_parent(config: Path, api: ApiServer) -> None:
    code = """
async def main():
    requests = Requests(cluster)
    await requests.open()
    await use(requests)
    for _ in range(3):
        child = os.fork()
        if not child:
            sys.exit(0)
        # It closes the loop, and with it, as asyncio does it, what tells the parent's loop of threads.
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            await asyncio.sleep(0.01)
        assert ended == (child, 0)
        await use(requests)
    print("parent", flush=True)
    os._exit(0)

asyncio.run(main())
"""
    assert await run(code, config) == "parent\n"
    assert len(api.connections) == 3


async def test_closing_does_not_wait_for_a_server_that_hangs(
    config: Path, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "FRESH", 1000.0)
    requests = Requests(Cluster.at(kubeconfig=config))
    await requests.open()
    api.answers += [silence] * 4
    tasks = [asyncio.create_task(requests.read("a", "reading")) for _ in range(4)]
    await eventually(lambda: len(api.seen) == 4, "all requests arrived")
    begun = monotonic()
    await requests.close()
    assert monotonic() - begun < 1.0
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, CoordinationBackendError) for answer in answers), answers


async def test_it_can_be_opened_again(config: Path) -> None:
    requests = Requests(Cluster.at(kubeconfig=config))
    for _ in range(3):
        await requests.open()
        assert (await requests.read("a", "reading")).status == 200
        await requests.close()
        await requests.close()
