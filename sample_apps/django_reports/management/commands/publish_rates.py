"""A daemon that must run once: `manage.py lead publish_rates` keeps standbys."""

import itertools
import math
import time
from typing import Any

from django.core.management.base import BaseCommand

from sample_apps.django_reports.models import Rate

EVERY_S = 0.2


class Command(BaseCommand):
    """Publish an exchange rate a few times a second."""

    help = "Publish exchange rates until it is stopped."

    def handle(self, *args: Any, **options: Any) -> None:
        for number in itertools.count():
            Rate.objects.create(value=1.1 + 0.01 * math.sin(number / 7))
            time.sleep(EVERY_S)
