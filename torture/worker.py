"""One worker process: some hands that take locks, and a candidate of an election.

    python -m torture.worker URL FOLDER WHO SEED
    python -m torture.worker --last URL FOLDER WHO SEED

It ends in order when its input does. The last worker takes every name once: what nobody holds must be free.
"""

import asyncio
import sys
import traceback
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

from grelmicro.coordination import Coordination, CoordinationBackendError
from torture.chief import Chief
from torture.hand import LEASES, NAMES, Hand
from torture.kit import Kit
from torture.log import Log
from torture.resource import Resource

HANDS = 3

NAMESPACE = "torture"

AGAIN = 0.2
"""Seconds after which a worker that found no store looks for it again."""

PATIENCE = LEASES[1] + 15.0
"""Seconds within which the last worker gets each name: what was left behind ends, and the store recovers."""


async def work(log: Log, url: str, folder: Path, seed: str) -> None:
    """Take locks and stand for the role until the end of the input."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin)
        stop.set()

    loop.add_reader(sys.stdin, end)
    async with AsyncExitStack() as stack:
        coordination = await opened(stack, log, url)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        kit = Kit(log, coordination, Resource(folder, log), Random(seed), group, stop)
        log.write("begin")
        for number in range(HANDS):
            group.create_task(Hand(kit, f"{log.who}.{number}").run())
        group.create_task(Chief(kit, f"{log.who}.c").run())


async def take_all(log: Log, url: str) -> None:
    """Take each name once."""
    async with AsyncExitStack() as stack:
        coordination = await opened(stack, log, url)
        log.write("begin")
        for name in NAMES:
            async with await coordination.lock(name).acquire(timeout=PATIENCE):
                log.write("free", name=name)


async def opened(stack: AsyncExitStack, log: Log, url: str) -> Coordination:
    """Open the store until `stack` ends; while it cannot be reached, again and again."""
    while True:
        try:
            return await stack.enter_async_context(Coordination.from_url(url, namespace=NAMESPACE))
        except CoordinationBackendError as error:
            log.write("refused", name="", error=type(error).__name__)
            await asyncio.sleep(AGAIN)


def main() -> int:
    """Run; the exit code is 0 only if all ended in order."""
    last = "--last" in sys.argv
    url, folder, who, seed = [argument for argument in sys.argv[1:] if argument != "--last"]
    log = Log(Path(folder) / "log", who)
    try:
        asyncio.run(take_all(log, url) if last else work(log, url, Path(folder), seed))
    except Exception as error:
        log.write("crash", error="".join(traceback.format_exception(error)))
        return 1
    log.write("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
