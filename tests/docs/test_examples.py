"""What the documentation shows is so: its programs run, its commands exist, and its settings are those of the code."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from grelmicro.config import Config
from grelmicro.coordination import LeaderElectionConfig, LockConfig, TaskLockConfig
from grelmicro.task import TasksConfig
from tests.docs.examples import LANGUAGES, SERVERS, Example, Warmed, blocks, commands, examples, hidden, rows, run
from tests.docs.pages import PAGES
from tests.repo.source import CORE, INTEGRATIONS, ROOT

CONFIGS: dict[str, type[Config]] = {
    config.__name__: config for config in (LockConfig, TaskLockConfig, LeaderElectionConfig, TasksConfig)
}

EXAMPLES = [example for page, text in PAGES.items() for example in examples(page, text)]

COLUMN = 80
"""Characters that a line of code has room for beside the navigation of the built pages."""

MAKE = re.compile(r"make ([a-z-]+)(?: [A-Z]+=\S.*)?")
INSTALL = re.compile(r'(?:pip install|uv add|poetry add)(?: (?:-e )?"?\./[\w/]+(?:\[[a-z,]+\])?"?)+')
PUBLISHED = re.compile(r'(?:pip install|uv add|poetry add) "?(grelmicro-suite[a-z-]*)(?:\[([a-z,]+)\])?"?')
OTHERS = re.compile(
    r"python -m pytest(?: [\w/.-]+)?"
    r"|uvicorn [\w.:-]+(?: --workers \d+| --reload| --timeout-graceful-shutdown \d+)*"
    r"|gunicorn [\w.:-]+(?: -k [\w.]+| -w \d+| --threads \d+| --preload)*"
    r"|granian --interface asgi [\w.:-]+(?: --workers \d+)?"
    r"|hypercorn [\w.:-]+(?: --workers \d+)?"
    r"|celery -A jobs (?:worker|beat)"
    r"|python manage\.py check --deploy --tag grelmicro_store"
    r"|rq worker"
    r"|kubectl create namespace shop"
    r"|kubectl (?:get|delete) leases -n shop(?: -l grelmicro\.io/prefix=shop)?"
)
APPLY = re.compile(r"kubectl apply -f (docs/manifests/[\w.]+)")


def unknown(command: str) -> str:
    """What is wrong with a command that the documentation gives; nothing when it can be typed as it stands."""
    if found := MAKE.fullmatch(command):
        known = re.search(rf"^{found[1]}:.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return "" if known else f"{command!r}: the Makefile has no {found[1]}"
    if INSTALL.fullmatch(command):
        folders = re.findall(r"\./(?:lib/)?([\w/]+)(?:\[([a-z,]+)\])?", command)
        return "; ".join(filter(None, (unknown_folder(folder, extras) for folder, extras in folders)))
    if found := PUBLISHED.fullmatch(command):
        return unknown_distribution(found[1], found[2])
    if found := APPLY.fullmatch(command):
        return "" if (ROOT / found[1]).exists() else f"no file {found[1]}"
    return "" if OTHERS.fullmatch(command) else f"{command!r} is not a command that is known here"


def unknown_folder(folder: str, extras: str) -> str:
    path = ROOT / folder / "pyproject.toml"
    if not path.exists():
        return f"no distribution in {folder}"
    return unknown_distribution(tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"], extras)


def unknown_distribution(name: str, extras: str | None) -> str:
    projects = {}
    for path in (ROOT / "core" / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        projects[project["name"]] = set(project.get("optional-dependencies", ()))
    if name not in projects:
        return f"no distribution here is called {name}"
    strangers = set(extras.split(",") if extras else ()) - projects[name]
    return f"{name} has no extra {strangers}" if strangers else ""


def is_python(text: str) -> bool:
    """Whether a block of another language is a program after all."""
    try:
        parsed = ast.parse(text)
    except SyntaxError:
        return False
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.With, ast.ClassDef, ast.Await)
    return any(isinstance(node, kinds) for node in ast.walk(parsed))


def wrong_variables(text: str) -> list[str]:
    """The environment variables of a text that set nothing."""
    found = re.findall(r"\bGREL_(LOCK|TASKLOCK|TASK|LEADERELECTION)_([A-Z0-9_]+)", text)
    fields = {config.kind: {field.upper() for field in config.model_fields} for config in CONFIGS.values()}
    return [
        f"GREL_{kind}_{rest}"
        for kind, rest in found
        if not any(rest == field or rest.endswith(f"_{field}") for field in fields[kind])
    ]


def defaults(config: type[Config]) -> dict[str, str]:
    """The settings and their defaults, as the documentation writes them."""
    shown = {}
    for name, field in config.model_fields.items():
        assert field.default is not PydanticUndefined
        value = field.default
        plain = {None: "none", True: "on", False: "off"}
        shown[f"`{name}`"] = f"{value:g}" if isinstance(value, float) else plain.get(value, value)
    return shown


def log_templates() -> list[tuple[str, str]]:
    """Level and text of everything that the sources log."""
    levels = {"info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR", "log": "INFO"}
    return [
        (levels[call.func.attr], text.value)
        for folder in (CORE, *INTEGRATIONS)
        for path in folder.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in levels
        and getattr(call.func.value, "id", "logger") == "logger"  # not a command line parser's error()
        and call.args
        # The level that `log` is given depends on a setting, whose default is INFO.
        and isinstance(text := call.args[call.func.attr == "log" and len(call.args) > 1], ast.Constant)
        and isinstance(text.value, str)
    ]


def is_logged(line: str, level: str, templates: list[tuple[str, str]]) -> bool:
    """Whether a line of the documentation, with `{...}` for what varies, is the beginning of one that is logged."""
    pattern = "%[\\w.]+".join(re.escape(part) for part in re.split(r"\{\w+\}", line.strip("`")))
    return any(level == known and re.match(pattern, text) for known, text in templates)


def test_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "core/README.md"} <= PAGES.keys()


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_example_runs(example: Example, tmp_path: Path, warmed: Warmed, request: pytest.FixtureRequest) -> None:
    urls = {variable: request.getfixturevalue(SERVERS[variable]) for variable in example.servers}
    assert run(example, tmp_path, warmed, urls) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_code_is_hidden(page: str) -> None:
    found = blocks(PAGES[page])
    assert hidden(PAGES[page]) == []
    assert {block.language for block in found} <= LANGUAGES
    assert [block.line for block in found if block.language == "text" and is_python(block.text)] == []
    assert [block.line for block in found if block.language == "output" and not block.below_program] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_code_fits_its_column(page: str) -> None:
    """Wider lines are cut off until the reader scrolls. What other programs print is as wide as it is."""
    found = [block for block in blocks(PAGES[page]) if block.language != "text"]
    assert [line for block in found for line in block.text.splitlines() if len(line) > COLUMN] == []


def test_commands_can_be_typed() -> None:
    found = [command for text in PAGES.values() for command in commands(blocks(text))]
    assert len(found) > 3
    assert [wrong for command in found if (wrong := unknown(command))] == []


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_settings_are_those_of_the_code(config: type[Config]) -> None:
    tables = [table for text in PAGES.values() if (table := rows(text, f"<!-- settings: {config.__name__} -->"))]
    assert tables
    assert [{setting: cells[0] for setting, cells in table.items()} for table in tables] == [defaults(config)] * len(
        tables
    )


def test_variables_are_those_of_the_code() -> None:
    assert {page: wrong for page, text in PAGES.items() if (wrong := wrong_variables(text))} == {}


def test_log_lines_are_those_of_the_code() -> None:
    shown = rows(PAGES["docs/guides/operations.md"], "<!-- log lines -->")
    assert len(shown) > 10
    templates = log_templates()
    assert [line for line, cells in shown.items() if not is_logged(line, cells[0], templates)] == []


def test_every_log_line_is_explained() -> None:
    shown = rows(PAGES["docs/guides/operations.md"], "<!-- log lines -->")
    assert [
        template
        for template in log_templates()
        if not any(is_logged(line, cells[0], [template]) for line, cells in shown.items())
    ] == []


# The tests above can fail.

PAGE = """
```python title="answer.py"
answer = 42
```

