"""A lock outlives the commit that it guards."""

import threading
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.test import TestCase

from grelmicro.coordination import LockLostError, LockTimeoutError
from grelmicro.errors import OutOfContextError
from grelmicro_django import lock
from grelmicro_django.transactions import (
    atomic_aliases,
    atomic_requests,
    open_transactions,
    refuse_open_transactions,
    take_over_atomic_requests,
)
from tests.django.databases import databases

ALIASES = ("shop", "stock")


@pytest.fixture(autouse=True)
def two_databases(tmp_path: Path) -> Iterator[None]:
    sqlite = {"ENGINE": "django.db.backends.sqlite3"}
    with databases(**{alias: {**sqlite, "NAME": str(tmp_path / f"{alias}.db")} for alias in ALIASES}):
        yield


def is_free(name: str) -> bool:
    """Whether another thread can acquire a lock at once."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with lock(name, timeout=0):
                answers.append(True)
        except LockTimeoutError:
            answers.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    return answers[0]


def lose(held: Any) -> None:
    """Let a lease be lost."""
    held._handle.lose("a test took it away")


def test_one_inside_a_transaction_is_refused_with_the_remedy() -> None:
    with transaction.atomic("shop"):
        with pytest.raises(OutOfContextError) as caught, lock("order"):
            pass
        assert str(caught.value) == (
            "lock 'order' was asked for in an open transaction (database 'shop'), which would be committed after its "
            "release: acquire it before, as in `with lock(...), transaction.atomic():`, or keep it until the "
            "transaction has ended with lock(..., inside_transaction=True)"
        )
        assert is_free("order")
    with lock("order"), transaction.atomic("shop"):
        assert not is_free("order")


def test_every_connection_of_this_thread_is_looked_at_and_none_is_opened() -> None:
    initialized = connections.all(initialized_only=True)
    assert open_transactions() == []
    assert connections.all(initialized_only=True) == initialized
    with transaction.atomic("shop"), transaction.atomic("stock"):
        assert open_transactions() == [connections["shop"], connections["stock"]]
        with pytest.raises(OutOfContextError, match=r"\(database 'shop', 'stock'\)"):
            refuse_open_transactions("lock 'order'", "do not")
        elsewhere: list[list[BaseDatabaseWrapper]] = []
        thread = threading.Thread(target=lambda: elsewhere.append(open_transactions()))
        thread.start()
        thread.join()
        assert elsewhere == [[]]
    assert open_transactions() == []
    connections["shop"].close()
    assert open_transactions() == []


def test_autocommit_that_is_off_is_a_transaction() -> None:
    transaction.set_autocommit(False, using="shop")
    with pytest.raises(OutOfContextError, match="in a thread with autocommit off"), lock("order"):
        pass
    transaction.set_autocommit(True, using="shop")
    with lock("order"):
        pass


class InTestCase(TestCase):
    """What Django opens around each test of it is no transaction of the code."""

    __test__ = False  # its databases are made by a fixture

    def test_refused(self) -> None:
        with lock("order"):
            assert not is_free("order")
        with transaction.atomic("shop"), pytest.raises(OutOfContextError), lock("order"):
            pass

    def test_kept_to_the_end_of_the_outermost_block_of_the_code(self) -> None:
        for savepoint in (True, False):
            with transaction.atomic("shop", savepoint=savepoint):
                with transaction.atomic("shop"), lock("order", inside_transaction=True):
                    pass
                assert not is_free("order")
            assert is_free("order")
        with pytest.raises(ZeroDivisionError), transaction.atomic("shop"):
            with lock("order", inside_transaction=True):
                pass
            raise ZeroDivisionError
        assert is_free("order")


@pytest.mark.parametrize("test", unittest.TestLoader().getTestCaseNames(InTestCase))
def test_in_a_test_case(test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InTestCase, "databases", {"shop"})
    result = unittest.TestResult()
    unittest.TestSuite([InTestCase(test)]).run(result)
    assert [text for _, text in result.errors + result.failures] == []
    assert result.testsRun == 1


def test_kept_until_the_outermost_commit_and_its_hooks() -> None:
    seen: list[bool] = []
    with transaction.atomic("shop"):
        transaction.on_commit(lambda: seen.append(is_free("order")), using="shop")
        with transaction.atomic("shop"):
            with lock("order", inside_transaction=True):
                pass
            assert not is_free("order")
        transaction.on_commit(lambda: seen.append(is_free("order")), using="shop")
        assert not is_free("order")
    assert seen == [False, False]
    assert is_free("order")
    assert not {"commit", "rollback", "set_autocommit", "close"} & vars(connections["shop"]).keys()


def test_what_django_refuses_inside_a_block_ends_nothing() -> None:
    with transaction.atomic("shop"):
        with lock("order", inside_transaction=True):
            pass
        for end in (transaction.commit, transaction.rollback):
            with pytest.raises(TransactionManagementError):
                end("shop")
        with pytest.raises(TransactionManagementError):
            transaction.set_autocommit(True, using="shop")
        assert not is_free("order")
    assert is_free("order")


def test_without_a_transaction_it_ends_with_its_block() -> None:
    with lock("order", inside_transaction=True):
        with transaction.atomic("shop"):
            assert not is_free("order")
        assert not is_free("order")
    assert is_free("order")


def rolled_back() -> None:
    with transaction.atomic("shop"):
        with lock("order", inside_transaction=True):
            pass
        assert not is_free("order")
        raise ZeroDivisionError


def marked_for_rollback() -> None:
    with transaction.atomic("shop"):
        with lock("order", inside_transaction=True):
            pass
        transaction.set_rollback(True, using="shop")
    raise ZeroDivisionError


def failed_hook() -> None:
    with transaction.atomic("shop"):
        with lock("order", inside_transaction=True):
            pass
        transaction.on_commit(lambda: 1 / 0, using="shop")


def closed() -> None:
    with transaction.atomic("shop"):
        with lock("order", inside_transaction=True):
            pass
        connections["shop"].close()
        assert is_free("order")
    raise ZeroDivisionError


@contextmanager
def by_hand(end: Callable[[str], None]) -> Iterator[None]:
    transaction.set_autocommit(False, using="shop")
    yield
    assert not is_free("order")
    end("shop")
    assert is_free("order")
    transaction.set_autocommit(True, using="shop")


def committed_by_hand() -> None:
    with by_hand(transaction.commit), lock("order", inside_transaction=True):
        pass
    raise ZeroDivisionError


def rolled_back_by_hand() -> None:
    with by_hand(transaction.rollback):
        with transaction.atomic("shop"), lock("order", inside_transaction=True):
            pass
        assert not is_free("order")
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "run", [rolled_back, marked_for_rollback, failed_hook, closed, committed_by_hand, rolled_back_by_hand]
)
def test_every_end_of_a_transaction_ends_it(run: Callable[[], None]) -> None:
    with pytest.raises(ZeroDivisionError):
        run()
    assert is_free("order")
    with transaction.atomic("shop"), lock("order", inside_transaction=True):
        pass
    assert is_free("order")


def test_several_transactions_keep_it_until_all_have_ended() -> None:
    with transaction.atomic("shop"):
        with transaction.atomic("stock"), lock("order", inside_transaction=True):
            pass
        assert not is_free("order")
    assert is_free("order")


def test_a_transaction_may_ask_again_for_what_it_keeps() -> None:
    with transaction.atomic("shop"):
        with lock("order", inside_transaction=True) as first:
            pass
        with lock("order", inside_transaction=True, timeout=0) as second:
            assert second.fencing_token == first.fencing_token
        assert not is_free("order")
    assert is_free("order")


def numbers() -> list[int]:
    with connections["shop"].cursor() as cursor:
        cursor.execute("SELECT n FROM seen")
        return [row[0] for row in cursor.fetchall()]


def insert() -> None:
    with connections["shop"].cursor() as cursor:
        cursor.execute("INSERT INTO seen VALUES (1)")


def create() -> None:
    with connections["shop"].cursor() as cursor:
        cursor.execute("CREATE TABLE seen (n integer)")


@pytest.mark.parametrize("when", ["in its block", "after its block"])
def test_a_loss_rolls_the_transaction_back(when: str) -> None:
    create()
    ran: list[int] = []
    with pytest.raises(LockLostError, match="a test took it away"), transaction.atomic("shop"):
        transaction.on_commit(lambda: ran.append(1), using="shop")
        with lock("order", inside_transaction=True) as held:
            insert()
            if when == "in its block":
                lose(held)
        assert when == "after its block"
        lose(held)
    assert numbers() == []
    assert ran == []
    assert connections["shop"].get_autocommit()
    insert()
    assert numbers() == [1]


def test_a_loss_amid_the_commit_is_raised() -> None:
    create()
    with pytest.raises(LockLostError), transaction.atomic("shop"):
        with lock("order", inside_transaction=True) as held:
            insert()
        transaction.on_commit(lambda: lose(held), using="shop")
    assert numbers() == [1]


class TestAtomicRequests:
    """A view that was taken over."""

    @pytest.fixture
    def handler(self, two_databases: None) -> Any:
        from django.core.handlers.base import BaseHandler

        for alias in ALIASES:
            connections.settings[alias]["ATOMIC_REQUESTS"] = True
        return BaseHandler()

    def guarded(self, view: Callable[[], list[str]], name: str = "order") -> Callable[[], list[str]]:
        def run() -> list[str]:
            with ExitStack() as stack:
                held = stack.enter_context(lock(name))
                stack.enter_context(atomic_requests(atomic_aliases(run), held))
                return view()

        take_over_atomic_requests(view, run)
        return run

    def view(self) -> list[str]:
        assert not is_free("order")
        return [connection.alias for connection in open_transactions()]

    def test_its_transactions_are_inside_the_lock(self, handler: Any) -> None:
        guarded = self.guarded(lambda: self.view())
        assert handler.make_view_atomic(guarded)() == list(ALIASES)
        assert is_free("order")

    @pytest.mark.parametrize("below", [True, False])
    def test_what_the_view_excludes_stays_excluded(self, handler: Any, below: bool) -> None:
        def view() -> list[str]:
            return self.view()

        exclude = transaction.non_atomic_requests("stock")
        guarded = self.guarded(exclude(view)) if below else exclude(self.guarded(view))
        assert handler.make_view_atomic(guarded)() == ["shop"]

    def test_a_loss_rolls_back(self, handler: Any) -> None:
        create()

        def run() -> None:
            with lock("order") as held, atomic_requests(atomic_aliases(run), held):
                insert()
                lose(held)

        take_over_atomic_requests(insert, run)
        with pytest.raises(LockLostError):
            handler.make_view_atomic(run)()
        assert numbers() == []
