"""Where the leases of a sample application are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from secrets import token_hex

SERVERS = {"redis": "namespace", "postgres": "namespace", "kubernetes": "prefix"}
"""What keeps the leases of applications apart on one server, by the kind of server."""


@contextmanager
def located(store: str) -> Iterator[str]:
    """The URL of the leases; for `redis`, `postgres` and `kubernetes` that of a server which runs until the block ends.

    REDIS_URL, POSTGRES_URL and KUBECONFIG name another one, whose leases of other applications are not touched.
    """
    if store not in SERVERS:
        yield store
        return
    # Only whoever asks for a server needs what starts one.
    launched = resolve_name("tests.servers.launch:launched")
    with launched(store) as url:
        yield f"{url}{'&' if '?' in url else '?'}{SERVERS[store]}=sample-{token_hex(4)}"
