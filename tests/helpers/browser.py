"""A real browser: Debian's Chromium without a window, led by Debian's driver for it."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

REMEDY = "no Chromium with its driver here; install them: apt install chromium chromium-driver"

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it does not start as root otherwise
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have little of it
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,1200",
)


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser that ends with the block.

    Args:
        profile: a folder of its own, where it keeps what it knows.
    """
    browser, driver = _installed()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # A proxy of the environment would be asked for the driver on this machine.
    with patch.dict(os.environ, {"no_proxy": "localhost,127.0.0.1"}):
        chrome = webdriver.Chrome(options=options, service=Service(driver))  # with a path, it downloads none
        try:
            yield chrome
        finally:
            chrome.quit()


def complaints(chrome: webdriver.Chrome) -> list[tuple[str, str]]:
    """What the browser's console said since it was asked last, beside plain news: the source and the text."""
    get_log: Callable[[str], list[dict[str, Any]]] = chrome.get_log
    entries = get_log("browser")
    return [(entry["source"], entry["message"]) for entry in entries if entry["level"] in ("WARNING", "SEVERE")]


def _installed() -> tuple[str, str]:
    """The browser and its driver; fails where every program is expected, otherwise skips."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    if os.environ.get("CI"):
        pytest.fail(REMEDY, pytrace=False)
    pytest.skip(REMEDY)
