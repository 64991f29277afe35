"""Tests that share what takes long to start run in one process, under every pytest."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Show the groups to the scheduler, which looks for them at the end of a test's id.

    pytest-xdist 3.8 writes them into an attribute that pytest reads no more since version 9.2: without this, every
    process would start what one process should have for all.
    """
    for item in items:
        grouped = vars(item).get("_nodeid", item.nodeid)
        if grouped != item.nodeid:
            item._id = type(item.id).parse(grouped)
