"""`python -m sample_apps.fastapi_orders.demo`."""

from sample_apps.fastapi_orders.demo.cli import cli

cli()
