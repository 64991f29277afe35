"""A Django project: invoices that are sent once, a nightly report, a daemon with standbys, and a page of all."""
