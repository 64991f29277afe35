"""`python -m benchmarks`: measure everything in one run and print a table, or one JSON document.

Set PEER to an interpreter that has the PyPI package `grelmicro` to have its figures beside ours.
"""

import argparse
import os
import sys
from collections.abc import Iterator

from benchmarks import locking, requesting, startup, waiting
from benchmarks.crew import Peer
from benchmarks.places import Places, has_place, places
from benchmarks.plan import FULL, QUICK, STORES, Scale
from benchmarks.report import Machine, as_json, print_table
from benchmarks.rows import Row


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    # Not `choices=`: with `nargs="*"` argparse checks the default against them too.
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"which stores: {', '.join(STORES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works: figures are rough")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    if unknown := set(given.stores) - set(STORES):
        parser.error(f"unknown store {', '.join(sorted(unknown))}: the stores are {', '.join(STORES)}")
    return given


def measure(stores: list[str], scale: Scale, peer: Peer | None, found: Places) -> Iterator[Row]:
    """Every row, as it is measured."""
    say("an import and a construction")
    yield from startup.rows(scale, peer, found)
    say(f"waiters that have nothing to do, all stores together, {scale.idle_seconds:g} s")
    yield from waiting.idle_rows(stores, scale, peer, found)
    if "memory" in stores:
        say("requests to routes")
        yield from requesting.rows(scale)
    for store in stores:
        say(f"{store}: a crowd of waiters")
        yield from waiting.crowd_rows(store, scale.of(store), peer, found)
        say(f"{store}: acquire and release, hand-over, contention")
        yield from locking.rows(store, scale.of(store), peer, found)


def say(what: str) -> None:
    """Tell what is measured now."""
    print(f"measuring {what} ...", file=sys.stderr)


def main() -> None:
    """Measure and print; the exit code says nothing about speed."""
    given = arguments()
    stores = given.stores or [store for store in STORES if has_place(store)]
    for store in set(STORES) - set(stores) if not given.stores else ():
        say(f"nothing on {store}, for which there is no server here")
    interpreter = os.environ.get("PEER")
    peer = Peer.find(interpreter) if interpreter else None
    machine = Machine.look()
    with places(stores) as found:
        rows = list(measure(stores, QUICK if given.quick else FULL, peer, found))
    rows.sort(key=lambda row: ("", *STORES).index(row.store))
    if given.json:
        print(as_json(rows, peer, machine, quick=given.quick))
    else:
        print_table(rows, peer, machine)


if __name__ == "__main__":
    main()
