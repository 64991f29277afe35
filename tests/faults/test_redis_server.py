"""A Redis server in trouble: full, without a disk, a replica, busy, restarted, its scripts flushed, with few rights."""

import asyncio
import logging
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from grelmicro.backends.redis import RedisStore
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError
from grelmicro.leases import Lease
from tests.servers import found
from tests.servers.fixtures import StartRedis, each
from tests.servers.found import Binary
from tests.servers.proxy import Proxy
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.usefixtures("nothing_left")

HOLDER = "holder:f00dfeed"
"""No error may show it."""


@pytest.fixture(params=each(found.redis_binaries(), ""), ids=lambda binary: str(binary or "redis"))
def binary(request: pytest.FixtureRequest) -> Binary | None:
    """Each version of Redis and Valkey."""
    version: Binary | None = request.param
    return version


@asynccontextmanager
async def operator(server: RedisServer) -> AsyncIterator["Redis"]:
    """A client that may do everything."""
    async with Redis.from_url(server.url, decode_responses=True) as client:
        yield client


async def refused(request: Any, told: str) -> None:
    """It is refused as something that changed nothing, in words that show no holder."""
    with pytest.raises(BackendUnavailableError, match=told) as refusal:
        await request
    assert HOLDER not in "".join(traceback.format_exception(refusal.value))


async def command(client: "Redis", *parts: str) -> object:
    """What the server answers."""
    execute: Callable[..., Awaitable[object]] = client.execute_command
    return await execute(*parts)


async def facts(store: RedisStore, name: str) -> tuple[object, ...]:
    record = await store.read(name)
    return () if record is None else (record.holder, record.fence, record.live)


# Memory


async def test_a_full_server_grants_nothing_and_still_renews_and_releases(
    start_redis: StartRedis, binary: Binary | None
) -> None:
    server = start_redis(binary, appendonly="no")
    async with RedisStore(server.url) as store, RedisStore(server.url) as other, operator(server) as client:
        held = await store.acquire("lock:held", HOLDER, 300.0)
        second = await store.acquire("lock:second", HOLDER, 300.0, data={"k": "1"})
        await client.config_set("maxmemory", 1)
        await refused(store.acquire("lock:free", HOLDER, 300.0), "'lock:free'.*memory is full: raise maxmemory")
        assert await store.read("lock:free") is None
        assert await store.renew(held, 300.0) is not None
        assert await store.renew(second, 300.0, data={"k": "2" * 500}) is not None
        assert len(await store.renew_many([(held, 300.0), (second, 300.0)])) == 2
        passed = await store.pass_on(held, "a longer name than the one before", 300.0)
        assert passed is not None
        held = await passed_back(store, passed)
        # Whoever waits is heard as ever.
        async with other.watch("lock:held") as waiter:
            assert (await other.acquire("lock:held", "b", 300.0, waiting=True)).holder == HOLDER
            assert await store.release(held) is True
            assert await asyncio.wait_for(waiter.wait(60.0), 10.0)
        assert await store.release(second, data={"k": "3" * 500}) is True
        await client.config_set("maxmemory", 0)
        again = await store.acquire("lock:second", HOLDER, 300.0)
        assert (again.fence, dict(again.data)) == (second.fence + 1, {"k": "3" * 500})


async def passed_back(store: RedisStore, lease: Lease) -> Lease:
    """Pass a lease on to the first holder."""
    back = await store.pass_on(lease, HOLDER, 300.0)
    assert back is not None
    return back


