"""What the operating system reports about changes of a SQLite file: inotify on Linux, kqueue on macOS and BSD."""

import ctypes
import errno
import os
import select
import struct
import sys
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress

from grelmicro.backends.sqlite.file import FileId, file_id

# <sys/inotify.h>
IN_MODIFY, IN_ATTRIB, IN_DELETE_SELF, IN_MOVE_SELF, IN_IGNORED = 0x2, 0x4, 0x400, 0x800, 0x8000
EVENT = struct.Struct("iIII")  # watch, mask, cookie, and the length of a name, which only a watch on a folder gives
IN_REPLACED = IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF
"""Reports of a removed file. While it is open somewhere, its removal changes only an attribute: its number of names."""

MAX_READ_BYTES = 4096 * EVENT.size
"""Bytes of reports that are read at once. The kernel merges equal reports that follow each other."""

_LIMITS = {
    errno.EMFILE: "too many inotify instances or open files: raise fs.inotify.max_user_instances or ulimit -n",
    errno.ENOSPC: "too many inotify watches: raise fs.inotify.max_user_watches",
}

SUPPORTED = sys.platform == "linux" or hasattr(select, "kqueue")
"""Whether the operating system reports changes of files."""

Files = tuple[FileId | None, FileId | None]
"""A SQLite file and its log."""


class Notifier(ABC):
    """A descriptor that becomes readable after each write to the log of a SQLite file, and when one is replaced.

    Args:
        path: the file, without symbolic links. A connection to it is open, so its log exists.

    Raises:
        OSError: the operating system does not watch the files.
    """

    def __init__(self, path: str) -> None:
        self._log = log_of(path)
        self.files = files_at(path)
        """The files that are watched. After a replacement, those at the path are others."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor."""

    @abstractmethod
    def drain(self) -> bool:
        """Take the reports that have come; whether there were any."""

    @abstractmethod
    def close(self) -> None:
        """End the watch. Linux takes some milliseconds for it."""

    def touch(self) -> None:
        """Cause a report, by a change that SQLite ignores."""
        os.utime(self._log)


def log_of(path: str) -> str:
    """Return the path of the write-ahead log of the file at `path`."""
    return path + "-wal"


def files_at(path: str) -> Files:
    """Return which file and which log are at `path` now."""
    return file_id(path), file_id(log_of(path))


class Inotify(Notifier):
    """Linux: a watch on the file and one on its log. The functions are the C library's, since Python has none."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = _checked(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._close = weakref.finalize(self, os.close, self._descriptor)
        _open.add(self)
        for watched, mask in ((self._log, IN_MODIFY | IN_REPLACED), (path, IN_REPLACED)):
            _checked(library.inotify_add_watch(self._descriptor, os.fsencode(watched), mask))

    def fileno(self) -> int:
        """See `Notifier.fileno`."""
        return self._descriptor

    def drain(self) -> bool:
        """See `Notifier.drain`."""
        with suppress(BlockingIOError):
            events = os.read(self._descriptor, MAX_READ_BYTES)
            if any(mask & IN_IGNORED for _, mask, _, _ in EVENT.iter_unpack(events)):
                # The file is gone, and another one may have got its number.
                self.files = (None, None)
            return True
        return False

    def close(self) -> None:
        """See `Notifier.close`."""
        self._close()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, _LIMITS.get(number, os.strerror(number)))
    return result


if sys.platform != "linux" and sys.platform != "win32":

    class Kqueue(Notifier):
        """macOS and BSD: a watch on the log, and one on the folder, in which a replacement shows.

        The file itself is not opened: to close any descriptor of it would drop the locks that SQLite has on it.
        """

        def __init__(self, path: str) -> None:
            super().__init__(path)
            self._queue = select.kqueue()
            self._descriptors: list[int] = []
            self._close = weakref.finalize(self, _close_all, self._queue, self._descriptors)
            _open.add(self)
            for watched in (self._log, os.path.dirname(path)):
                self._descriptors.append(os.open(watched, getattr(os, "O_EVTONLY", os.O_RDONLY) | os.O_CLOEXEC))
            flags, changes = select.KQ_EV_ADD | select.KQ_EV_CLEAR, select.KQ_NOTE_WRITE | select.KQ_NOTE_ATTRIB
            vnode = select.KQ_FILTER_VNODE
            self._queue.control([select.kevent(each, vnode, flags, changes) for each in self._descriptors], 0)

        def fileno(self) -> int:
            """See `Notifier.fileno`."""
            return self._queue.fileno()

        def drain(self) -> bool:
            """See `Notifier.drain`."""
            return bool(self._queue.control(None, len(self._descriptors), 0))

        def close(self) -> None:
            """See `Notifier.close`."""
            self._close()

    def _close_all(queue: "select.kqueue", descriptors: list[int]) -> None:
        queue.close()
        for descriptor in descriptors:
            os.close(descriptor)


def notifier(path: str) -> Notifier:
    """Watch the file that is at `path` now, and its log; see `Notifier`.

    Raises:
        OSError: the operating system does not watch them.
    """
    if sys.platform == "linux":
        return Inotify(path)
    elif sys.platform != "win32" and hasattr(select, "kqueue"):
        return Kqueue(path)
    raise OSError(errno.ENOTSUP, "this platform reports no changes of files")


_open: weakref.WeakSet[Notifier] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Leave the reports to the parent: whichever process reads one takes it from the other."""
    for each in list(_open):
        with suppress(OSError):
            each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
