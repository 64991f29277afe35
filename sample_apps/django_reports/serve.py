"""Leave the project running: its web server, its daemon with a standby, and the commands that cron would start."""

from datetime import date

import typer

from sample_apps.django_reports.project import Project

INVOICES = 20


async def serve_reports(store: str, workers: int, port: int) -> int:
    """Serve the project until its web server ends; the exit code of that."""
    with Project(store, {}, quiet=False) as project:
        await project.migrate()
        project.add_invoices(INVOICES)
        server, url = await project.serve(workers, port)
        typer.echo(f"{url}/\n{project.command_line}")
        for _ in range(2):
            await project.manage("lead", "publish_rates")
            await project.manage("singleton", "--", "send_invoices")
            await project.manage("nightly_report", date.today().isoformat())
        return await server.wait()
