"""Where programs in processes of their own meet: a store, and the diary that they write together."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.helpers.matrix import further
from tests.helpers.programs import Diary, Line, Program, program


class Site:
    """A store and a diary, and the workers of an election that use them."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.url = url or f"sqlite:///{folder / 'leases.db'}"
        self.diary = Diary(folder / "diary")

    @contextmanager
    def worker(self, *numbers: float) -> Iterator[Program]:
        """A plain program that takes part in the election."""
        with program("tests.helpers.leader_program", self.url, self.diary.path, *numbers) as started:
            self.diary.wait(lambda lines: any(line.pid == started.pid for line in lines), "stands")
            yield started

    def server(self, module: str, *args: object, **env: str) -> AbstractContextManager[Program]:
        """A web server whose workers take part."""
        return program(module, *args, env={"URL": self.url, "DIARY": str(self.diary.path), **env})

    def led(self) -> list[Line]:
        """Who began to lead, and when."""
        return [line for line in self.diary.lines() if line.what.startswith("leads")]

    def wait_led(self, condition: Callable[[list[Line]], object], patience: float = 30.0) -> list[Line]:
        """Wait until those who began to lead fulfil the condition."""
        self.diary.wait(lambda _: condition(self.led()), patience=patience)
        return self.led()

    def leader(self) -> Line | None:
        """Who leads now, and since when."""
        leading: Line | None = None
        for line in self.diary.lines():
            if line.what.startswith("leads"):
                leading = line
            elif line.what == "stops" and leading is not None and line.pid == leading.pid:
                leading = None
        return leading

    def fences(self) -> list[int]:
        """The fences of all terms, in the order in which those began."""
        return [int(line.what.split()[1]) for line in self.led()]

    def most_at_once(self) -> int:
        """How many led at the same time at most."""
        running, most = 0, 0
        for line in self.diary.lines():
            running += {"leads": 1, "stops": -1}.get(line.what.split()[0], 0)
            most = max(most, running)
        return most


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A SQLite file."""
    return Site(tmp_path)


@pytest.fixture(params=["sqlite", "redis", *further("postgres", "kubernetes")])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of store that processes can share: `make test` takes a file and one server."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'leases.db'}"
    if request.param == "kubernetes":
        return str(request.getfixturevalue("kubernetes_namespace").url)
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def any_site(any_url: str, tmp_path: Path) -> Site:
    """The same with a diary."""
    return Site(tmp_path, any_url)