async def test_an_evicted_lease_is_reported_lost(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture, binary: Binary | None
) -> None:
    server = start_redis(binary, appendonly="no", maxmemory="4mb", maxmemory_policy="allkeys-random")
    async with RedisStore(server.url) as store, operator(server) as client:
        assert "maxmemory-policy allkeys-random" in caplog.text
        held = [await store.acquire(f"lock:{number}", HOLDER, 300.0) for number in range(50)]
        for number in range(3000):
            with suppress(RedisError):
                await client.set(f"flood:{number}", "x" * 3000)
        await client.config_set("maxmemory", 0)  # no lease is evicted between the next two lines
        kept = {lease.name for lease in await store.renew_many([(lease, 300.0) for lease in held])}
        there = {str(key).partition(":lease:")[2] for key in await client.keys("grelmicro:lease:*")}
        assert kept == there
        lost = [lease for lease in held if lease.name not in kept]
        assert lost, "something was evicted"
        await client.flushall()
        assert await store.renew_many([(lease, 300.0) for lease in held]) == []
        for lease in held:
            assert await store.release(lease) is False
            assert (await store.acquire(lease.name, "b", 300.0)).fence > lease.fence


# Writes that are refused


async def test_a_server_that_cannot_save_is_told_and_no_lease_is_lost_by_it(
    start_redis: StartRedis, binary: Binary | None
) -> None:
    server = start_redis(binary, appendonly="no", save="3600 1", dbfilename="no.rdb")
    async with RedisStore(server.url) as store, operator(server) as client:
        lease = await store.acquire("lock:held", HOLDER, 300.0)
        (server.folder / "no.rdb" / "in the way").mkdir(parents=True)
        with suppress(RedisError):
            await client.bgsave()
        failed = False
        while not failed:
            failed = (await client.info("persistence"))["rdb_last_bgsave_status"] == "err"
            await asyncio.sleep(0.01)
        before = await facts(store, "lock:held")
        told = "takes no writes, since it cannot save to its disk"
        await refused(store.acquire("lock:free", HOLDER, 300.0), told)
        await refused(store.renew(lease, 300.0), told)
        await refused(store.renew_many([(lease, 300.0)]), told)
        await refused(store.release(lease), told)
        assert (await store.acquire("lock:held", "b", 300.0)).holder == HOLDER, "to ask for it changes nothing"
        assert await facts(store, "lock:held") == before
        assert await store.read("lock:free") is None
        await client.config_set("stop-writes-on-bgsave-error", "no")
        assert await store.renew(lease, 300.0) is not None
        assert await store.release(lease) is True


async def test_too_few_replicas(start_redis: StartRedis, binary: Binary | None) -> None:
    server = start_redis(binary)
    if server.binary.version.startswith("6"):
        pytest.skip("it lets scripts write all the same")
    async with RedisStore(server.url) as store, operator(server) as client:
        lease = await store.acquire("lock:held", HOLDER, 300.0)
        await client.config_set("min-replicas-to-write", 1)
        await refused(store.acquire("lock:free", HOLDER, 300.0), "too few replicas follow it")
        await refused(store.release(lease), "too few replicas follow it")
        await client.config_set("min-replicas-to-write", 0)
        assert await store.release(lease) is True


async def test_a_switch_to_a_replica_and_back(start_redis: StartRedis, binary: Binary | None) -> None:
    server, primary = start_redis(binary), start_redis(binary, repl_diskless_sync_delay=0)
    async with RedisStore(server.url) as store, operator(server) as client:
        leases = await asyncio.gather(*(store.acquire(f"lock:{number}", HOLDER, 300.0) for number in range(5)))
        await client.config_set("replica-serve-stale-data", "yes")
        await client.replicaof("127.0.0.1", "1")  # nobody is there, so it keeps what it has
        for lease in leases:
            for request in (
                store.acquire(f"{lease.name}:free", HOLDER, 300.0),
                store.acquire(lease.name, "b", 300.0, waiting=True),
                store.renew(lease, 300.0),
                store.renew_many([(lease, 300.0)]),
                store.release(lease),
            ):
                await refused(request, "it is a replica, which takes no writes")
        await client.config_set("replica-serve-stale-data", "no")
        await refused(store.renew(leases[0], 300.0), "it is a replica without its primary")
        await command(client, "REPLICAOF", "NO", "ONE")
        assert len(await store.renew_many([(lease, 300.0) for lease in leases])) == 5
        for lease in leases:
            assert await store.release(lease) is True
            assert (await store.acquire(lease.name, "b", 300.0)).fence > lease.fence
        # And as a replica that follows, whose records are those of another server.
        await client.replicaof("127.0.0.1", primary.port)
        while (await client.info("replication"))["master_link_status"] != "up":
            await asyncio.sleep(0.02)
        await refused(store.acquire("lock:0", HOLDER, 300.0), "it is a replica, which takes no writes")
        await command(client, "REPLICAOF", "NO", "ONE")
        taken = await store.acquire("lock:0", HOLDER, 300.0)
        assert taken.granted_to(HOLDER)
        assert taken.fence > leases[0].fence + 1


