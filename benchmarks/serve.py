"""The measured side: carry out the commands that come on standard input."""

import argparse
import asyncio
import json
import sys
import traceback

LIMIT = 120.0
"""Seconds after which a command has failed."""


def arguments() -> argparse.Namespace:
    """The command line of a contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--place", required=True, help="a file, or the address of a server")
    parser.add_argument("--count", action="store_true")
    return parser.parse_args()


async def serve(measurements: object) -> None:
    """Read a JSON line, call the method that it names, print a JSON line, until the input ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await _answer(measurements, json.loads(line))), flush=True)


async def _answer(measurements: object, command: dict[str, object]) -> dict[str, object]:
    do = str(command.pop("do"))
    try:
        async with asyncio.timeout(LIMIT):
            return {"answer": await getattr(measurements, do)(**command)}
    except Exception:
        return {"error": traceback.format_exc()}
