"""The errors of tasks, at the path where other packages of this design have them."""

from grelmicro.errors import GrelmicroError, SettingsValidationError, TaskError

__all__ = ["GrelmicroError", "SettingsValidationError", "TaskError"]
