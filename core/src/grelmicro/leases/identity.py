"""Holders of leases: a worker's readable name, then a part that begins with the process and is secret.

A holder is `{worker}:{minted}`, or `{worker}:task:{minted}` and `{worker}:thread:{minted}` of locks. What is minted has
three parts: the id of the process, 16 hex digits that are public; its secret, 64 random bits that never leave this
process and the store; and a count.
"""

import os
import re
import sys
import time
from itertools import count
from pathlib import Path
from secrets import token_hex
from socket import gethostname

_CONTEXTS = (":task", ":thread")
_MINTED = re.compile(r"([0-9a-f]{16})[0-9a-f]{16}([0-9]+)")

_process = token_hex(8)
_stem = _process + token_hex(8)
_count = count()
_started_at = time.time()


def mint() -> str:
    """A name that no other process, and nothing else in this one, ever has, and that nothing else can make up.

    Of its random bits, 64 are those of the process's id and 64 are secret. Making one costs no system call.
    """
    return f"{_stem}{next(_count)}"


def process_id() -> str:
    """The public id of this process: 16 hex digits, with which all that it mints begins. A fork has another one."""
    return _process


def describe_process() -> dict[str, str]:
    """What an operator wants to know of this process: `host`, `pid`, `application` and `started` (since 1970)."""
    return {
        "host": gethostname(),
        "pid": str(os.getpid()),
        "application": _program(),
        "started": f"{_started_at:.3f}",
    }


def worker_of(name: str, holder: str) -> str:
    """The readable name of the worker behind `holder` of the lease `name`; "" where it is unknown.

    The holder that another program's elector gave itself is such a name as a whole.
    """
    rest, _, minted = holder.rpartition(":")
    if not rest:
        return holder if name.startswith("leader:") and _MINTED.fullmatch(minted) is None else ""
    if not name.startswith("leader:"):
        for context in _CONTEXTS:
            rest = rest.removesuffix(context)
    return rest


def process_of(holder: str) -> str:
    """The id of the process behind `holder`; "" where it is unknown."""
    found = _MINTED.fullmatch(holder.rpartition(":")[2])
    return "" if found is None else found[1]


def public_name(name: str, holder: str) -> str:
    """`holder` of the lease `name` without its secret: the worker, the process's id and the count."""
    worker = worker_of(name, holder)
    found = _MINTED.fullmatch(holder.rpartition(":")[2])
    return worker if found is None else f"{worker}:{found[1]}.{found[2]}"


def _program() -> str:
    """The name of the program that runs, such as `gunicorn`; `python` where it has none."""
    path = Path(sys.argv[0] if sys.argv else "")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return "python" if name in ("", "-", "-c", "-m") else name


def _start_anew() -> None:
    global _process, _stem, _started_at
    _process = token_hex(8)
    _stem = _process + token_hex(8)
    _started_at = time.time()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
