"""Where the leases of a sample application are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from secrets import token_hex

SERVERS = ("redis", "postgres")


@contextmanager
def located(store: str) -> Iterator[str]:
    """The URL of the leases; for `redis` and `postgres` that of a server which runs until the block ends.

    REDIS_URL and POSTGRES_URL name another one, whose leases of other applications are not touched.
    """
    if store not in SERVERS:
        yield store
        return
    # Only whoever asks for a server needs what starts one.
    launched = resolve_name("tests.servers.launch:launched")
    with launched(store) as url:
        yield f"{url}{'&' if '?' in url else '?'}namespace=sample-{token_hex(4)}"
