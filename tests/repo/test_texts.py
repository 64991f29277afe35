"""No text of the repository sends a reader to another distribution, to one registry, or to one machine."""

import re
import subprocess

import pytest

from tests.repo.source import ROOT

# Written so that no pattern matches its own text. The PyPI distribution with the bare name is another project, which
# shares only the import name: whoever installs it by mistake gets an error at import.
FORBIDDEN = {
    "installs another project": (
        r"\b(?:pip3? install|uv add|poetry add|pdm add)(?:\s+-\S+)*\s+[\"'`]*grelmicro(?![-\w])"
        r"|grelmicro\["
        r"|[\"']grelmicro ?[=~<>!]="
    ),
    "names the host of a registry": r"pypi\.org/simple|files\.pythonhosted",
    "is a path of one machine": r"(?<![\w.-])/(?:[w]ork|[r]oot)/",
}


def findings(text: str) -> list[str]:
    """What is wrong with a text, line by line."""
    return [
        f"{number}: {line.strip()}   ({why})"
        for number, line in enumerate(text.splitlines(), 1)
        for why, pattern in FORBIDDEN.items()
        if re.search(pattern, line)
    ]


def texts() -> dict[str, str]:
    """The text files that are tracked or about to be, by path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    found = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        try:
            found[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a picture, or a file that was removed and is still listed
    return found


def test_texts() -> None:
    found = texts()
    assert "pyproject.toml" in found
    assert [f"{name}:{finding}" for name, text in found.items() for finding in findings(text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install " + "grelmicro",
        "python -m pip install -U " + "grelmicro",
        'pip install "' + "grelmicro" + '[redis]"',
        "uv add " + "grelmicro",
        "dependencies = ['" + "grelmicro" + ">=1']",
        "https://pypi" + ".org/simple",
        "https://files" + ".pythonhosted.org/x.whl",
        "see /" + "work/main/README.md",
        "/" + "root/.venv",
    ],
)
def test_a_forbidden_text_is_seen(line: str) -> None:
    assert len(findings(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        'pip install "grelmicro-suite[redis]"',
        "pip install grelmicro-suite-fastapi",
        "pip uninstall grelmicro",
        "import grelmicro",
    ],
)
def test_other_texts_are_left_alone(line: str) -> None:
    assert findings(line) == []
