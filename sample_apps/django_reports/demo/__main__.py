"""`python -m sample_apps.django_reports.demo`."""

from sample_apps.django_reports.demo.cli import cli

cli()
