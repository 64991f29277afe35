"""Coordination that Python web services can trust: locks, task locks, leader election and scheduled singletons."""

__distribution__ = "grelmicro-suite"

from grelmicro.app import Grelmicro
from grelmicro.errors import DependencyNotFoundError, GrelmicroError, OutOfContextError, SettingsValidationError

__all__ = [
    "DependencyNotFoundError",
    "Grelmicro",
    "GrelmicroError",
    "OutOfContextError",
    "SettingsValidationError",
]
