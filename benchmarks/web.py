"""Contender: web applications that are called in this process as a server would call them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter

from starlette.applications import Starlette
from starlette.types import Message, Scope

from benchmarks.routes import PATH, applications, work
from benchmarks.serve import serve
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination

BATCH = 20
"""Requests to one application before the next one has its turn."""


class Caller:
    """Sends requests to one application.

    Args:
        app: which one; its lifespan has begun.
        state: what that yielded.
    """

    def __init__(self, app: Starlette, state: Mapping[str, object]) -> None:
        self._app = app
        self._state = state
        self._sent: list[Message] = []

    async def request(self) -> float:
        """Seconds until one was served."""
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"test"), (b"accept", b"*/*")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": dict(self._state),
        }
        self._sent.clear()
        start = perf_counter()
        await self._app(scope, self._receive, self._send)
        seconds = perf_counter() - start
        if self._sent[0]["status"] != 200:
            raise RuntimeError(f"answered with {self._sent}")
        return seconds

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        self._sent.append(message)


class Requests:
    """The commands of this contender."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = callers

    async def ready(self) -> None:
        """Nothing: the answer says that the process has started."""

    async def requests(self, count: int, seconds: float) -> dict[str, list[float]]:
        """How long about `count` requests to each application took, whose handlers work for some seconds.

        They take turns, so that all meet the same noise. The event loop goes round once after each request, as it
        does in a server.
        """
        work.seconds = seconds
        samples: dict[str, list[float]] = {name: [] for name in self._callers}
        while count > 0:
            count -= BATCH
            for name, caller in self._callers.items():
                for _ in range(BATCH):
                    samples[name].append(await caller.request())
                    await asyncio.sleep(0)
        return samples


@asynccontextmanager
async def opened() -> AsyncIterator[Requests]:
    """All applications, started."""
    async with AsyncExitStack() as stack:
        callers = {}
        for name, app in applications(Grelmicro(uses=[Coordination.from_url("memory://")])).items():
            state = await stack.enter_async_context(app.router.lifespan_context(app))
            callers[name] = Caller(app, {} if state is None else state)
        yield Requests(callers)


async def main() -> None:
    """Start the applications, and be measured."""
    async with opened() as requests:
        await serve(requests)


if __name__ == "__main__":
    asyncio.run(main())
