"""The commands of the deployment guide: with its application, each makes a server of which one worker leads."""

import re
import shlex
import time
from pathlib import Path

import pytest

from tests.deployments.server import free_port, started
from tests.docs.examples import blocks, commands
from tests.docs.pages import PAGES
from tests.helpers.programs import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BLOCKS = blocks(PAGES["docs/guides/deployment.md"])
COMMANDS = [
    command for command in commands(BLOCKS) if command.startswith(("uvicorn", "gunicorn", "granian", "hypercorn"))
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 4


@pytest.mark.parametrize("command", COMMANDS)
def test_one_worker_leads(command: str, tmp_path: Path) -> None:
    (app,) = (block for block in BLOCKS if block.title == "app.py")
    (tmp_path / app.title).write_text(app.text)
    port = free_port()
    by_port = command.startswith(("uvicorn", "granian"))
    bind = ["--port", str(port)] if by_port else ["--bind", f"127.0.0.1:{port}"]
    if command.startswith("gunicorn"):
        bind.append("--no-control-socket")  # it would be in the home folder, for all servers of this user
    fewer = re.sub(r"(--workers|-w) 4\b", r"\1 2", command)  # each takes a second of a processor to start
    with started([*shlex.split(fewer), *bind], port, tmp_path / "log", {}, cwd=tmp_path) as server:
        server.wait_until_it_answers("/leads")
        until = time.monotonic() + PATIENCE
        while not any(server.ask_many("/leads")):
            assert time.monotonic() < until, "nobody leads"
