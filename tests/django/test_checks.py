"""The system checks of a project."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.test import override_settings
from django.test.utils import setup_test_environment, teardown_test_environment

from grelmicro_django.checks import STORE_TAG, TAG
from tests.django.databases import databases
from tests.django.helpers import make_project
from tests.servers.fixtures import StartRedis

SQLITE = "django.db.backends.sqlite3"


def checked(given: Any, tag: str = TAG, *, deploy: bool = False, **more: Any) -> list[CheckMessage]:
    with override_settings(GRELMICRO=given):
        return run_checks(tags=[tag], include_deployment_checks=deploy, **more)


def ids(given: Any, **more: Any) -> list[str | None]:
    return [message.id for message in checked(given, **more)]


@pytest.mark.parametrize(
    ("given", "code", "text"),
    [
        ({}, "E001", "no 'STORE'"),
        (None, "E001", "is missing"),
        ({"STORE": "memory://", "TASKS": "shop.tasks"}, "E001", "['TASKS'] is wrong"),
        ({"STROE": "memory://"}, "E002", "did you mean 'STORE'"),
        ({"STORE": "redsi://:hidden@cache"}, "E003", "did you mean redis"),
        ({"STORE": "redis://:hidden@cache:port"}, "E003", "no valid host and port"),
        ({"STORE": "database:shop"}, "E003", "names no database"),
        ({"STORE": "cache:default"}, "E003", "cache"),
        ({"STORE": "memory://", "TEST": {"STORE": "cache:x"}}, "E003", "names no cache"),
    ],
)
def test_a_mistake_has_an_id(given: Any, code: str, text: str) -> None:
    (found,) = checked(given)
    assert found.id == f"grelmicro.{code}"
    assert text in found.msg
    assert "hidden" not in str(found)


def test_settings_without_a_mistake_pass() -> None:
    assert ids({"STORE": "redis://cache/1", "NAMESPACE": "shop", "TEST": {"STORE": "memory://"}}) == []
    assert ids({"STORE": "memory://"}) == []


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("grelmicro.backends.postgres", "grelmicro.providers.postgres"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    (found,) = checked({"STORE": "postgresql://db/shop"})
    assert found.id == "grelmicro.E004"
    assert 'pip install "grelmicro-suite[postgres]"' in found.msg


def test_a_memory_store_is_for_debugging_and_tests() -> None:
    teardown_test_environment()
    try:
        assert ids({"STORE": "memory://"}) == ["grelmicro.W001"]
        with override_settings(DEBUG=True):
            assert ids({"STORE": "memory://"}) == []
    finally:
        setup_test_environment()


def test_an_option_in_none_of_the_lists_is_said() -> None:
    options = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "OPTIONS": {"colour": 1}}
    with databases(shop=options):
        (found,) = checked({"STORE": "database:shop"})
    assert (found.id, "'colour'" in found.msg) == ("grelmicro.W003", True)


def test_only_the_deployment_check_connects(start_redis: StartRedis) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(0.2)
        url = f"redis://:hidden@127.0.0.1:{nobody.getsockname()[1]}/0"
        assert ids({"STORE": url}, deploy=True) == []
        with pytest.raises(TimeoutError):
            nobody.accept()
    (found,) = checked({"STORE": url}, STORE_TAG, deploy=True)
    assert found.id == "grelmicro.E005"
    assert "hidden" not in str(found)
    server = start_redis(maxmemory="100mb", maxmemory_policy="allkeys-lru")
    (found,) = checked({"STORE": server.url}, STORE_TAG, deploy=True)
    assert found.id == "grelmicro.W002"
    assert "maxmemory-policy allkeys-lru" in found.msg


def test_a_store_in_a_database_is_reached_when_the_database_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "none/shop.db"
    with databases(shop={"ENGINE": SQLITE, "NAME": wrong}):
        store = {"STORE": "database:shop"}
        # Without this argument Django 6 names all databases, and older ones none.
        assert ids(store, tag=STORE_TAG, deploy=True, databases=[]) == []
        assert ids(store, tag=STORE_TAG, deploy=True, databases=["default"]) == []
        assert ids(store, tag=STORE_TAG, deploy=True, databases=["shop"]) == ["grelmicro.E005"]


def test_importing_the_package_needs_no_settings() -> None:
    code = (
        "import grelmicro_django, sys; grelmicro_django.lock; assert 'asyncpg' not in sys.modules; "
        "from django.conf import settings; assert not settings.configured"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_no_command_of_django_connects(tmp_path: Path) -> None:
    """The store is a server that counts who comes; `runserver` has the parent and the child of the autoreloader."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(0.2)
        project = make_project(tmp_path, f"redis://127.0.0.1:{nobody.getsockname()[1]}/0")
        commands = (["check"], ["migrate"], ["makemigrations", "--check"], ["shell", "-c", "import grelmicro_django"])
        for command in commands:
            ended = project.manage(*command)
            assert ended.code == 0, ended.err
        (tmp_path / "shop/apps.py").write_text(STARTED)
        (tmp_path / "urls.py").write_text("urlpatterns = []\n")
        with (tmp_path / "settings.py").open("a") as settings:
            settings.write('\nDEBUG = True\nROOT_URLCONF = "urls"\n')
        # The child of the autoreloader outlives a parent that is killed, but not its group.
        process = subprocess.Popen(
            [sys.executable, "manage.py", "runserver", "127.0.0.1:0"],
            cwd=tmp_path,
            env=project.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            project.wait_for("parent")
            project.wait_for("child")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with pytest.raises(TimeoutError):
            nobody.accept()


STARTED = """
import os
from django.apps import AppConfig

class Shop(AppConfig):
    name = "shop"
    def ready(self):
        with open("log", "a") as log:
            log.write("child\\n" if os.environ.get("RUN_MAIN") else "parent\\n")
"""
