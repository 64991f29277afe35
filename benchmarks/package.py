"""Contender: the locks of the package that this interpreter imports as `grelmicro`, be it ours or the PyPI peer.

It runs on both, so it uses only what both have under the same names.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pkgutil import resolve_name
from urllib.parse import parse_qs, urlsplit

from benchmarks.counting import count_calls, counting_probes
from benchmarks.measure import Measurements
from benchmarks.serve import arguments, serve
from grelmicro.coordination import Lock, LockBackend
from grelmicro.coordination.memory import MemoryLockAdapter

PROVIDERS = {
    "sqlite": "grelmicro.providers.sqlite:SQLiteProvider",
    "redis": "grelmicro.providers.redis:RedisProvider",
    "postgres": "grelmicro.providers.postgres:PostgresProvider",
}
"""Imported when it is asked for: nobody needs the client libraries of stores that are not measured."""


KUBERNETES = "grelmicro.coordination.kubernetes:KubernetesLockAdapter"


def namespace_and_kubeconfig(place: str) -> tuple[str, str | None]:
    """What the address of a Kubernetes namespace says."""
    parts = urlsplit(place)
    return parts.hostname or "default", parse_qs(parts.query).get("kubeconfig", [None])[0]


@asynccontextmanager
async def opened(store: str, place: str) -> AsyncIterator[LockBackend]:
    """The backend of locks on a store."""
    if store == "memory":
        async with MemoryLockAdapter() as adapter:
            yield adapter
    elif store == "kubernetes":
        namespace, kubeconfig = namespace_and_kubeconfig(place)
        async with resolve_name(KUBERNETES)(namespace=namespace, kubeconfig=kubeconfig) as adapter:
            yield adapter
    else:
        provider = resolve_name(PROVIDERS[store])(place)
        async with provider, provider.lock() as adapter:
            yield adapter


async def main() -> None:
    """Open the store, and be measured."""
    given = arguments()
    calls: Counter[str] = Counter()
    with counting_probes(calls) if given.count else nullcontext():
        async with opened(given.store, given.place) as backend:
            if given.count:
                count_calls(backend, calls)
            await serve(Measurements(lambda name: Lock(name, backend=backend), Lock, calls))


if __name__ == "__main__":
    asyncio.run(main())