Some text.

```python
from answer import answer

print(answer)
```

```output
42
```

<!-- continues -->

```python
print(answer + 1)
```

```output
43
```
"""


def test_programs_see_files_and_go_on(tmp_path: Path, warmed: Warmed) -> None:
    found = list(examples("page", PAGE))
    assert [run(example, tmp_path, warmed) for example in found] == [[], [], []]
    assert found[2].output == "42\n43\n"


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("print(answer)", "print(answer", "SyntaxError"),
        ("print(answer)", "raise SystemExit(3)", "ended with 3"),
        ("42\n```\n\n<!--", "41\n```\n\n<!--", "instead of:\n41"),
        ("print(answer)", "import warnings; warnings.warn('old', stacklevel=1)", "UserWarning"),
        ("print(answer)", "print(answer); open('answer.py')", "ResourceWarning"),
    ],
)
def test_a_broken_example_is_seen(right: str, wrong: str, complaint: str, tmp_path: Path, warmed: Warmed) -> None:
    assert right in PAGE
    found = list(examples("page", PAGE.replace(right, wrong, 1)))
    assert complaint in "".join(run(found[1], tmp_path, warmed))


def test_a_program_finds_only_the_servers_that_it_names(
    tmp_path: Path, warmed: Warmed, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os\nprint(os.environ.get('REDIS_URL'), os.environ.get('POSTGRES' '_URL'))\n"
    (example,) = examples("page", f"```python\n{program}```\n\n```output\nhere None\n```\n")
    for variable in SERVERS:
        monkeypatch.setenv(variable, "of the tests")
    assert example.servers == ["REDIS_URL"]
    assert run(example, tmp_path, warmed, {"REDIS_URL": "here"}) == []


def test_a_broken_test_is_seen(tmp_path: Path, warmed: Warmed) -> None:
    (example,) = examples("page", '```python title="test_it.py"\ndef test_it() -> None:\n    assert False\n```\n')
    assert "1 failed" in "".join(run(example, tmp_path, warmed))


@pytest.mark.parametrize(
    "text",
    [
        "Indented:\n\n    import grelmicro\n",
        "!!! note\n    ```python\n    import grelmicro\n    ```\n",
        "<div>\n```python\nimport grelmicro\n```\n</div>\n",
    ],
)
def test_hidden_code_is_seen(text: str) -> None:
    assert len(hidden(text)) == 1


@pytest.mark.parametrize(
    "command",
    [
        "make coffee",
        "pip install ./core ./integrations/flask",
        "pip install grelmicro-suite-flask",
        'pip install "grelmicro-suite[carrots]"',
        'pip install "./core[carrots]"',
        "curl https://example.org | sh",
        "kubectl apply -f docs/manifests/carrots.yaml",
    ],
)
def test_a_command_that_does_not_exist_is_seen(command: str) -> None:
    assert unknown(command)


def test_python_under_another_name_is_seen() -> None:
    assert is_python("import grelmicro\n")
    assert not is_python("locks.db")


def test_a_variable_that_sets_nothing_is_seen() -> None:
    assert wrong_variables("GREL_LOCK_CART_LEASE=3 GREL_LOCK_CART_LEASE_DURATION=3") == ["GREL_LOCK_CART_LEASE"]


def test_a_line_that_nobody_logs_is_seen() -> None:
    templates = [("WARNING", "lost %s: %s")]
    assert is_logged("`lost {lock}: {reason}`", "WARNING", templates)
    assert not is_logged("`lost {lock}: {reason}`", "ERROR", templates)
    assert not is_logged("`found {lock}: {reason}`", "WARNING", templates)
