"""Imports point down, and each package imports only what its place allows."""

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.repo.source import CORE, INTEGRATIONS, Import, Module, modules, parse

# Bottom to top: a module imports from its own row and from the rows below it. `package.*` is a package with all that
# is in it; a name without it is that one module. A new module needs a place here.
ROWS: tuple[tuple[str, ...], ...] = (
    ("grelmicro.alone",),
    (
        "grelmicro.errors",
        "grelmicro.background",
        "grelmicro.callables",
        "grelmicro.clock",
        "grelmicro.config",
        "grelmicro.context",
        "grelmicro.events",
        "grelmicro.fields",
        "grelmicro.guards",
        "grelmicro.keywords",
        "grelmicro.lifecycle",
        "grelmicro.names",
        "grelmicro.presence",
        "grelmicro.problems",
        "grelmicro.signals",
        "grelmicro.spelling",
        "grelmicro.straying",
        "grelmicro.texts",
        "grelmicro.urls",
    ),
    ("grelmicro.leases.*",),
    (
        "grelmicro.coordination.protocols",
        "grelmicro.coordination.records",
        "grelmicro.coordination.identity",
        "grelmicro.coordination.losses",
        "grelmicro.coordination.passing",
        "grelmicro.coordination.queues",
        "grelmicro.coordination.subscription",
        "grelmicro.coordination.turns",
        "grelmicro.coordination.wait",
        "grelmicro.coordination.renewal",
    ),
    ("grelmicro.coordination.adapters", "grelmicro.coordination.opening", "grelmicro.coordination.provider"),
    ("grelmicro.backends.*",),
    (
        "grelmicro.coordination.process",
        "grelmicro.coordination.holders",
        "grelmicro.coordination.breaking",
        "grelmicro.coordination.resolve",
        "grelmicro.coordination.threads",
        "grelmicro.coordination.loops",
        "grelmicro.coordination.interruption",
        "grelmicro.coordination.hold",
        "grelmicro.coordination.handle",
        "grelmicro.coordination.loophandle",
        "grelmicro.coordination.acquisition",
        "grelmicro.coordination.blocks",
        "grelmicro.coordination.primitive",
        "grelmicro.coordination.lock",
        "grelmicro.coordination.template",
        "grelmicro.coordination.synchronization",
        "grelmicro.coordination.multihandle",
        "grelmicro.coordination.taking",
        "grelmicro.coordination.multilock",
        "grelmicro.coordination.taskruns",
        "grelmicro.coordination.tasklock",
        "grelmicro.coordination.standing",
        "grelmicro.coordination.campaign",
        "grelmicro.coordination.leaderelection",
        "grelmicro.coordination.component",
        "grelmicro.coordination.health",
    ),
    ("grelmicro.coordination",),
    ("grelmicro.task.*",),
    (
        "grelmicro.coordination.errors",
        "grelmicro.coordination.kubernetes",
        "grelmicro.coordination.memory",
        "grelmicro.coordination.postgres",
        "grelmicro.coordination.redis",
        "grelmicro.coordination.sqlite",
        "grelmicro.providers.*",
    ),
    ("grelmicro.app",),
    ("grelmicro",),
    ("grelmicro.testing.*",),
)

# The libraries that talk to a store, and the one package that may import them.
CLIENTS = {"aiohttp", "aiosqlite", "asyncpg", "kubernetes_asyncio", "redis", "sqlite3"}
CLIENTS_LIVE_IN = "grelmicro.backends"

FRAMEWORKS = ("django", "fastapi", "starlette")

# What an integration may import of the core, and of another integration.
PUBLIC = {
    "grelmicro",
    "grelmicro.alone",
    "grelmicro.callables",
    "grelmicro.config",
    "grelmicro.coordination",
    "grelmicro.errors",
    "grelmicro.events",
    "grelmicro.fields",
    "grelmicro.guards",
    "grelmicro.names",
    "grelmicro.presence",
    "grelmicro.problems",
    "grelmicro.signals",
    "grelmicro.straying",
    "grelmicro.task",
    "grelmicro.testing",
    *(f"grelmicro_{framework}" for framework in FRAMEWORKS),
}
PUBLIC_BELOW = "grelmicro.providers."

core = modules(CORE)
integrations = {name: module for folder in INTEGRATIONS for name, module in modules(folder).items()}


def row_of(name: str) -> int | None:
    """The row of a module, counted from the bottom."""
    for number, row in enumerate(ROWS):
        for place in row:
            package = place.removesuffix(".*")
            if name == package or (package != place and name.startswith(f"{package}.")):
                return number
    return None


def is_ours(imported: Import) -> bool:
    return imported.module.partition(".")[0].startswith("grelmicro")


def own_imports(found: Mapping[str, Module]) -> Iterator[tuple[Module, Import]]:
    """Each import of the project by the project."""
    for module in found.values():
        for imported in module.imports:
            if is_ours(imported):
                yield module, imported


def upward(found: Mapping[str, Module]) -> list[str]:
    """The imports that point up."""
    wrong = []
    for module, imported in own_imports(found):
        target = imported.target(found)
        row, target_row = row_of(module.name), row_of(target)
        if row is not None and target_row is not None and target_row > row:
            wrong.append(f"{module.name}:{imported.line} imports {target}, which is above it")
    return wrong


def inside_functions(found: Mapping[str, Module]) -> list[str]:
    """The imports of the project that stand inside a function."""
    return [
        f"{module.name}:{imported.line} imports {imported.module} inside a function"
        for module, imported in own_imports(found)
        if imported.in_function
    ]


