"""Where a file of leases may be, and what is said when it may not."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from grelmicro.backends.sqlite import SQLiteLockAdapter, SQLiteProvider, SQLiteStore
from grelmicro.backends.sqlite import file as sqlite_file
from grelmicro.backends.sqlite.file import check_path, file_system
from grelmicro.errors import BackendUnavailableError, SettingsValidationError

NOBODY = 65_534

MOUNTS = r"""
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw shared:2 - proc proc rw
31 22 0:28 / /srv rw - nfs4 server:/export rw,vers=4.2
32 31 253:1 / /srv/local rw master:3 propagate_from:2 - xfs /dev/vdb rw
33 22 0:40 / /mnt/two\040words\134x rw - cifs //server/share rw
34 22 0:41 / /hidden rw - nfs server:/old rw
35 22 0:42 / /hidden rw - tmpfs tmpfs rw
36 22 0:43 / /home/me/remote rw - fuse.sshfs me@server: rw
37 22 0:44 / /shared rw - 9p share rw,trans=virtio
a line that is none
""".strip()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/locks.db", "ext4"),
        ("/srv/locks.db", "nfs4"),
        ("/srv/local/locks.db", "xfs"),
        ("/srv/localhost/locks.db", "nfs4"),
        ("/srvx/locks.db", "ext4"),
        ("/mnt/two words\\x/locks.db", "cifs"),
        ("/mnt/two/locks.db", "ext4"),
        ("/hidden/locks.db", "tmpfs"),
        ("/home/me/remote/a/b/locks.db", "fuse.sshfs"),
        ("/shared", "9p"),
    ],
)
def test_the_longest_mount_point_above_a_path_tells_its_file_system(path: str, kind: str) -> None:
    assert file_system(MOUNTS, path) == kind


def test_an_unknown_table_of_mounts_tells_nothing() -> None:
    assert file_system("", "/locks.db") == ""
    assert file_system("what is this?\n\n", "/locks.db") == ""


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "SQLite: path is empty: name a file, such as 'locks.db'"),
        ("  ", "SQLite: path is empty: name a file, such as 'locks.db'"),
        ("a\0b", "SQLite: path has a NUL character: name a file, such as 'locks.db'"),
        (
            ":memory:",
            "SQLite: path ':memory:' is a database that no other process can see: name a file, such as 'locks.db', "
            "or use memory:// for an application of one process",
        ),
        (
            "file:locks.db?mode=memory",
            "SQLite: path should be a plain path, not a URI: name a file, such as 'locks.db', or use from_url() "
            "with sqlite:///locks.db",
        ),
        (
            "sqlite:///locks.db",
            "SQLite: path should be a plain path, not a URI: name a file, such as 'locks.db', or use from_url() "
            "with sqlite:///locks.db",
        ),
        (b"locks.db", "SQLite: path should be text or a path object, not bytes: give one such as 'locks.db'"),
        (7, "SQLite: path should be text or a path object, not int: give one such as 'locks.db'"),
    ],
)
def test_a_path_that_can_be_no_file_is_refused_at_once(path: str, text: str) -> None:
    with pytest.raises(SettingsValidationError) as refusal:
        SQLiteStore(path)
    assert str(refusal.value) == text


def test_a_path_may_be_an_object_relative_or_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert check_path(Path("locks.db")) == str(tmp_path / "locks.db")
    assert check_path("./a/../locks.db") == str(tmp_path / "locks.db")
    assert check_path("~/locks.db") == "/home/me/locks.db"
    assert check_path("file.db") == str(tmp_path / "file.db")


def test_the_environment_may_name_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SQLITE_PATH", str(tmp_path / "env.db"))
    assert SQLiteProvider().safe_url == f"sqlite:///{tmp_path}/env.db"
    assert isinstance(SQLiteLockAdapter().store, SQLiteStore)
    monkeypatch.delenv("SQLITE_PATH")
    with pytest.raises(SettingsValidationError) as refusal:
        SQLiteProvider()
    assert str(refusal.value) == (
        "SQLite: path is missing: give it, such as SQLiteProvider('locks.db'), "
        "or set the environment variable SQLITE_PATH"
    )


def test_urls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert SQLiteProvider.from_url("sqlite:///locks.db").safe_url == f"sqlite:///{tmp_path}/locks.db"
    assert SQLiteProvider.from_url("sqlite:////var/a%20b.db").safe_url == "sqlite:////var/a%20b.db"
    assert SQLiteProvider.from_url("sqlite:///x.db?namespace=shop").store.namespace == "shop"
    assert SQLiteProvider.from_url("sqlite:///x.db", namespace="shop").store.namespace == "shop"


@pytest.mark.parametrize(
    "url", ["sqlite://locks.db", "sqlite:locks.db", "sqlite://", "file:///locks.db", "sqlite:///a.db#b", "locks.db"]
)
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(SettingsValidationError) as refusal:
        SQLiteProvider.from_url(url)
    assert str(refusal.value) == (
        "SQLite: url should be sqlite:/// and a path: sqlite:///locks.db for a file in the working directory, "
        "sqlite:////var/lib/shop/locks.db for any other"
    )


def test_options_of_a_url_are_checked() -> None:
    with pytest.raises(SettingsValidationError) as refusal:
        SQLiteProvider.from_url("sqlite:///locks.db?mode=memory")
    assert str(refusal.value) == "SQLite: url has an option that is not known: the only one is namespace"
    with pytest.raises(SettingsValidationError, match="path is empty"):
        SQLiteProvider.from_url("sqlite:///")
    with pytest.raises(SettingsValidationError, match="':memory:'"):
        SQLiteProvider.from_url("sqlite:///:memory:")


async def refused(path: Path) -> str:
    """The text with which opening the store at `path` is refused."""
    store = SQLiteStore(path)
    with pytest.raises(SettingsValidationError) as refusal:
        await store.__aenter__()
    assert not store.is_open
    assert str(path) not in str(refusal.value)
    return str(refusal.value)


async def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert await refused(tmp_path / "missing" / "locks.db") == (
        "SQLite: path is in a directory that does not exist: create the directory first, or name another"
    )


async def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert await refused(tmp_path) == "SQLite: path is a directory: name a file in it, such as 'locks.db'"


async def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert await refused(tmp_path / "pipe") == "SQLite: path is not a regular file: name another, such as 'locks.db'"


async def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 1_000)
    assert await refused(path) == (
        "SQLite: path names a file, but it is not a SQLite database: name another file, or remove this one"
    )
    assert path.read_text() == "dear diary, " * 1_000


async def test_a_table_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE grelmicro_leases (namespace TEXT, name TEXT, holder TEXT)")
    connection.close()
    assert await refused(path) == (
        "SQLite: path is a file with a table grelmicro_leases of another version of this package: "
        "let all processes use one version, or name another file"
    )


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Give root's powers up, for which permissions mean nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)
    os.setegid(0)


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that everybody reaches."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if str(folder) not in ("/", "/tmp"):
            folder.chmod(0o777)
    return tmp_path


async def test_a_file_that_may_not_be_written_to_is_refused(open_folder: Path, request: pytest.FixtureRequest) -> None:
    path = open_folder / "locks.db"
    async with SQLiteStore(path):
        pass
    path.chmod(0o444)
    request.getfixturevalue("as_nobody")
    assert await refused(path) == (
        "SQLite: path is a file that this process may not read and write: change its permissions, or name another"
    )


async def test_a_directory_that_may_not_be_written_to_is_refused(
    open_folder: Path, request: pytest.FixtureRequest
) -> None:
    folder = open_folder / "kept"
    folder.mkdir(mode=0o755)
    request.getfixturevalue("as_nobody")
    assert await refused(folder / "locks.db") == (
        "SQLite: path is in a directory in which this process may not create files: change its permissions, "
        "or name another"
    )


async def test_a_network_file_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sqlite_file, "file_system", lambda mounts, path: "nfs4")
    assert await refused(tmp_path / "locks.db") == (
        "SQLite: path is on a network file system (nfs4): use a file on a local disk; "
        "hosts that share leases need a store that all of them reach by network"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["9p", "virtiofs", "fuse.gocryptfs", "fuseblk"])
async def test_a_file_system_that_may_be_shared_gives_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    monkeypatch.setattr(sqlite_file, "file_system", lambda mounts, path: kind)
    async with SQLiteStore(tmp_path / "locks.db") as store:
        await store.acquire("lock:a", "a", 5)
        await store.read("lock:a")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{tmp_path}/locks.db is on a file system ({kind}) that several hosts may share: use a file on a local disk; "
        "hosts that share leases need a store that all of them reach by network"
    ]


async def test_this_machine_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with SQLiteStore(tmp_path / "locks.db") as store:
        await store.acquire("lock:a", "a", 5)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def remove(path: Path) -> None:
    """Remove a database with all that belongs to it."""
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


async def test_a_file_that_is_overwritten_in_use_fails_clearly_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    async with SQLiteStore(path) as store:
        await store.acquire("lock:a", "a", 5)
        remove(path)
        path.write_text("no database at all, " * 500)
        with pytest.raises(BackendUnavailableError) as failure:
            await store.acquire("lock:a", "a", 5)
        assert str(failure.value) == (
            f"the SQLite file {path}: it is not a SQLite database: name another file, or remove this one"
        )
        path.unlink()
        assert (await store.acquire("lock:a", "a", 5)).granted_to("a")
