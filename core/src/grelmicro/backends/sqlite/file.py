"""Where a file of leases may be: the rules for its path, its file system, and what a deleted one leaves behind."""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grelmicro.errors import SettingsValidationError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("grelmicro.coordination")

NETWORK = frozenset(
    ("afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2")
    + ("orangefs", "smb3", "smbfs", "fuse.ceph", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs")
)
"""File systems that several hosts share, where neither SQLite's locks nor its shared memory can be trusted."""

PASSED_THROUGH = ("9p", "virtiofs", "fuse.", "fuse")
"""File systems behind which there may be a local disk or anything else."""

FileId = tuple[int, int]
"""Device and number of a file: what is at a path, whatever it was called before."""

LOCAL_DISK = "use a file on a local disk; hosts that share leases need a store that all of them reach by network"


def check_path(path: object) -> str:
    """`path` as an absolute path with `~` replaced. It does not look at the file system.

    Raises:
        SettingsValidationError: it is not the path of a file that several processes can share.
    """
    if not isinstance(path, str | os.PathLike):
        raise SettingsValidationError(
            f"SQLite: path should be text or a path object, not {type(path).__name__}: give one such as 'locks.db'"
        )
    text = os.fspath(path)
    if not isinstance(text, str):
        raise SettingsValidationError("SQLite: path should be text, not bytes: give one such as 'locks.db'")
    if not text.strip():
        raise SettingsValidationError("SQLite: path is empty: name a file, such as 'locks.db'")
    if "\0" in text:
        raise SettingsValidationError("SQLite: path has a NUL character: name a file, such as 'locks.db'")
    if text == ":memory:":
        raise SettingsValidationError(
            "SQLite: path ':memory:' is a database that no other process can see: name a file, such as 'locks.db', "
            "or use memory:// for an application of one process"
        )
    if re.match(r"(file|sqlite\d?):", text):
        raise SettingsValidationError(
            "SQLite: path should be a plain path, not a URI: name a file, such as 'locks.db', or use from_url() "
            "with sqlite:///locks.db"
        )
    return os.path.abspath(os.path.expanduser(text))


def check_place(path: str) -> bool:
    """Look at the file system before a file of leases is opened there; warns when it may be shared between hosts.

    Returns:
        Whether it is a local one, so that this host's kernel knows of each change.

    Raises:
        SettingsValidationError: a file of leases cannot be there.
    """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        missing = SettingsValidationError(
            "SQLite: path is in a directory that does not exist: create the directory first, or name another"
        )
        missing.lasting = False  # it may be mounted late
        raise missing
    if os.path.isdir(path):
        raise SettingsValidationError("SQLite: path is a directory: name a file in it, such as 'locks.db'")
    if os.path.exists(path) and not os.path.isfile(path):
        raise SettingsValidationError("SQLite: path is not a regular file: name another, such as 'locks.db'")
    if os.path.exists(path) and not _may(path, os.R_OK | os.W_OK):
        raise SettingsValidationError(
            "SQLite: path is a file that this process may not read and write: change its permissions, or name another"
        )
    # SQLite keeps two more files beside it, which it creates and removes.
    if not _may(os.path.dirname(os.path.realpath(path)), os.R_OK | os.W_OK | os.X_OK):
        raise SettingsValidationError(
            "SQLite: path is in a directory in which this process may not create files: change its permissions, "
            "or name another"
        )
    return _check_file_system(path)


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _check_file_system(path: str) -> bool:
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux
        return True
    kind = file_system(mounts, os.path.realpath(path))
    if kind in NETWORK:
        raise SettingsValidationError(f"SQLite: path is on a network file system ({kind}): {LOCAL_DISK}")
    if kind.startswith(PASSED_THROUGH):
        logger.warning("%s is on a file system (%s) that several hosts may share: %s", path, kind, LOCAL_DISK)
        return False
    return True


def file_system(mountinfo: str, path: str) -> str:
    """The type of the file system that holds `path`, by the text of Linux's `/proc/self/mountinfo`; "" if unknown."""
    found, longest = "", -1
    for line in mountinfo.splitlines():
        # ID parent major:minor root MOUNT-POINT options [optional fields] - TYPE source options
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later hides the earlier.
        if inside and len(point) >= longest:
            found, longest = right.split(" ")[0], len(point)
    return found


def file_id(path: str) -> FileId | None:
    """Which file is at `path`; None when there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def create(path: str) -> None:
    """Create an empty file at `path` if there is none, without the log and the index of one that was deleted.

    Processes that still have the deleted file open go on using these two. SQLite would find them by their names, take
    them for those of the new file, and fail or damage it.
    """
    path = os.path.realpath(path)
    if os.path.exists(path):
        return
    with _alone(os.path.dirname(path)):
        if os.path.exists(path):  # by now
            return
        for leftover in (path + "-wal", path + "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(leftover)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o644))


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Let one process at a time create files in `folder`; a stranger's lock on it is waited for at most a second."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.005)
        yield
    finally:
        os.close(handle)  # and with it the lock
