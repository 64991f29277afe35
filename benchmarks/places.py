"""Where the leases of each contender are: files, and servers that are started when none is named."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.servers.launch import VARIABLES, is_here, launched


def has_place(store: str) -> bool:
    """Whether there is a server for it here, or one can be started; or it needs none."""
    return store not in VARIABLES or is_here(store)


class Places:
    """Files and servers.

    Args:
        folder: where files are.
        urls: the addresses of servers, by store.
    """

    def __init__(self, folder: Path, urls: dict[str, str]) -> None:
        self.folder = folder
        self._urls = urls

    def of(self, store: str, contender: str) -> str:
        """The file of a contender, or the server that all contenders share."""
        return self._urls.get(store) or str(self.folder / f"{contender}.db")


@contextmanager
def places(stores: Sequence[str]) -> Iterator[Places]:
    """Files in a temporary folder, and a server for each store that has one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="grelmicro-bench-")))
        urls = {store: stack.enter_context(launched(store)) for store in stores if store in VARIABLES}
        yield Places(folder, urls)