async def test_a_replica_is_left_for_a_new_connection_which_may_lead_to_the_primary(start_redis: StartRedis) -> None:
    server = start_redis()
    async with Proxy(server.url) as proxy, RedisStore(proxy.url) as store, operator(server) as client:
        await asyncio.gather(*(store.acquire(f"lock:{number}", HOLDER, 300.0) for number in range(5)))
        before = proxy.connections
        await client.replicaof("127.0.0.1", "1")
        await refused(store.acquire("lock:free", HOLDER, 300.0), "it is a replica, which takes no writes")
        await command(client, "REPLICAOF", "NO", "ONE")
        assert (await store.acquire("lock:free", HOLDER, 300.0)).granted_to(HOLDER)
        assert proxy.connections == before + 1


async def test_a_promoted_replica_that_lagged_behind_repeats_no_fence(
    start_redis: StartRedis, binary: Binary | None
) -> None:
    primary = start_redis(binary, repl_diskless_sync_delay=0)
    replica = start_redis(binary, replicaof=f"127.0.0.1 {primary.port}")
    async with operator(primary) as first, operator(replica) as second:
        async with RedisStore(primary.url) as store:
            early = await store.acquire("lock:a", HOLDER, 300.0)
            await store.release(early)
            while int(await second.hget("grelmicro:lease:lock:a", "fence") or 0) != early.fence:
                await asyncio.sleep(0.02)
            replica.pause()
            lost = []
            for _ in range(3):
                lease = await store.acquire("lock:a", HOLDER, 300.0)
                await store.release(lease)
                lost.append(lease.fence)
        primary.kill()
        replica.resume()
        await command(second, "REPLICAOF", "NO", "ONE")
        async with RedisStore(replica.url) as store:
            assert (await store.acquire("lock:a", HOLDER, 300.0)).fence > max(lost)
        await first.aclose()


async def test_a_server_that_was_demoted_and_promoted_again_repeats_no_fence(start_redis: StartRedis) -> None:
    """It is the same process, on whose records another server's were put meanwhile."""
    server, other = (start_redis(repl_diskless_sync_delay=0) for _ in range(2))
    async with RedisStore(server.url) as store, operator(server) as client, operator(other) as second:
        early = await store.acquire("lock:a", HOLDER, 300.0)
        await store.release(early)
        await second.replicaof("127.0.0.1", server.port)
        while int(await second.hget("grelmicro:lease:lock:a", "fence") or 0) != early.fence:
            await asyncio.sleep(0.02)
        await command(second, "REPLICAOF", "NO", "ONE")
        late = await store.acquire("lock:a", HOLDER, 300.0)  # which only this server knows
        await store.release(late)
        await client.replicaof("127.0.0.1", other.port)
        while int(await client.hget("grelmicro:lease:lock:a", "fence") or 0) != early.fence:
            await asyncio.sleep(0.02)
        await command(client, "REPLICAOF", "NO", "ONE")
        assert (await store.acquire("lock:a", HOLDER, 300.0)).fence > late.fence


# Scripts


