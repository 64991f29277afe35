"""Django's command line for this project: `python sample_apps/django_reports/manage.py singleton -- send_invoices`."""

import os
import sys
from pathlib import Path

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sample_apps.django_reports.settings")
    execute_from_command_line(sys.argv)
