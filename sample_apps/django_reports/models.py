"""What the project stores."""

import os
from datetime import date

from django.db import models


def this_process() -> int:
    """The process that writes a row."""
    return os.getpid()


class Invoice(models.Model):
    """An invoice, which is to be sent once."""

    cents = models.IntegerField()
    sent = models.BooleanField(default=False)


class Letter(models.Model):
    """A letter that went out with an invoice."""

    invoice = models.ForeignKey(Invoice, models.CASCADE)
    worker = models.IntegerField(default=this_process)
    sent_at = models.DateTimeField(auto_now_add=True)


class Report(models.Model):
    """The report of a day. `fence` is the fencing token of the lease under which it was written."""

    day = models.DateField(unique=True)
    invoices = models.IntegerField(default=0)
    cents = models.IntegerField(default=0)
    worker = models.IntegerField(default=0)
    fence = models.BigIntegerField(default=0)
    signatures = models.IntegerField(default=0)

    class Meta:
        ordering = ["-day"]

    @property
    def euros(self) -> float:
        """The total of the day's invoices."""
        return self.cents / 100


class Run(models.Model):
    """A run of the nightly report, and what became of it: it was written, or its write was refused."""

    day = models.DateField()
    worker = models.IntegerField(default=this_process)
    fence = models.BigIntegerField()
    began_at = models.DateTimeField(auto_now_add=True)
    outcome = models.CharField(max_length=10, default="")


class Rate(models.Model):
    """An exchange rate that the daemon has published."""

    value = models.FloatField()
    worker = models.IntegerField(default=this_process)
    published_at = models.DateTimeField(auto_now_add=True)


def write_report(day: date, fence: int, *, fenced: bool) -> bool:
    """Write the report of a day; whether it was written.

    The database refuses the write of a process that has lost its lease, in the same statement: the process that
    acquired the lease after it has a higher fencing token.
    """
    report, _ = Report.objects.get_or_create(day=day)
    same_day = Report.objects.filter(pk=report.pk)
    if fenced:
        same_day = same_day.filter(fence__lte=fence)
    totals = Invoice.objects.aggregate(invoices=models.Count("pk"), cents=models.Sum("cents", default=0))
    return bool(same_day.update(**totals, fence=fence, worker=os.getpid()))
