"""Programs without an event loop that end, fork and are killed while their app is open."""

import signal
from pathlib import Path

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock
from tests.helpers.scripts import script

BEGIN = """
import os, sys, threading, warnings
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, synchronized
from grelmicro.errors import OutOfContextError

warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks on purpose
micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])

@synchronized("cart:{cart_id}", timeout=0)
def checkout(cart_id):
    return os.getpid()
"""

ENDS = {
    "ends": "",
    "exits": "sys.exit(3)",
    "fails": "raise ZeroDivisionError",
    "exits in a block": "micro.__enter__(); sys.exit(3)",
    "is interrupted": "print('held', flush=True); input()",
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'locks.db'}"


def is_free(url: str, *names: str) -> bool:
    with Grelmicro(uses=[Coordination.from_url(url)]):
        return not any(Lock(name).from_thread.locked() for name in names)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_program_that_leaves_it_open_gives_its_locks_back(url: str, end: str) -> None:
    code = f"{BEGIN}\nmicro.open()\nheld = Lock('cart').from_thread.acquire()\nassert checkout(7)\n{end}"
    with script(code, url) as program:
        if "input" in end:
            assert program.hear() == "held"
            program.send(signal.SIGINT)
        ending = program.end()
        expected = {"": 0, ENDS["exits"]: 3, ENDS["exits in a block"]: 3}.get(end)
        assert ending.code == expected or (expected is None and ending.code not in (0, 3)), ending.errors
    assert is_free(url, "cart", "cart:7")


def test_a_program_that_ends_while_a_thread_works_is_not_kept(url: str) -> None:
    """The thread's block goes on to the end of the process, so its lock is not given back."""
    work = """
micro.open()
inside = threading.Event()

@synchronized("cart", timeout=0, auto_renew=False)
def work():
    inside.set()
    threading.Event().wait()

threading.Thread(target=work, daemon=True).start()
inside.wait()
"""
    with script(BEGIN + work, url) as program:
        ending = program.end()
        assert ending.code == 0, ending.errors
    assert not is_free(url, "cart")


FORKS = """
micro.open()
held = Lock("parent").from_thread.acquire()
parent = checkout(7)
pid = os.fork()
if pid == 0:
    assert not micro.is_open
    assert not held.valid
    try:
        checkout(7)
    except OutOfContextError:
        pass
    else:
        os._exit(9)
    micro.close()  # of what it inherited: nothing
    micro.open()
    assert checkout(7) == os.getpid() != parent
    if sys.argv[2] == "closes":
        micro.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert held.valid
held.extend()
assert checkout(7) == parent
held.release()
micro.close()
assert not micro.is_open
print("done", flush=True)
"""


@pytest.mark.parametrize("end", ["closes", "leaves it to the exit"])
def test_a_forked_child_opens_its_own(url: str, end: str) -> None:
    with script(BEGIN + FORKS, url, end) as program:
        assert program.hear() == "done", program.end().errors
        assert program.end().code == 0
    assert is_free(url, "parent", "cart:7")


FORKS_WHILE_OPENING = """
class Slow:
    async def __aenter__(self):
        opening.set()
        await_end()
    async def __aexit__(self, *_):
        pass

opening, end = threading.Event(), threading.Event()
def await_end():
    if os.getpid() == parent:
        end.wait()

parent = os.getpid()
micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1]), Slow()])
opener = threading.Thread(target=micro.open)
opener.start()
opening.wait()
pid = os.fork()
if pid == 0:
    micro.open()
    assert checkout(7)
    micro.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
end.set()
opener.join()
assert checkout(7)
micro.close()
print("done", flush=True)
"""


def test_a_child_that_was_forked_while_a_thread_opened_it_opens_its_own(url: str) -> None:
    with script(BEGIN + FORKS_WHILE_OPENING, url) as program:
        assert program.hear() == "done", program.end().errors
        assert program.end().code == 0
