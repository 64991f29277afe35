"""The first program of the FastAPI page, when several things are bought at once."""

import sqlite3
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.docs.examples import blocks
from tests.docs.pages import PAGES

ITEMS = 4
STOCK = 5


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    """The program in a folder of its own."""
    (program,) = (block.text for block in blocks(PAGES["docs/integrations/fastapi.md"]) if block.title == "app.py")
    (tmp_path / "fastapi_page_shop.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("fastapi_page_shop").app
    del sys.modules["fastapi_page_shop"]


def test_different_things_are_bought_at_once(shop: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect("shop.db")) as database, database:
        database.executemany("INSERT INTO item VALUES (?, ?)", [(number, STOCK) for number in range(2, ITEMS + 1)])
    urls = [f"/items/{number}/buy" for number in range(1, ITEMS + 1)] * STOCK
    with TestClient(shop, raise_server_exceptions=False) as client, ThreadPoolExecutor(ITEMS) as customers:
        answers = list(customers.map(client.post, urls))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json() for answer in answers) == sorted([*range(STOCK)] * ITEMS)
    with closing(sqlite3.connect("shop.db")) as database:
        assert database.execute("SELECT sum(stock) FROM item").fetchone() == (0,)
    assert [record.getMessage() for record in caplog.records if record.name == "grelmicro.fastapi"] == []
