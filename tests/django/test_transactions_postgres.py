"""On PostgreSQL: the update that is lost when a lock is released before the commit, and what prevents that."""

import threading
from collections.abc import Callable, Iterator
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from django.db import OperationalError, connections, transaction

from grelmicro.coordination import LockLostError, LockTimeoutError
from grelmicro_django import lock
from grelmicro_django.serving import served
from tests.django.databases import databases


@pytest.fixture(autouse=True)
def shop(postgres_url: str) -> Iterator[None]:
    url = urlsplit(postgres_url)
    settings = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(url.path[1:]),
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "HOST": url.hostname or "",
        "PORT": str(url.port or ""),
        "OPTIONS": dict(parse_qsl(url.query)),
    }
    with databases(shop=settings):
        execute("CREATE TABLE counter (n integer)")
        execute("INSERT INTO counter VALUES (0)")
        yield


def execute(statement: str, *values: int) -> None:
    with connections["shop"].cursor() as cursor:
        cursor.execute(statement, values)


def read() -> int:
    with connections["shop"].cursor() as cursor:
        cursor.execute("SELECT n FROM counter")
        return int(cursor.fetchone()[0])


Body = Callable[[], None]


def released_before_the_commit(work: Body, before_commit: Body) -> None:
    """What `lock()` refuses to do."""
    with served() as micro, transaction.atomic("shop"):
        with micro.coordination.lock("counter").from_thread.acquire(timeout=30):
            work()
        before_commit()


def kept_until_the_commit(work: Body, before_commit: Body) -> None:
    with transaction.atomic("shop"):
        with lock("counter", timeout=30, inside_transaction=True):
            work()
        before_commit()


def acquired_before(work: Body, before_commit: Body) -> None:
    with lock("counter", timeout=30), transaction.atomic("shop"):
        work()
        before_commit()


@pytest.mark.parametrize(
    ("guarded", "result"), [(released_before_the_commit, 1), (kept_until_the_commit, 2), (acquired_before, 2)]
)
def test_the_lost_update(guarded: Callable[[Body, Body], None], result: int) -> None:
    """A second one increments before the first one commits, if its lock lets it."""
    written, second_read, errors = threading.Event(), threading.Event(), list[BaseException]()

    def increment(then: Body) -> None:
        n = read()
        then()
        execute("UPDATE counter SET n = %s", n + 1)

    def let_the_second_read() -> None:
        written.set()
        assert second_read.wait(30 if result == 1 else 0.1) == (result == 1)

    def run(work: Body, before_commit: Body) -> None:
        try:
            guarded(work, before_commit)
        except BaseException as error:
            errors.append(error)
            written.set()
        finally:
            connections.close_all()

    first = threading.Thread(target=run, args=(lambda: increment(lambda: None), let_the_second_read))
    second = threading.Thread(target=run, args=(lambda: increment(second_read.set), lambda: None))
    first.start()
    assert written.wait(30)
    second.start()
    for thread in (first, second):
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert read() == result


def is_free() -> bool:
    """Whether another thread can acquire the lock at once."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with lock("counter", timeout=0):
                answers.append(True)
        except LockTimeoutError:
            answers.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    return answers[0]


def test_a_lost_lease_rolls_back() -> None:
    with pytest.raises(LockLostError), transaction.atomic("shop"):
        with lock("counter", inside_transaction=True) as held:
            execute("UPDATE counter SET n = 7")
        held._handle.lose("a test took it away")
    assert read() == 0
    with transaction.atomic("shop"):
        execute("UPDATE counter SET n = 8")
    assert read() == 8


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_connection_that_breaks_keeps_no_lease(by_hand: bool) -> None:
    with connections["shop"].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()

    def kill() -> None:
        execute("SELECT pg_terminate_backend(%s, 10000)", pid)
        connections.close_all()

    def work() -> None:
        with lock("counter", inside_transaction=True):
            execute("UPDATE counter SET n = 7")
        killer = threading.Thread(target=kill)
        killer.start()
        killer.join()
        assert not is_free()

    with pytest.raises(OperationalError):
        if by_hand:
            transaction.set_autocommit(False, using="shop")
            work()
            transaction.commit(using="shop")
        else:
            with transaction.atomic("shop"):
                work()
    if by_hand:  # Django leaves the connection for the program to close
        assert not is_free()
        connections["shop"].close()
    assert is_free()
    assert read() == 0


def test_a_statement_that_fails_ends_it() -> None:
    with pytest.raises(OperationalError), transaction.atomic("shop"):
        execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert read() == 0
        with lock("counter", inside_transaction=True):
            change_elsewhere()
            execute("UPDATE counter SET n = 7")
    assert is_free()
    assert read() == 5


def change_elsewhere() -> None:
    def change() -> None:
        execute("UPDATE counter SET n = 5")
        connections.close_all()

    thread = threading.Thread(target=change)
    thread.start()
    thread.join(30)
