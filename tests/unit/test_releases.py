"""Who waits in this process is woken when a release is sent, and again unless somebody got the lease by that."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

import pytest

from grelmicro.backends.releases import Releases
from grelmicro.leases import Lease


async def granted() -> Lease:
    return Lease("lock:a", "me", 2, expires_at=60.0)


async def refused() -> Lease:
    return Lease("lock:a", "other", 1, expires_at=60.0)


async def failed() -> Lease:
    raise ConnectionResetError


async def follow(releases: Releases, request: Awaitable[Lease], name: str = "lock:a") -> None:
    """Ask for the lease, as one who waits does when it is woken."""
    with suppress(ConnectionResetError):
        await releases.follow(name, "me", request)


@pytest.fixture
def woken() -> list[str]:
    """The names whose waiters were woken."""
    return []


@pytest.fixture
def releases(woken: list[str]) -> Releases:
    return Releases(woken.append)


async def test_nobody_who_asks_behind_it_and_gets_it_is_woken_again(releases: Releases, woken: list[str]) -> None:
    release = releases.begin("lock:a")
    assert woken == ["lock:a"]
    await follow(releases, granted())
    releases.end("lock:a", release)
    assert woken == ["lock:a"]


async def test_its_end_wakes_when_nobody_asked_behind_it(releases: Releases, woken: list[str]) -> None:
    release = releases.begin("lock:a")
    await follow(releases, granted(), name="lock:b")
    releases.end("lock:a", release)
    assert woken == ["lock:a"] * 2


@pytest.mark.parametrize("request_", [refused, failed])
async def test_its_end_wakes_those_who_asked_too_early(releases: Releases, woken: list[str], request_: object) -> None:
    assert callable(request_)
    release = releases.begin("lock:a")
    await follow(releases, request_())
    assert woken == ["lock:a"]
    releases.end("lock:a", release)
    assert woken == ["lock:a"] * 2


async def test_who_asked_too_early_and_is_told_so_after_its_end_is_woken(releases: Releases, woken: list[str]) -> None:
    answered = asyncio.Event()

    async def late() -> Lease:
        await answered.wait()
        return await refused()

    release = releases.begin("lock:a")
    asking = asyncio.create_task(follow(releases, late()))
    await asyncio.sleep(0)
    releases.end("lock:a", release)
    assert woken == ["lock:a"]
    answered.set()
    await asking
    assert woken == ["lock:a"] * 2


async def test_a_request_after_its_end_follows_nothing(releases: Releases, woken: list[str]) -> None:
    releases.end("lock:a", releases.begin("lock:a"))
    await follow(releases, refused())
    assert woken == ["lock:a"] * 2


async def test_one_that_is_repeated_counts_anew(releases: Releases, woken: list[str]) -> None:
    first = releases.begin("lock:a")
    second = releases.begin("lock:a")
    releases.end("lock:a", first)
    await follow(releases, granted())
    releases.end("lock:a", second)
    assert woken == ["lock:a"] * 3
