"""`readiness`: an endpoint for probes that ask whether this process should get requests."""

import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from grelmicro import Grelmicro
from grelmicro.config import Duration
from grelmicro.coordination import HealthCheck, HealthReport, LeaderElection
from grelmicro.task import Tasks
from grelmicro_starlette.refusals import Problem


def readiness(
    micro: Grelmicro,
    *,
    leaders: Iterable[LeaderElection] = (),
    tasks: Tasks | None = None,
    interval: Duration = 5.0,
    stale_after: Duration | None = None,
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """An endpoint that answers 200 when the stores answered lately, `leaders` take part and no task is late, else 503.

    The stores are looked at in the background while `micro` is open, so the endpoint answers at once, whatever they do.
    It says how old that is, and nothing of holders or of where the stores are. A worker that does not lead is ready.

    Args:
        micro: whose stores; call it before `micro` is opened.
        leaders: elections that this process has to take part in.
        tasks: those of which none may be overdue in this process; see `IntervalTask.overdue_for`.
        interval: seconds between two looks; one that takes longer has failed. After that the next comes within 1 s.
        stale_after: seconds after which the last look counts no more; None: three times `interval`, the least.

    Raises:
        SettingsValidationError: a setting breaks a rule.
        OutOfContextError: `micro` has no `Coordination`, or it is open.
    """
    check = HealthCheck(micro.coordination, leaders=leaders, tasks=tasks, interval=interval, stale_after=stale_after)
    micro.use(check)

    async def ready(request: Request) -> Response:
        report = await check.report()
        if report.good:
            return JSONResponse({"status": "ready", **asdict(report)})
        problem = Problem("not-ready", 503, "Not ready", _reasons(report), math.ceil(check.interval))
        return problem.response(**asdict(report))

    return ready


def _reasons(report: HealthReport) -> str:
    parts: dict[str, str] = {"store": report.store.status}
    parts |= {f"election '{name}'": election.status for name, election in report.elections.items()}
    parts |= {f"task '{name}'": f"overdue for {seconds:.0f} s" for name, seconds in report.overdue.items()}
    return ", ".join(f"{part}: {status}" for part, status in parts.items() if status != "good")
