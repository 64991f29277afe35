"""Whatever is done to leases in whatever order, a small model says what comes of it, on each kind of store."""

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grelmicro.backends.memory import MemoryStore
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.backends.sqlite import table as sqlite_table
from grelmicro.leases import Lease, LeaseStore
from grelmicro.testing import MovableClock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a failure takes its time to be made small

T = TypeVar("T")

names = st.sampled_from(["lock:a", "leader:a"])
holders = st.sampled_from(["x", "y"])
ttls = st.sampled_from([0.5, 1.0, 3.0, 30.0])
payloads = st.sampled_from([None, "1", "2"])
which = st.integers(0, 1)


@dataclass
class Model:
    """What is to be known of one name."""

    exists: bool = False
    holder: str = ""
    """The last one, though its lease may have expired."""
    fence: int = 0
    highest: int = 0
    """The highest fence ever given, whatever became of the record."""
    transitions: int = 0
    expires_at: float = -1.0
    data: str | None = None
    continues: bool = False
    """Whether the next fence is the one after this one; else it is only higher."""


class LeaseMachine(RuleBasedStateMachine):
    """Several holders on one memory store."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = MovableClock()
        self.runner = asyncio.Runner()
        self.models: dict[str, Model] = {}
        self.leases: list[Lease] = []
        self.stores: list[LeaseStore] = []

    @initialize()
    def begin(self) -> None:
        self.stores = self.build()
        self.open()

    def build(self) -> list[LeaseStore]:
        """Views of the same leases."""
        return [MemoryStore(clock=self.clock)]

    def teardown(self) -> None:
        self.close()
        self.runner.close()

    def open(self) -> None:
        for store in self.stores:
            self.do(store.__aenter__())

    def close(self) -> None:
        for store in self.stores:
            self.do(store.__aexit__(None, None, None))
        for model in self.models.values():
            if not self.live(model):
                model.holder = ""  # closing vacates what expired

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Let it happen, which takes a moment as everything does."""
        answer = self.runner.run(work)
        self.runner.run(self.clock.advance(0.001))
        return answer

    def store(self, number: int) -> LeaseStore:
        return self.stores[number % len(self.stores)]

    def live(self, model: Model) -> bool:
        return model.exists and model.holder != "" and model.expires_at >= self.clock.now()

    def owned(self, lease: Lease, model: Model) -> bool:
        return self.live(model) and model.holder == lease.holder and lease.fence in (0, model.fence)

    @rule(
        number=which,
        name=names,
        holder=holders,
        ttl=ttls,
        data=payloads,
        waiting=st.booleans(),
    )
    def acquire(self, number: int, name: str, holder: str, ttl: float, data: str | None, waiting: bool) -> None:
        model, now = self.models.setdefault(name, Model()), self.clock.now()
        held, mine = self.live(model), model.holder == holder
        given = None if data is None else {"k": data}
        lease = self.do(self.store(number).acquire(name, holder, ttl, data=given, waiting=waiting))
        if held and not mine:
            assert not lease.granted_to(holder)
            assert lease.granted_to(model.holder)
            return
        assert lease.granted_to(holder)
        self.leases.append(lease)
        if held:
            assert lease.fence == model.fence
        else:
            assert lease.fence > model.highest
            assert lease.fence == model.fence + 1 or not model.continues
            model.transitions = 0 if not model.exists else model.transitions + (not mine)
        model.exists, model.holder, model.continues = True, holder, True
        model.fence = model.highest = lease.fence
        model.expires_at = now + ttl
        model.data = data if data is not None else model.data

    @precondition(lambda self: self.leases)
    @rule(number=which, pick=st.integers(0, 1_000), ttl=ttls)
    def renew(self, number: int, pick: int, ttl: float) -> None:
        lease = self.leases[pick % len(self.leases)]
        model, now = self.models[lease.name], self.clock.now()
        owned = self.owned(lease, model)
        renewal = self.do(self.store(number).renew(lease, ttl))
        assert (renewal is not None) is owned
        if owned:
            model.expires_at = now + ttl

    @precondition(lambda self: self.leases)
    @rule(number=which, pick=st.integers(0, 1_000), blind=st.booleans())
    def release(self, number: int, pick: int, blind: bool) -> None:
        lease = self.leases[pick % len(self.leases)]
        model = self.models[lease.name]
        asked = Lease(lease.name, lease.holder, 0 if blind else lease.fence)
        owned = self.owned(asked, model)
        assert self.do(self.store(number).release(asked)) is owned
        if owned:
            model.holder = ""

    @rule(number=which, name=names, holder=holders, fence=st.sampled_from([0, 1, 2]))
    def release_as_a_stranger(self, number: int, name: str, holder: str, fence: int) -> None:
        asked = Lease(name, f"stranger-{holder}", fence)
        assert self.do(self.store(number).release(asked)) is False

    @rule(seconds=st.sampled_from([0.1, 0.7, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.runner.run(self.clock.advance(seconds))

    @rule()
    def reopen(self) -> None:
        self.close()
        self.open()

    @invariant()
    def every_view_is_what_the_model_says(self) -> None:
        for name, model in self.models.items():
            for store in self.stores:
                record = self.runner.run(store.read(name))
                if not model.exists:
                    assert record is None
                    continue
                assert record is not None
                assert record.live is self.live(model)
                assert (record.fence, record.transitions) == (model.fence, model.transitions)
                assert dict(record.data) == ({} if model.data is None else {"k": model.data})
                if record.live:
                    assert record.holder == model.holder
                    assert record.expires_at == pytest.approx(model.expires_at, abs=1e-5)


class SQLiteMachine(LeaseMachine):
    """The same on two instances of a SQLite file, which suffers more."""

    def build(self) -> list[LeaseStore]:
        self.boots = 0
        self.folder = Path(tempfile.mkdtemp(prefix="grelmicro-"))
        self.path, self.saved = self.folder / "locks.db", self.folder / "saved.db"
        sqlite_table.boot_id = lambda: f"boot-{self.boots}"
        return [SQLiteStore(self.path, clock=self.clock) for _ in range(2)]

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)

    @rule(name=names)
    def lose_a_record(self, name: str) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("DELETE FROM grelmicro_leases WHERE name = ?", (name,))
        self.forget(name)

    @rule()
    def lose_the_file(self) -> None:
        for file in self.folder.glob("locks.db*"):
            file.unlink()
        assert self.do(self.stores[0].read("lock:a")) is None
        for name in self.models:
            self.forget(name)

    @rule()
    def restart_the_host(self, closed: bool = False) -> None:
        if not closed:
            self.close()
        self.boots += 1
        self.clock._now -= 5.0  # the clock of leases begins anew, perhaps below what was stored
        self.clock.shift_wall(10.0)
        self.open()
        for model in self.models.values():
            model.expires_at = -1.0
            model.continues = False

    @rule(name=names, holder=holders)
    def lose_power(self, name: str, holder: str) -> None:
        with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(self.saved)) as target:
            source.backup(target)
        kept = {known: replace(model) for known, model in self.models.items()}
        self.acquire(0, name, holder, 30.0, None, False)
        self.close()
        shutil.copy(self.saved, self.path)  # so that commit is undone, though its lease was given
        for known, model in self.models.items():
            self.models[known] = replace(kept.get(known, Model()), highest=model.highest)
        self.restart_the_host(closed=True)

    @rule()
    def let_a_week_pass(self) -> None:
        self.runner.run(self.clock.advance(8 * 24 * 3600.0))
        self.reopen()
        for name, model in self.models.items():
            if name.startswith("lock:") and model.data is None:
                self.forget(name)

    def forget(self, name: str) -> None:
        model = self.models.get(name)
        if model is not None:
            self.models[name] = Model(highest=model.highest)


@pytest.fixture(autouse=True)
def same_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the boot id back that an example changes."""
    monkeypatch.setattr(sqlite_table, "boot_id", sqlite_table.boot_id)


often = settings(
    max_examples=50, stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
TestLeasesInMemory = LeaseMachine.TestCase
TestLeasesInMemory.settings = often
TestLeasesInSQLite = SQLiteMachine.TestCase
TestLeasesInSQLite.settings = settings(often, max_examples=20)
