"""The page, and the signing of a report."""

import time

from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from grelmicro_django import locked
from sample_apps.django_reports.models import Invoice, Letter, Rate, Report, Run

READING_S = 0.005
"""Seconds that a signatory takes to read a report."""


def index(request: HttpRequest) -> HttpResponse:
    """The reports, and what the other processes of the project did last."""
    twice = Letter.objects.values("invoice").annotate(letters=Count("pk")).filter(letters__gt=1)
    shown = {
        "reports": Report.objects.all()[:10],
        "runs": Run.objects.order_by("-pk")[:10],
        "rate": Rate.objects.order_by("-pk").first(),
        "invoices": Invoice.objects.count(),
        "sent": Invoice.objects.filter(sent=True).count(),
        "twice": twice.count(),
    }
    return render(request, "django_reports/reports.html", shown)


@require_POST
@locked("report:{pk}", timeout=10)
def sign(request: HttpRequest, pk: int) -> HttpResponse:
    """Add a signature, one at a time for each report, on whichever worker."""
    return _sign(pk)


@require_POST
def sign_without_lock(request: HttpRequest, pk: int) -> HttpResponse:
    """The same without the lock, for the demonstration: signatures get lost."""
    return _sign(pk)


def _sign(pk: int) -> HttpResponse:
    report = get_object_or_404(Report, pk=pk)
    time.sleep(READING_S)
    report.signatures += 1
    report.save(update_fields=["signatures"])
    return redirect("index")
