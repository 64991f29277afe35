"""Import a client library, or say what to do: install it, or rename the file that hides it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from grelmicro.errors import DependencyNotFoundError


@contextmanager
def needed(store: str, library: str, package: str, extra: str) -> Iterator[None]:
    """A block that imports a client library.

    Args:
        store: what needs it, such as `Redis`.
        library: what it is called, such as `redis-py`.
        package: what is imported, such as `redis`.
        extra: the extra that installs it.

    Raises:
        DependencyNotFoundError: it is not installed, or a file of its name is found first.
    """
    if shadow := _shadow_of(package):
        raise DependencyNotFoundError(
            f"the {store} store needs {library}, and the file {shadow} is imported in its place: rename that file"
        )
    try:
        yield
    except ImportError as error:
        raise DependencyNotFoundError(
            f'the {store} store needs {library}: install it with pip install "grelmicro-suite[{extra}]"'
        ) from error


def _shadow_of(package: str) -> str:
    """The file that is found in place of a package, such as a program named `redis.py`; "" when there is none."""
    try:
        spec = find_spec(package)
    except ValueError:  # something without a specification was put in its place
        return ""
    return "" if spec is None or spec.submodule_search_locations is not None else spec.origin or ""
