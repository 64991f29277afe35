"""The torture run, in its short form on each store; and that it sees it when what is tormented is broken."""

import asyncio
import os
from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers.matrix import further
from tests.servers import found
from torture.check import Violation, check
from torture.claims import History, history
from torture.log import read
from torture.report import figures
from torture.run import Plan, run

SECONDS, PROCESSES = 8.0, 4

BROKEN_SECONDS = (5.0, 15.0)
"""What is broken shows in the first run nearly always; if it does not, chance has more time in another one."""

SEED = 24
"""With which workers are killed and paused also in a short run."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def torment(store: str, folder: Path, seconds: float) -> tuple[History, list[Violation]]:
    """Run, and judge."""
    plan = Plan(store, seconds, PROCESSES, SEED, folder)
    asyncio.run(run(plan, lambda _seconds, _log: None))
    seen = history(read(plan.log))
    return seen, check(seen)


@pytest.mark.parametrize("store", ["sqlite", "redis", "redis-forgetful", "postgres", "kubernetes"])
def test_all_holds_under_torture(store: str, tmp_path: Path) -> None:
    if store.startswith("redis") and not found.redis_binaries():
        found.missing("redis")
    if store == "postgres" and not found.postgres_binaries():
        found.missing("postgres")
    if store == "kubernetes" and not found.kubernetes_binaries():
        found.missing("kubernetes")
    seen, violations = torment(store, tmp_path, SECONDS)
    assert violations == [], f"the workers said: {(tmp_path / 'said').read_text()[-2000:]}"
    counted = figures(seen)
    for what in ("grants", "hand-overs to another process", "workers paused", "workers killed", "writes accepted"):
        assert counted[what], f"no {what}: nothing is proved by that"


BROKEN = {
    "a deadline that comes too late": (
        """
        import sys
        import grelmicro.coordination

        for module in list(sys.modules.values()):
            if module.__name__.startswith("grelmicro") and hasattr(module, "DRIFT"):
                module.DRIFT = -0.5
        """,
        {"two holders", "store"},
    ),
    "a release that does not look at the holder": (
        """
        import grelmicro.backends.sqlite.table as table

        table.owns = lambda record, lease, now: bool(record.holder)
        """,
        {"two holders", "store", "write"},
    ),
    "a resource that does not look at the fence": (
        """
        from torture.resource import Resource

        Resource.accepts = lambda self, fence, highest: True
        """,
        {"write"},
    ),
}
"""What is put into every worker before it starts, and which rules may see that. One of them has to."""


ALWAYS = "a resource that does not look at the fence"


@pytest.mark.parametrize("what", [ALWAYS, *further(*BROKEN.keys() - {ALWAYS})])
def test_what_is_broken_is_seen(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs a module of this name when it starts."""
    code, rules = BROKEN[what]
    (tmp_path / "sitecustomize.py").write_text(dedent(code))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def seen(seconds: float) -> set[str]:
        folder = tmp_path / f"{seconds:g}"
        folder.mkdir()
        return {violation.rule for violation in torment("sqlite", folder, seconds)[1]}

    assert any(seen(seconds) & rules for seconds in BROKEN_SECONDS)
