"""For WSGI servers: `gunicorn --workers 4 sample_apps.django_reports.wsgi`."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sample_apps.django_reports.settings")

application = get_wsgi_application()
