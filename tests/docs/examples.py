"""Reads the examples out of Markdown, and runs them as a reader would.

- A `python` block is a whole program. It runs in a process and a folder of its own.
- `<!-- continues -->` directly above a block: it goes on where the block before it ended, and both run as one program.
- `title="app.py"`: the block is a file, which the blocks after it on the page find in their folder. One that is called
  `test_*.py` is run by pytest.
- An `output` block directly below is what the program prints.
- A line of an `sh` block is a command, which is checked but not run.
- A program that names `REDIS_URL`, `POSTGRES_URL` or `KUBECONFIG` finds the way to a real server in that variable.
- A `yaml` block is a file of `docs/manifests`, as its title says.

Nothing switches a `python` block off.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.warmed import Answer, Request
from tests.repo.source import ROOT

LANGUAGES = {"python", "output", "sh", "ini", "sql", "text", "yaml"}
"""What a block may be. A new one needs a thought about how it is checked."""

CONTINUES = "<!-- continues -->"

LIMIT = 30
"""Seconds after which a program counts as hanging."""

SERVERS = {"REDIS_URL": "redis_url", "POSTGRES_URL": "postgres_url", "KUBECONFIG": "kubeconfig"}
"""The variables that name a server, and the fixtures that give their values."""

OURS = ("GREL_", "SQLITE_", "REDIS_", "POSTGRES_", "KUBE", "WEB_CONCURRENCY", "PYTEST_")
"""What the variables begin with that would set this package up, or its tests."""

_parser = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    line: int
    language: str
    title: str
    text: str
    continues: bool = False
    below_program: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One program of a page, with what it prints and the files that it finds."""

    page: str
    line: int
    title: str
    program: str
    output: str | None
    files: tuple[Block, ...]

    @property
    def servers(self) -> list[str]:
        """The variables of `SERVERS` that the program, or one of its files, names."""
        texts = (self.program, *(file.text for file in self.files))
        return [variable for variable in SERVERS if any(variable in text for text in texts)]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def tokens(text: str) -> list[Token]:
    """The tokens of a page."""
    return _parser.parse(text)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    before: Token | None = None
    for token in tokens(text):
        if token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            found.append(
                Block(
                    line=(token.map or [0])[0] + 1,
                    language=language,
                    title=title[1] if title else "",
                    text=token.content,
                    continues=before is not None and before.content.strip() == CONTINUES,
                    below_program=before is not None and before.type == "fence" and found[-1].language == "python",
                )
            )
        before = token
    return found


def hidden(text: str) -> list[str]:
    """The lines of a page with code that `blocks` does not see, as it is indented or in another construct."""
    seen = {block.line for block in blocks(text)}
    wrong = [f"{(token.map or [0])[0] + 1}: an indented block" for token in tokens(text) if token.type == "code_block"]
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*(`{3,}|~{3,})", line):
            inside = not inside
            if inside and number not in seen:
                wrong.append(f"{number}: {line.strip()}")
    return wrong


def examples(page: str, text: str) -> Iterator[Example]:
    """The programs of a page."""
    files: list[Block] = []
    program, printed = "", ""
    nothing = Block(0, "", "", "")
    for block, following in pairwise([*blocks(text), nothing]):
        if block.language == "python":
            own = following.text if following.language == "output" and following.below_program else None
            program, printed = (program, printed) if block.continues else ("", "")
            program, printed = f"{program}\n{block.text}", printed + (own or "")
            yield Example(page, block.line, block.title, program, None if own is None else printed, tuple(files))
        if block.title:
            files.append(block)


def environment(urls: Mapping[str, str]) -> dict[str, str]:
    """That of the tests, with nothing but `urls` to set this package up."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**others, **urls}


class Warmed:
    """A process that runs programs in forked children; see `warmed.py`."""

    def __init__(self) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.docs.warmed"],
            env={**environment({}), "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: Request) -> Answer:
        """Run a program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        return Answer(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def run(example: Example, folder: Path, warmed: Warmed, urls: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Run a program in a folder, with `urls` in its environment; what is wrong with it."""
    for file in example.files:
        (folder / file.title).write_text(file.text, encoding="utf-8")
    name = example.title or "example.py"
    (folder / name).write_text(example.program, encoding="utf-8")
    with TemporaryDirectory() as outside:  # a program may list its own folder
        output = Path(outside, "output")
        code = warmed.ask(Request(str(folder), name, environment(urls), str(output), LIMIT)).code
        printed = output.read_text(encoding="utf-8")
        complaints = output.with_name("output.err").read_text(encoding="utf-8")
    if code is None:
        return [f"{example} did not end within {LIMIT} s"]
    wrong = []
    if code != 0:
        wrong.append(f"{example} ended with {code}:\n{printed}{complaints}")
    elif re.search(r"Traceback|Warning:", complaints):
        wrong.append(f"{example} complained:\n{complaints}")
    if example.output is not None and printed != example.output:
        wrong.append(f"{example} printed:\n{printed}instead of:\n{example.output}{complaints}")
    return wrong


def rows(text: str, marker: str) -> dict[str, list[str]]:
    """The rows of the table below a `<!-- marker -->` comment, by their first cell."""
    found = tokens(text)
    start = next(
        (at for at, token in enumerate(found) if token.type == "html_block" and token.content.strip() == marker), None
    )
    if start is None:
        return {}
    cells: list[list[str]] = []
    for token in found[start:]:
        if token.type == "table_close":
            break
        if token.type == "tr_open":
            cells.append([])
        elif token.type == "inline":
            cells[-1].append(token.content)
    return {row[0]: row[1:] for row in cells[1:]}


def commands(found: Iterable[Block]) -> list[str]:
    """The lines of the `sh` blocks, without comments."""
    lines = [
        line.partition("  #")[0].strip()
        for block in found
        if block.language == "sh"
        for line in block.text.splitlines()
    ]
    return [line for line in lines if line]
