"""Who holds a lease can be told to anybody, and what proves it to nobody."""

import asyncio
import copy
import json
import pickle
import re
from dataclasses import asdict
from typing import Any, cast
from uuid import UUID

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, LeaderRecord, Lock, TaskLock
from grelmicro.errors import SettingsValidationError
from grelmicro.leases import Lease
from grelmicro.leases.identity import describe_process, mint, process_id, process_of, public_name, worker_of
from grelmicro.task import Tasks
from tests.helpers.scripts import script

pytestmark = pytest.mark.usefixtures("nothing_left")

MINTED = "0123456789abcdef" + "f" * 16 + "17"


def app(*, worker: str | None = None) -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://")], worker=worker)


@pytest.mark.parametrize(
    ("name", "holder", "worker", "process"),
    [
        ("lock:cart", f"web-1:task:{MINTED}", "web-1", MINTED[:16]),
        ("lock:cart", f"web-1:thread:{MINTED}", "web-1", MINTED[:16]),
        ("lock:cart", f"a:task:task:{MINTED}", "a:task", MINTED[:16]),
        ("tasklock:report", f"a:b:task:{MINTED}", "a:b", MINTED[:16]),
        ("leader:feed", f"web-1:{MINTED}", "web-1", MINTED[:16]),
        ("leader:feed", f"web:task:{MINTED}", "web:task", MINTED[:16]),
        ("leader:feed", "pod-1_5e1f", "pod-1_5e1f", ""),
        ("leader:feed", MINTED, "", MINTED[:16]),
        ("schedule:daily", f"edit:{MINTED}", "edit", MINTED[:16]),
        ("lock:cart", f"web-1:task:{MINTED[:18]}", "web-1", ""),
        ("lock:cart", "5e1f0a", "", ""),
        ("lock:cart", "", "", ""),
    ],
)
def test_a_holder_tells_its_worker_and_its_process(name: str, holder: str, worker: str, process: str) -> None:
    assert (worker_of(name, holder), process_of(holder)) == (worker, process)
    lease = Lease(name, holder, 1)
    assert (lease.worker, lease.process) == (worker, process)
    assert "f" * 16 not in public_name(name, holder)


def test_what_is_minted_begins_with_the_process_and_has_64_secret_bits() -> None:
    first, second = mint(), mint()
    assert re.fullmatch("[0-9a-f]{32}[0-9]+", first)
    assert first[:16] == process_id()
    assert first[:32] == second[:32]
    assert first[16:32] != first[:16]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/gunicorn", "app:app"], "gunicorn"),
        (["/lib/uvicorn/__main__.py"], "uvicorn"),
        (["-c"], "python"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_a_process_tells_its_program(monkeypatch: pytest.MonkeyPatch, command: list[str], name: str) -> None:
    monkeypatch.setattr("sys.argv", command)
    assert describe_process()["application"] == name


async def test_the_name_of_the_app_begins_the_holders_that_have_none() -> None:
    named, plain = Lock("named", worker="own"), Lock("plain")
    before = plain.worker
    async with app(worker="web-1"):
        async with named as one, plain as other, TaskLock("report") as third:
            assert one.token.startswith("own:task:")
            assert other.token.startswith("web-1:task:")
            assert third.token.startswith("web-1:task:")
            assert (named.worker, plain.worker) == ("own", "web-1")
        assert (await asyncio.to_thread(plain.from_thread.acquire)).token.startswith("web-1:thread:")
    assert re.fullmatch("[0-9a-f]{16}", before)
    async with app(), plain as held:
        assert held.token.startswith(f"{before}:task:")


async def test_the_name_of_the_app_is_that_of_its_elections() -> None:
    leader, own = LeaderElection("feed"), LeaderElection("other", worker="own")
    tasks = Tasks(tasks=[leader, own])
    async with Grelmicro(uses=[Coordination.from_url("memory://"), tasks], worker=UUID(int=7)):
        await leader.wait_for_leader()
        await own.wait_for_leader()
        assert leader.guard().worker == leader.worker == str(UUID(int=7))
        assert own.guard().worker == own.worker == "own"


async def test_the_environment_names_a_process_when_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    micro, lock = app(), Lock("cart")
    for name in ("web-1", "web-2", ""):
        monkeypatch.setenv("GREL_WORKER", name)
        async with micro, lock as held:
            assert (micro.worker, held.token.partition(":")[0]) == (name, name or lock.worker)
    monkeypatch.setenv("GREL_WORKER", "web-3")
    async with app(worker="web-4"), lock as held:
        assert held.token.startswith("web-4:")
    async with Coordination.from_url("memory://") as coordination, coordination.lock("cart") as held:
        assert held.token.startswith("web-3:")


async def test_a_name_that_can_be_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsValidationError, match="^Grelmicro: worker= should have 1 to 128 characters"):
        app(worker="web\n1")
    monkeypatch.setenv("GREL_WORKER", "x" * 129)
    with pytest.raises(SettingsValidationError, match="^GREL_WORKER should have 1 to 128 characters"):
        async with app():
            pass


