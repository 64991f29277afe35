"""The demonstration of the Django project: its claims hold, can fail, and it leaves nothing behind."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from sample_apps.django_reports.demo import leading, reporting, sending, signing
from tests.repo.source import ROOT

COMMAND = [sys.executable, "-m", "sample_apps.django_reports.demo", "--requests", "64", "--json"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_claim_holds_and_nothing_is_left() -> None:
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=280)
    document = json.loads(output)
    assert document["problem"] == ""
    assert [claim for claim in document["claims"] if not claim["held"]] == []
    assert len(document["claims"]) == 10
    assert process.returncode == 0
    published = {document["figures"][key][which] for key in ("leader_killed", "leader_stopped") for which in WHICH}
    assert len(published) == 3
    assert not [pid for pid in published if psutil.pid_exists(pid)]


WHICH = ("stopped", "successor")

SENT = sending.Sending(10, 12, 12, 0, 1, 9, {})


@pytest.mark.parametrize(
    "change",
    [{"letters": 13}, {"letters": 11}, {"sent_twice": 1}, {"ran": 2, "busy": 8}, {"busy": 8, "others": {1: 1}}],
)
def test_single_sending_is_not_claimed_of(change: dict[str, object]) -> None:
    assert sending.safety(SENT).held
    assert not sending.danger(SENT).held
    assert sending.danger(replace(SENT, sent_twice=1)).held
    assert not sending.safety(replace(SENT, **change)).held  # type: ignore[arg-type]


KILLED = reporting.Report("SIGKILL", 1, 2, 2.5, -signal.SIGKILL, 0.0, "none", 2)
STOPPED = reporting.Report("SIGSTOP", 1, 2, 2.5, 70, 0.5, "none", 2)


@pytest.mark.parametrize("change", [{"taken_over_after": 5.1}, {"new_fence": 1}, {"fence_kept": 1}])
def test_takeover_of_a_report_is_not_claimed_of(change: dict[str, object]) -> None:
    assert reporting.takeover(KILLED, 5.0).held
    assert not reporting.takeover(replace(KILLED, **change), 5.0).held  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"code": 0}, {"ended_after": 1.1}, {"late_write": "refused"}])
def test_stopping_is_not_claimed_of(change: dict[str, object]) -> None:
    assert reporting.stopping(STOPPED).held
    assert not reporting.stopping(replace(STOPPED, **change)).held  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"code": 0}, {"late_write": "written"}, {"fence_kept": 1}])
def test_refusal_is_not_claimed_of(change: dict[str, object]) -> None:
    refused = replace(STOPPED, late_write="refused")
    assert reporting.refusal(refused).held
    assert not reporting.overwriting(refused).held
    assert reporting.overwriting(replace(STOPPED, late_write="written", fence_kept=1)).held
    assert not reporting.refusal(replace(refused, **change)).held  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"after": 5.1}, {"overlaps": 1}, {"successor": 1}])
def test_succession_is_not_claimed_of(change: dict[str, object]) -> None:
    seen = leading.Succession("SIGKILL", 1, 2, 2.5, 5.0, 10, 0)
    assert leading.takeover(seen, "killed").held
    assert not leading.takeover(replace(seen, **change), "killed").held  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"signed": 63}, {"signatures": 63}])
def test_signatures_are_not_claimed_of(change: dict[str, object]) -> None:
    seen = signing.Signing(64, 64, 64, {})
    assert signing.safety(seen).held
    assert not signing.danger(seen).held
    assert signing.danger(replace(seen, signatures=63)).held
    assert not signing.safety(replace(seen, **change)).held  # type: ignore[arg-type]
