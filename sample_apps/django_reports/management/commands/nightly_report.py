"""The nightly report: one process makes it, and the database refuses the write of one that lost its lease."""

import argparse
import time
from datetime import date
from typing import Any

from django.core.management.base import CommandError

from grelmicro_django import SingletonCommand
from sample_apps.django_reports.models import Run, write_report


class Command(SingletonCommand):
    """Make the report of a day, under a lease that is renewed meanwhile."""

    help = "Make the report of a day."
    singleton_name = "nightly-report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("day", type=date.fromisoformat, help="such as 2026-11-30")
        parser.add_argument("--seconds", type=float, default=1.0, help="how long it takes")
        parser.add_argument("--no-fence", action="store_true", help="write whatever was written meanwhile")

    def handle(self, *args: Any, day: date, seconds: float, no_fence: bool, **options: Any) -> None:
        run = Run.objects.create(day=day, fence=self.lease.fencing_token)
        time.sleep(seconds)
        written = write_report(day, self.lease.fencing_token, fenced=not no_fence)
        run.outcome = "written" if written else "refused"
        run.save(update_fields=["outcome"])
        if not written:
            raise CommandError(f"the report of {day} was written under a newer lease")
