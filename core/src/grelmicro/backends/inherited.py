"""What a forked child has of its parent's connections, and must not clean up."""

import os
from ctypes import py_object, pythonapi

_open: set[object] = set()


def opened(thing: object) -> None:
    """`thing` has connections from now on: a process that is forked leaves it as it is."""
    _open.add(thing)


def closed(thing: object) -> None:
    """`thing` has none any more."""
    _open.discard(thing)


def _leave_to_the_parent() -> None:
    """In a forked child: never clean up after the connections of the parent, not even at the end of the interpreter.

    That would end them for the parent, too: it sends what ends an encrypted connection, and takes sockets off the list
    of those that the parent's event loop listens to, which both processes share.
    """
    for thing in _open:
        pythonapi.Py_IncRef(py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
