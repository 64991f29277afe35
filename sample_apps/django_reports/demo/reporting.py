"""Scene 3: the process that makes the nightly report is killed, or frozen for longer than its lease."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass

from sample_apps.demo.claims import Claim
from sample_apps.django_reports.project import PATIENCE, Project, end_of, until

LEASE = 2.0
"""Seconds of the lease."""
START = 3.0
"""Seconds that the next process may take beyond the lease."""
SECONDS = 1.0
"""How long a report takes to make."""
LONG = 60.0
"""How long that of a process which is stopped would have taken."""
LOST = 70


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a report whose maker was stopped by a signal."""

    by: str
    """The signal."""
    old_fence: int
    new_fence: int
    taken_over_after: float
    """Seconds from the signal to the begin of the next process's run."""
    code: int
    """The exit code of the first process."""
    ended_after: float
    """Seconds from its thawing to its end; 0 after a kill."""
    late_write: str
    """`none`, `refused` or `written`."""
    fence_kept: int
    """The fence in the report at the end."""


async def report(
    project: Project, day: str, number: signal.Signals, *, seconds: float, lost: str = "stop", fenced: bool = True
) -> Report:
    """Let one process begin the report of a day and another one wait for it; stop the first with a signal."""
    singleton = ["singleton", "--name", f"report-{day}", "--lease", f"{LEASE:g}", "--on-lost", lost]
    command = ["--", "nightly_report", day, *([] if fenced else ["--no-fence"]), "--seconds"]
    first = await project.manage(*singleton, *command, f"{seconds:g}")
    runs = "SELECT id, fence, outcome FROM django_reports_run WHERE day = ? ORDER BY id"
    await until(lambda: project.rows(runs, day) or None, PATIENCE, "the report is begun")
    stopped_at = time.monotonic()
    os.kill(first.pid, number)
    second = await project.manage(*singleton, "--on-busy", "wait", *command, f"{SECONDS:g}")
    await until(lambda: True if len(project.rows(runs, day)) > 1 else None, PATIENCE, "another process takes over")
    taken_over_after = time.monotonic() - stopped_at
    await end_of(second, PATIENCE)
    thawed_at = time.monotonic()
    if number == signal.SIGSTOP:
        os.kill(first.pid, signal.SIGCONT)
    code = await end_of(first, PATIENCE)
    ended_after = 0.0 if number == signal.SIGKILL else time.monotonic() - thawed_at
    (_, old_fence, outcome), (_, new_fence, _) = project.rows(runs, day)
    ((fence_kept,),) = project.rows("SELECT fence FROM django_reports_report WHERE day = ?", day)
    return Report(number.name, old_fence, new_fence, taken_over_after, code, ended_after, outcome or "none", fence_kept)


async def reports(project: Project) -> tuple[Report, Report, Report, Report]:
    """A killed process, and frozen ones: stopped at the loss, and running on with and without the fence."""
    return await asyncio.gather(
        report(project, "2026-11-27", signal.SIGKILL, seconds=LONG),
        report(project, "2026-11-28", signal.SIGSTOP, seconds=LONG),
        report(project, "2026-11-29", signal.SIGSTOP, seconds=SECONDS, lost="finish"),
        report(project, "2026-11-30", signal.SIGSTOP, seconds=SECONDS, lost="finish", fenced=False),
    )


def takeover(seen: Report, allowed: float) -> Claim:
    """A process that waited takes over from one that was killed, once its lease has expired."""
    return Claim(
        f"when the process that makes a report is killed, another one takes over within {allowed:g} s",
        seen.taken_over_after <= allowed and seen.old_fence < seen.new_fence == seen.fence_kept,
        f"after {seen.taken_over_after:.1f} s",
        "run it again on a machine that is less busy",
    )


def stopping(seen: Report) -> Claim:
    """A frozen process ends soon after it is thawed, and writes nothing."""
    return Claim(
        "a process that was frozen past its lease ends within 1 s of its thawing with 70, and writes nothing",
        seen.code == LOST and seen.ended_after <= 1.0 and seen.late_write == "none",
        f"exit code {seen.code} after {seen.ended_after:.2f} s, late write {seen.late_write}",
        "run it again on a machine that is less busy, or look at the log of the processes",
    )


def refusal(seen: Report) -> Claim:
    """The fence refuses the late write of a frozen process that runs on."""
    kept = seen.old_fence < seen.new_fence == seen.fence_kept
    return Claim(
        "the fence refuses the late write of a process that runs on after its lease was lost",
        seen.late_write == "refused" and kept and seen.code == LOST,
        f"late write {seen.late_write}, exit code {seen.code}",
        "choose a --store that all processes share",
    )


def overwriting(seen: Report) -> Claim:
    """Without the fence the late write destroys the newer report."""
    return Claim(
        "without the fence the late write goes through",
        seen.late_write == "written" and seen.fence_kept == seen.old_fence < seen.new_fence,
        f"late write {seen.late_write}",
        "the frozen process did not write after the new one: run it again on a machine that is less busy",
    )
