"""The whole demonstration, scene by scene."""

import signal
from dataclasses import asdict
from typing import Any

from sample_apps.demo.claims import Claim
from sample_apps.demo.screen import Screen
from sample_apps.django_reports.demo import leading, reporting, sending, signing
from sample_apps.django_reports.project import Project

SETTINGS = leading.SETTINGS
SINGLETON = ("singleton", "--on-busy", "fail", "--min-hold", "60", "--")
WORKERS = 4

Seen = sending.Sending | reporting.Report | leading.Succession | signing.Signing


class Demo:
    """One run of the demonstration.

    Args:
        project: where it happens.
        requests: how many people sign in scene 4.
        screen: where it is shown.
    """

    def __init__(self, project: Project, requests: int, screen: Screen) -> None:
        self._project = project
        self._requests = requests
        self._screen = screen
        self.claims: list[Claim] = []
        self.figures: dict[str, Any] = {}

    async def play(self) -> None:
        """All scenes."""
        with self._screen.busy("the tables are made"):
            await self._project.migrate()
        await self._send()
        await self._report()
        await self._sign()
        await self._lead()

    async def _send(self) -> None:
        with self._screen.busy("ten processes send invoices"):
            seen = await sending.send(self._project)
        claim = self._claim("without_singleton", sending.danger(seen), seen)
        self._screen.told(
            f"1  {seen.processes} hosts run `send_invoices` in the same second",
            f"{seen.letters} letters, {seen.invoices} invoices",
            f"{seen.sent_twice} SENT MORE THAN ONCE" if claim.held else "none was sent twice",
            good=claim.held,
        )
        with self._screen.busy("ten processes send invoices, as a singleton"):
            seen = await sending.send(self._project, *SINGLETON)
        claim = self._claim("singleton", sending.safety(seen), seen)
        self._screen.told(
            f"2  the same {seen.processes}, each `singleton -- send_invoices`",
            f"{seen.letters} letters, {seen.invoices} invoices",
            f"{seen.ran} ran, {seen.busy} exited with 75",
            good=claim.held,
        )

    async def _report(self) -> None:
        with self._screen.busy("processes that make reports are killed and frozen"):
            killed, stopped, finished, unfenced = await reporting.reports(self._project)
        allowed = reporting.LEASE + reporting.START
        claim = self._claim("killed", reporting.takeover(killed, allowed), killed)
        self._screen.told(
            "3  the process that makes a report gets SIGKILL",
            f"taken over after {killed.taken_over_after:.1f} s",
            f"lease {reporting.LEASE:g} s, allowed {allowed:g} s",
            good=claim.held,
        )
        claim = self._claim("frozen_stopped", reporting.stopping(stopped), stopped)
        self._screen.told(
            "     another one is frozen past its lease, and thawed",
            "no late write" if stopped.late_write == "none" else f"late write {stopped.late_write}",
            f"ended after {stopped.ended_after:.2f} s with exit code {stopped.code}",
            good=claim.held,
        )
        claim = self._claim("frozen_fenced", reporting.refusal(finished), finished)
        self._screen.told(
            "     the same with `--on-lost finish`",
            f"late write: fence {_short(finished.old_fence)} < {_short(finished.new_fence)}",
            f"{finished.late_write.upper()}, exit code {finished.code}",
            good=claim.held,
        )
        claim = self._claim("frozen_unfenced", reporting.overwriting(unfenced), unfenced)
        self._screen.told(
            "     the same without the fence in its UPDATE",
            f"late write {unfenced.late_write}",
            "OVERWROTE the newer report" if claim.held else "did not overwrite",
            good=claim.held,
        )

    async def _lead(self) -> None:
        with self._screen.busy("a daemon is killed, and its standby stopped"):
            first = await self._project.manage("lead", "publish_rates")
            await leading.published(self._project)
            second = await self._project.manage("lead", "publish_rates")
            allowed = leading.LEASE + leading.START
            killed = await leading.succeed(self._project, signal.SIGKILL, allowed, first)
            await self._project.manage("lead", "publish_rates")
            stopped = await leading.succeed(self._project, signal.SIGTERM, leading.START, second)
        self._tell_succession("5  the leader of `lead publish_rates`", killed, "killed")
        self._tell_succession("     the next one", stopped, "stopped")

    def _tell_succession(self, title: str, seen: leading.Succession, how: str) -> None:
        claim = self._claim(f"leader_{how}", leading.takeover(seen, how), seen)
        self._screen.told(
            f"{title} gets {seen.by}",
            f"its standby's runs after {seen.after:.2f} s",
            f"{seen.rates} rates, two at once: {seen.overlaps or 'never'}",
            good=claim.held,
        )

    async def _sign(self) -> None:
        with self._screen.busy("people sign a report"):
            _, url = await self._project.serve(WORKERS)
            unsafe = await signing.sign(url, self._project, "/unsafe/reports/{pk}/sign", self._requests)
            safe = await signing.sign(url, self._project, "/reports/{pk}/sign", self._requests)
        claim = self._claim("without_lock", signing.danger(unsafe), unsafe)
        self._screen.told(
            f"4  {unsafe.requests} people sign a report, on {WORKERS} processes",
            f"{unsafe.signatures} of {unsafe.signed} signatures",
            f"{unsafe.signed - unsafe.signatures} LOST" if claim.held else "none was lost",
            good=claim.held,
        )
        claim = self._claim("with_lock", signing.safety(safe), safe)
        self._screen.told(
            '     the same under @locked("report:{pk}")',
            f"{safe.signatures} of {safe.signed} signatures",
            f"{sum(safe.others.values())} errors",
            good=claim.held,
        )

    def _claim(self, key: str, claim: Claim, seen: Seen) -> Claim:
        self.claims.append(claim)
        self.figures[key] = asdict(seen)
        return claim


def _short(fence: int) -> str:
    """The last digits of a fence: where it begins depends on the store."""
    digits = str(fence)
    return digits if len(digits) <= 6 else f"..{digits[-4:]}"
