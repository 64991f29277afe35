"""The Django application."""

from django.apps import AppConfig
from django.core.signals import setting_changed

from grelmicro_django.checks import register_checks
from grelmicro_django.serving import renew


class GrelmicroConfig(AppConfig):
    """Connects the package to a project. It opens nothing: the store is opened by its first use."""

    name = "grelmicro_django"
    verbose_name = "Coordination"

    def ready(self) -> None:
        """Follow changes of settings, and register the system checks."""
        setting_changed.connect(renew, dispatch_uid="grelmicro_django.serving")
        register_checks()
