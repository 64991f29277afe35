"""Sends invoices. It knows nothing of locks: `manage.py singleton -- send_invoices` is what runs it once."""

import time
from typing import Any

from django.core.management.base import BaseCommand

from sample_apps.django_reports.models import Invoice, Letter

POSTING_S = 0.15
"""Seconds that it takes to send one."""


class Command(BaseCommand):
    """Send each invoice that was not sent."""

    help = "Send the invoices that were not sent."

    def handle(self, *args: Any, **options: Any) -> None:
        for invoice in Invoice.objects.filter(sent=False):
            time.sleep(POSTING_S)
            Letter.objects.create(invoice=invoice)
            invoice.sent = True
            invoice.save(update_fields=["sent"])