async def test_a_busy_server_is_told_and_answers_again(start_redis: StartRedis, binary: Binary | None) -> None:
    server = start_redis(binary, lua_time_limit=10)
    async with RedisStore(server.url) as store, operator(server) as client, operator(server) as helper:
        await store.acquire("lock:a", HOLDER, 300.0)
        endless = asyncio.create_task(command(client, "EVAL", "while true do end", "0"))
        await asyncio.sleep(0.2)
        await refused(store.acquire("lock:b", HOLDER, 300.0), "busy with a script that does not end")
        await helper.script_kill()
        with pytest.raises(RedisError):
            await endless
        assert (await store.acquire("lock:b", HOLDER, 300.0)).granted_to(HOLDER)


async def test_scripts_that_are_flushed_all_the_time_are_done_once(
    start_redis: StartRedis, binary: Binary | None
) -> None:
    server = start_redis(binary, appendonly="no")
    async with RedisStore(server.url) as store, operator(server) as client:
        flushed, enough = 0, False

        async def flush() -> None:
            nonlocal flushed
            while not enough:
                await client.script_flush()
                flushed += 1
                await asyncio.sleep(0.002)

        flushing = asyncio.create_task(flush())
        chance = random.Random(7)

        async def use(name: str) -> None:
            fences = []
            for turn in range(40):
                lease = await store.acquire(name, f"{HOLDER}:{turn}", 300.0)
                assert lease.granted_to(f"{HOLDER}:{turn}")
                fences.append(lease.fence)
                if chance.random() < 0.5:
                    assert await store.renew(lease, 300.0) is not None
                    assert len(await store.renew_many([(lease, 300.0)] * 3)) == 3
                assert (await store.acquire(name, "b", 300.0, waiting=True)).holder == lease.holder
                assert await store.release(lease) is True
            assert fences == list(range(fences[0], fences[0] + 40)), "each once"

        await asyncio.gather(*(use(f"lock:{number}") for number in range(8)))
        assert flushed > 20
        enough = True
        await flushing


# Restarts


async def test_a_restart_that_keeps_everything_keeps_leases(start_redis: StartRedis, binary: Binary | None) -> None:
    server = start_redis(binary)
    async with RedisStore(server.url) as store:
        lease = await store.acquire("lock:a", HOLDER, 300.0, data={"k": "v"})
        expired = await store.acquire("lock:b", HOLDER, 0.05)
        for end in (server.stop, server.kill):
            await asyncio.to_thread(end)
            with pytest.raises(CoordinationBackendError):  # it may not be known yet that the connection has ended
                await store.renew(lease, 300.0)
            await refused(store.renew(lease, 300.0), "cannot be used")
            await asyncio.to_thread(server.start)
            renewed = await store.renew(lease, 300.0)
            assert renewed is not None
            assert (renewed.fence, dict(renewed.data)) == (lease.fence, {"k": "v"})
            assert not (await store.acquire("lock:a", "b", 300.0)).granted_to("b")
        assert (await store.acquire("lock:b", "b", 300.0)).fence > expired.fence


async def test_a_restart_that_keeps_nothing_loses_every_lease(start_redis: StartRedis, binary: Binary | None) -> None:
    server = start_redis(binary, appendonly="no")
    async with RedisStore(server.url) as store:
        leases = [await store.acquire(f"lock:{number}", HOLDER, 300.0) for number in range(3)]
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert await store.renew(leases[0], 300.0) is None
        assert await store.renew_many([(lease, 300.0) for lease in leases]) == []
        assert await store.release(leases[0]) is False
        for lease in leases:
            assert (await store.acquire(lease.name, "b", 300.0)).fence > lease.fence


async def test_a_restart_from_an_old_snapshot_repeats_no_fence(start_redis: StartRedis, binary: Binary | None) -> None:
    server = start_redis(binary, appendonly="no", save="")
    async with RedisStore(server.url) as store, operator(server) as client:
        fences = []
        for turn in range(6):
            lease = await store.acquire("lock:a", HOLDER, 300.0)
            fences.append(lease.fence)
            await store.release(lease)
            if turn == 2:
                await client.save()
        held = await store.acquire("lock:a", HOLDER, 300.0)
        await client.aclose()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        record = await store.read("lock:a")
        assert record is not None
        assert record.fence == fences[2], "it is the old one"
        assert await store.renew(held, 300.0) is None
        again = await store.acquire("lock:a", HOLDER, 300.0)
        assert again.fence > held.fence
        await store.release(again)
        assert (await store.acquire("lock:a", HOLDER, 300.0)).fence == again.fence + 1


