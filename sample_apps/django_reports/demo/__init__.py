"""Runs the project's commands and views in many processes, and shows what their leases prevent: `make demo-django`."""
