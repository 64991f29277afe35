"""The page of the sample `starlette_leader`, as a real browser shows it."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import httpx2
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from sample_apps.starlette_leader.app import leader
from sample_apps.workers import Workers
from tests.helpers.browser import chromium, complaints
from tests.helpers.matrix import further

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

shared = pytest.mark.xdist_group("leader_page")
"""Of what uses the same page: one process starts it for all."""

T = TypeVar("T")

WORKERS = 2

PATIENCE = 30.0
"""Seconds beside those that something takes; the machine may be busy."""

LEASE = leader.config.lease_duration

# Without kept connections a page and its stream come from any worker, so that one that is wanted can be had. And nobody
# replaces a frozen one.
OPTIONS = ("--timeout-keep-alive", "0", "--timeout-worker-healthcheck", "100")

RECORD = """
window.said = [];
new MutationObserver(() => said.push(document.getElementById("status").textContent)).observe(
  document.getElementById("status"), {childList: true, characterData: true, subtree: true});
"""
"""Notes all that the page says, also what nobody looks at in time."""


def until(look: Callable[[], T | None], seconds: float, what: str) -> T:
    """What `look` gives as soon as it is not None."""
    ends_at = monotonic() + seconds
    while (found := look()) is None:
        assert monotonic() < ends_at, f"not within {seconds:g} s: {what}"
        sleep(0.05)
    return found


class Page:
    """What the page says."""

    def __init__(self, chrome: Chrome, url: str) -> None:
        self.chrome = chrome
        self._url = url

    def open(self) -> "Page":
        """Load it, and wait until it shows something."""
        self.chrome.get(self._url)
        until(lambda: self.leader, PATIENCE, "a leader is shown")
        return self

    def text(self, selector: str) -> str:
        """The text of one element, as it is in the document."""
        return str(self.chrome.find_element(By.CSS_SELECTOR, selector).get_property("textContent"))

    def says(self, selector: str, end: str) -> bool | None:
        """Whether the text of an element ends so; None when it does not."""
        return self.text(selector).endswith(end) or None

    @property
    def leader(self) -> int | None:
        """The process that leads."""
        shown = self.text("#leader")
        return int(shown) if shown.isdigit() else None

    @property
    def term(self) -> int:
        """The fence of the newest term."""
        return int(self.text("#terms tr:first-child td"))

    @property
    def worker(self) -> int:
        """The process that the page comes from."""
        return int(self.text("#worker").split()[0])

    @property
    def status(self) -> str:
        """What it says in a sentence."""
        return self.text("#status")


@contextmanager
def shown(folder: Path) -> Iterator[Page]:
    """Workers, and a browser that shows their page."""
    with Workers("starlette_leader", WORKERS, "sqlite:///locks.db", {}, options=OPTIONS) as server:
        until(lambda: answers(server.url), PATIENCE, f"the server answers\n{server.log}")
        with chromium(folder / "profile") as chrome:
            yield Page(chrome, server.url).open()


def answers(url: str) -> bool | None:
    try:
        return httpx2.get(url, trust_env=False, verify=False).is_success or None
    except httpx2.TransportError:
        return None


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page whose workers all live."""
    with shown(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.mark.parametrize("whose", ["the leader's", *further("another worker's")])
def test_page_sees_the_leader_die_and_another_one_lead(whose: str, tmp_path: Path) -> None:
    with shown(tmp_path) as page:
        ends_at = monotonic() + PATIENCE
        while (page.worker == page.leader) != (whose == "the leader's"):
            assert monotonic() < ends_at, f"the page is never {whose}"
            page.open()
        dead, term = page.leader, page.term
        assert dead is not None
        until(lambda: page.status.startswith(f"Worker {dead} leads.") or None, PATIENCE, "it says so")
        assert complaints(page.chrome) == []
        page.chrome.execute_script(RECORD)

        os.kill(dead, signal.SIGKILL)
        until(lambda: page.leader not in (dead, None) or None, LEASE + PATIENCE, "another one leads")
        told = r"Worker (\d+) leads\. .* nobody published for (\d+\.\d) s\."
        successor, gap = until(lambda: re.fullmatch(told, page.status), PATIENCE, "the gap is told").groups()
        assert int(successor) == page.leader != dead
        assert page.term > term
        assert page.text("#hand-overs") == "1"
        said = page.chrome.execute_script("return said")
        # It calls a worker silent after 1.5 s; a gap that was hardly longer may have come between two looks.
        assert float(gap) < 2.5 or any(f"Worker {dead} is silent" in text for text in said), said
        assert until(lambda: page.worker != dead or None, PATIENCE, "the page comes from another worker")

        prices = page.text("#shares")
        until(lambda: page.text("#shares") != prices or None, PATIENCE, "prices come again")
        # The browser tells of a stream that broke off; nothing else may be wrong.
        assert {source for source, _ in complaints(page.chrome)} <= ({"network"} if whose == "the leader's" else set())


@shared
def test_button_buys(page: Page) -> None:
    for number in (1, 2):
        page.chrome.find_element(By.CSS_SELECTOR, "#shares button").click()
        until(
            partial(page.says, "#answer", f" bought BREW: the desk has {number}."), PATIENCE, f"it has bought {number}"
        )
    until(partial(page.says, "#shares td:nth-child(3)", "2"), PATIENCE, "the desk has 2")
    assert complaints(page.chrome) == []


@shared
def test_page_leaves_a_frozen_worker(page: Page) -> None:
    while page.worker == page.leader:
        page.open()
    frozen = page.worker
    os.kill(frozen, signal.SIGSTOP)
    try:
        until(lambda: page.worker != frozen or None, PATIENCE, "the page comes from another worker")
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert {source for source, _ in complaints(page.chrome)} <= {"network"}


@shared
def test_page_fits_narrow_windows_and_dark_rooms(page: Page) -> None:
    papers = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        papers.add(page.chrome.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2
    for width in (320, 1000):
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        assert page.chrome.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("ci", "outcome"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_missing_browser_is_seen(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(outcome, match="apt install chromium chromium-driver"), chromium(tmp_path):
        pass
