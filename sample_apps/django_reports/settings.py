"""Settings of the project. Its data are in one SQLite file, its leases where `STORE` says."""

import os
from secrets import token_hex

# Sessions and forms must be valid on every worker: `make serve` and the demonstration give all of them one key.
SECRET_KEY = os.environ.get("SECRET_KEY") or token_hex()
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
INSTALLED_APPS = ["grelmicro_django", "sample_apps.django_reports"]
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
ROOT_URLCONF = "sample_apps.django_reports.urls"
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("REPORTS", "reports.db"),
        "OPTIONS": {"timeout": 20, "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL"},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"

GRELMICRO = {"STORE": os.environ.get("STORE", "database:default")}
