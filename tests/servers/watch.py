"""A program that outlives the tests by a moment: it ends the servers and removes their folder, however tests ended."""

import fcntl
import os
import select
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from time import sleep

import psutil

STDIN = 0


def inhabitants(folder: Path) -> list[psutil.Process]:
    """The processes whose working folder lies in `folder`: servers, with what they started, and nothing else."""
    return [process for process in psutil.process_iter() if lives_in(process, folder)]


def lives_in(process: psutil.Process, folder: Path) -> bool:
    """Whether that is so. A zombie has no folder any more."""
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except psutil.Error:
        return False


def end(folder: Path) -> None:
    """Kill everything that lives in `folder`, also what is started meanwhile."""
    while left := inhabitants(folder):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        sleep(0.005)


def wait(parent: int) -> None:
    """Return when the parent closed the pipe or is gone; forked children of it may hold the pipe open."""
    while os.getppid() == parent:
        if select.select([STDIN], [], [], 0.5)[0] and not os.read(STDIN, 1024):
            return


def wait_unused(users: Path) -> None:
    """Return when no process has the lock of the file, and keep it: whoever uses the file next finds nothing there."""
    fcntl.flock(os.open(users, os.O_RDWR), fcntl.LOCK_EX)
    users.with_name(f"{users.name}.about").unlink(missing_ok=True)


def main(until: str, subject: str, folder: Path) -> None:
    """Wait, then clean up."""
    if until == "process":
        wait(int(subject))
    else:
        wait_unused(Path(subject))
    end(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