FORKED = """
import asyncio, os, sys
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock

micro, lock = Grelmicro(uses=[Coordination.from_url("memory://")]), Lock("cart")

async def work():
    async with micro, lock as held:
        print(held.token.rpartition(":")[0], flush=True)

os.environ["GREL_WORKER"] = "parent"
asyncio.run(work())
child = os.fork()
if not child:
    os.environ["GREL_WORKER"] = "child"
    asyncio.run(work())
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_fork_takes_its_own_name() -> None:
    with script(FORKED, strict=False) as program:
        assert [program.hear(), program.hear()] == ["parent:task", "child:task"]


async def test_a_leaders_record_is_plain_data_without_a_secret() -> None:
    leader = LeaderElection("feed", worker="web-1", metadata={"url": "http://x"})
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])])
    async with micro:
        await leader.wait_for_leader()
        for record in (leader.record, leader.guard()):
            assert record is not None
            assert (record.worker, record.metadata) == ("web-1", {"url": "http://x"})
            assert re.fullmatch(rf"web-1:{process_id()}\.[0-9]+", record.holder)
            assert copy.deepcopy(record) == pickle.loads(pickle.dumps(record)) == LeaderRecord(**asdict(record))
            assert json.loads(json.dumps(asdict(record), default=str))["worker"] == "web-1"
        stored = await micro.coordination.election_backend.read("leader:feed")
        assert stored is not None
        assert stored.holder[-17:] not in repr(asdict(leader.guard()))
        assert stored.worker == "web-1"
    assert leader.record is not None
    assert (leader.record.holder, leader.record.worker) == ("", "")


async def test_who_holds_it() -> None:
    leader = LeaderElection("cart", worker="lead")
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])], worker="web-1")
    async with micro:
        ask = micro.coordination.holder_of
        assert await ask("cart") is None
        async with Lock("cart", lease_duration=30) as held, TaskLock("cart", worker="cron"):
            found = await ask("cart")
            assert found is not None
            assert (found.worker, found.process, found.fence) == ("web-1", process_id(), held.fencing_token)
            assert 25 < (found.until - found.since).total_seconds() <= 31
            assert found.pid
            assert found.host
            assert held.token[-17:] not in repr(found)
            task = await ask("cart", kind="tasklock")
            await leader.wait_for_leader()
            role = await ask("cart", kind="leader")
            assert task is not None
            assert role is not None
            assert (task.worker, role.worker) == ("cron", "lead")
        with pytest.raises(SettingsValidationError, match="kind should be one of lock, tasklock, leader"):
            await ask("cart", kind=cast(Any, "schedule"))
        with pytest.raises(SettingsValidationError, match="holder_of"):
            await ask("")
