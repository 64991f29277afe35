"""A leader that forks; both processes write into a diary what they see.

python -m tests.helpers.forked_leader URL DIARY
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from grelmicro.coordination import Coordination, LeaderElection
from tests.helpers.programs import Diary


def yes(it_is: bool) -> str:
    return "yes" if it_is else "no"


async def child(leader: LeaderElection, worker: str, diary: Diary) -> None:
    """Stand with the election that was running before the fork."""
    own_name = yes(leader.worker != worker)
    diary.note(f"child: leads {yes(leader.is_leader())}, runs {yes(leader.is_running())}, own name {own_name}")
    service = asyncio.create_task(leader())
    await asyncio.sleep(1.0)
    diary.note(f"child: its own candidate leads {yes(leader.is_leader())}")
    os.kill(os.getppid(), 0)
    diary.path.with_suffix(".asked").touch()
    await asyncio.wait_for(leader.wait_for_leader(), 10)
    diary.note(f"child: its own candidate leads after the parent {yes(leader.is_leader())}")
    service.cancel()
    await asyncio.wait({service})


async def parent(leader: LeaderElection, diary: Diary) -> int:
    """Lead, fork, lead on, and step down when the child was seen to wait."""
    service = asyncio.create_task(leader())
    await asyncio.wait_for(leader.wait_for_leader(), 10)
    fence = leader.guard().fence
    forked = os.fork()
    if forked == 0:
        return 0
    asked = diary.path.with_suffix(".asked")
    while not asked.exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.0)
    diary.note(f"parent: leads {yes(leader.is_leader())}, same term {yes(leader.guard().fence == fence)}")
    service.cancel()
    await asyncio.wait({service})
    return forked


def main() -> None:
    url, diary = sys.argv[1], Diary(Path(sys.argv[2]))
    leader = LeaderElection(
        "job",
        backend=Coordination.from_url(url).election_backend,
        lease_duration=3.0,
        renew_deadline=2.0,
        retry_interval=0.3,
        backend_timeout=1.0,
    )
    worker = leader.worker
    main_pid = os.getpid()
    loop = asyncio.new_event_loop()
    forked = loop.run_until_complete(parent(leader, diary))
    if os.getpid() != main_pid:
        asyncio.run(child(leader, worker, diary))
        os._exit(0)
    until = time.monotonic() + 20
    while os.waitpid(forked, os.WNOHANG) == (0, 0):
        assert time.monotonic() < until
        time.sleep(0.01)


if __name__ == "__main__":
    main()
