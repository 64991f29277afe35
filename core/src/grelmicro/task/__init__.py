"""Tasks that run while an application does: every so many seconds, on each worker, on one, or on the leader."""

from grelmicro.alone import check_alone
from grelmicro.coordination.taskruns import FireOutcome, TaskRun
from grelmicro.errors import TaskError
from grelmicro.task.interval import IntervalTask
from grelmicro.task.router import TaskRouter
from grelmicro.task.task import Fire, Outcome, Task
from grelmicro.task.tasks import Tasks, TasksConfig

__all__ = [
    "Fire",
    "FireOutcome",
    "IntervalTask",
    "Outcome",
    "Task",
    "TaskError",
    "TaskRouter",
    "TaskRun",
    "Tasks",
    "TasksConfig",
]

check_alone()