def cycle(found: Mapping[str, Module]) -> list[str]:
    """The modules of one import cycle, in order; imports that only type checkers see do not count."""
    graph: dict[str, set[str]] = {name: set() for name in found}
    for module, imported in own_imports(found):
        # `from package import name` inside that package's __init__ names a part of the package, not the package.
        if not imported.typing_only and imported.target(found) != module.name:
            graph[module.name].add(imported.target(found))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def misplaced_clients(found: Mapping[str, Module]) -> list[str]:
    """The imports of a store's client library outside the backends."""
    return [
        f"{module.name}:{imported.line} imports {imported.module}"
        for module in found.values()
        for imported in module.imports
        if imported.module.partition(".")[0] in CLIENTS and not f"{module.name}.".startswith(f"{CLIENTS_LIVE_IN}.")
    ]


def private_imports(found: Mapping[str, Module], known: Mapping[str, Module]) -> list[str]:
    """The imports by an integration of something that is not public elsewhere."""
    wrong = []
    for module, imported in own_imports(found):
        target = imported.target(known)
        if target.partition(".")[0] == module.name.partition(".")[0]:
            continue
        if imported.name.startswith("_") or not (target in PUBLIC or target.startswith(PUBLIC_BELOW)):
            wrong.append(f"{module.name}:{imported.line} imports {imported.name or 'all'} of {target}")
    return wrong


def named_frameworks(folder: Path) -> list[str]:
    """The lines of the sources below a folder that name a web framework."""
    return [
        f"{path.relative_to(folder)}:{number}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if any(framework in line.lower() for framework in FRAMEWORKS)
    ]


def test_sources_are_found() -> None:
    assert "grelmicro" in core
    assert {name for name in integrations if "." not in name} == {f"grelmicro_{name}" for name in FRAMEWORKS}


def test_every_module_of_the_core_has_a_row() -> None:
    assert [name for name in core if row_of(name) is None] == []


def test_imports_point_down() -> None:
    assert upward(core) == []


def test_no_function_imports_the_project() -> None:
    assert inside_functions({**core, **integrations}) == []


def test_no_import_cycle() -> None:
    assert cycle({**core, **integrations}) == []


def test_clients_are_imported_in_the_backends_alone() -> None:
    assert misplaced_clients({**core, **integrations}) == []


def test_the_core_names_no_web_framework() -> None:
    assert named_frameworks(CORE) == []


def test_integrations_import_public_names() -> None:
    assert private_imports(integrations, core) == []


def sources(**texts: str) -> dict[str, Module]:
    """Modules of the core by their names with `__` for a dot, read from their texts."""
    names = {name: f"grelmicro.{name.replace('__', '.')}" for name in texts}
    return {names[name]: parse(names[name], text) for name, text in texts.items()}


@pytest.mark.parametrize(
    "text",
    [
        "from grelmicro.app import Grelmicro",
        "from grelmicro import app",
        "import grelmicro.app",
        "from .. import app",
        "from ..app import Grelmicro",
        "if TYPE_CHECKING:\n    from grelmicro.app import Grelmicro",
    ],
)
def test_an_upward_import_is_seen(text: str) -> None:
    assert len(upward(sources(app="", leases__lease=text))) == 1


def test_a_package_is_not_all_that_is_in_it() -> None:
    found = sources(
        coordination="",
        coordination__records="",
        backends__memory="from grelmicro.coordination import records",
        backends__sqlite="from grelmicro.coordination import Lock",
    )
    assert upward(found) == ["grelmicro.backends.sqlite:1 imports grelmicro.coordination, which is above it"]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_import_inside_a_function_is_seen(kind: str) -> None:
    text = f"class A:\n    {kind} f(self):\n        if self:\n            from grelmicro import errors"
    assert len(inside_functions(sources(app=text))) == 1


def test_a_cycle_is_seen() -> None:
    found = sources(a="import grelmicro.b", b="from grelmicro import c", c="from grelmicro.a import x")
    assert set(cycle(found)) == set(found)


def test_a_cycle_for_type_checkers_alone_is_none() -> None:
    assert cycle(sources(a="import grelmicro.b", b="if TYPE_CHECKING:\n    from grelmicro.a import x")) == []


def test_a_misplaced_client_is_seen() -> None:
    text = "from redis.asyncio import Redis"
    assert misplaced_clients(sources(backends__redis=text)) == []
    assert len(misplaced_clients(sources(providers__redis=text))) == 1


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("from grelmicro import Grelmicro", 0),
        ("from grelmicro.providers.redis import RedisProvider", 0),
        ("from grelmicro_starlette import lifespan", 0),
        ("from grelmicro_fastapi.dependencies import LockDep", 0),
        ("from grelmicro.coordination import _Secret", 1),
        ("from grelmicro import context", 1),
        ("from grelmicro.coordination.lock import Lock", 1),
        ("from grelmicro_starlette.lifespan import lifespan", 1),
    ],
)
def test_a_private_import_is_seen(text: str, wrong: int) -> None:
    found = {"grelmicro_fastapi": parse("grelmicro_fastapi", text)}
    assert len(private_imports(found, sources(context=""))) == wrong


def test_a_named_framework_is_seen(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text('"""Works with FastAPI."""\n')
    assert named_frameworks(tmp_path) == ['app.py:1: """Works with FastAPI."""']