async def test_a_server_that_still_loads_changes_nothing(start_redis: StartRedis) -> None:
    server = start_redis(enable_debug_command="yes", loading_process_events_interval_bytes=1024)
    async with RedisStore(server.url) as store, operator(server) as client:
        lease = await store.acquire("lock:a", HOLDER, 300.0)
        await client.mset({f"filler:{number}": "x" * 200 for number in range(3000)})
        await client.config_set("key-load-delay", 1000)
        loading = asyncio.create_task(command(client, "DEBUG", "RELOAD"))
        await asyncio.sleep(0.5)
        for _ in range(3):
            await refused(store.acquire("lock:b", HOLDER, 300.0), "still loading its data")
            await refused(store.renew(lease, 300.0), "still loading its data")
        await loading
        assert await store.renew(lease, 300.0) is not None
        assert await store.read("lock:b") is None


# Rights


async def test_a_user_without_a_right_to_channels_polls(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture, binary: Binary | None
) -> None:
    caplog.set_level(logging.WARNING)
    server = start_redis(binary, user=["default on nopass ~* resetchannels +@all"])
    async with RedisStore(server.url) as store, RedisStore(server.url) as other:
        lease = await store.acquire("lock:a", HOLDER, 300.0)
        async with other.watch("lock:a") as waiter:
            assert waiter.pushes is False
            assert (await other.acquire("lock:a", "b", 300.0, waiting=True)).holder == HOLDER
            assert await store.renew(lease, 200.0) is not None, "a message that cannot be sent fails nothing"
            assert await store.release(lease) is True
        assert (await other.acquire("lock:a", "b", 300.0)).granted_to("b")
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 2, warnings  # one a store
        assert all("they poll meanwhile" in warning for warning in warnings)


async def test_one_channel_that_is_refused_does_not_cost_the_others(start_redis: StartRedis) -> None:
    allowed = "&grelmicro:lease:self:* &grelmicro:lease:lock:ok"
    server = start_redis(user=[f"default on nopass ~* resetchannels {allowed} +@all"])
    async with RedisStore(server.url) as store, RedisStore(server.url) as other:
        async with store.watch("lock:no") as waiter:
            assert waiter.pushes is False
        lease = await other.acquire("lock:ok", HOLDER, 300.0)
        async with store.watch("lock:ok") as waiter:
            assert waiter.pushes is True
            await store.acquire("lock:ok", "b", 300.0, waiting=True)
            await other.release(lease)
            assert await asyncio.wait_for(waiter.wait(60.0), 10.0)


@pytest.mark.parametrize("missing", ["evalsha", "hset", "persist", "hmget"])
async def test_a_right_that_is_missing_is_told(start_redis: StartRedis, binary: Binary | None, missing: str) -> None:
    server = start_redis(binary, user=[f"few on nopass ~* &* +@all -{missing}"])
    few = server.url.replace("redis://", "redis://few:any@")
    async with RedisStore(few) as store, RedisStore(server.url) as allowed:
        if missing == "persist":  # it is only needed to renew
            lease = await store.acquire("lock:a", HOLDER, 300.0)
            await refused(store.renew(lease, 300.0), "(?i)permission|can't run")
            assert await store.release(lease) is True
            return
        await refused(store.acquire("lock:a", HOLDER, 300.0), "(?i)permission|can't run")
        assert await allowed.read("lock:a") is None, "nothing was changed"


async def test_a_command_that_the_server_does_not_know_shows_no_holder(start_redis: StartRedis) -> None:
    server = start_redis(rename_command="EVALSHA GONE")
    async with RedisStore(server.url) as store:
        await refused(store.acquire("lock:a", HOLDER, 300.0), "unknown command")
