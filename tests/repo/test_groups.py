"""Tests of one group are known as such to what distributes them."""

import pytest


@pytest.mark.xdist_group("kubernetes")
def test_a_group_is_seen(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("only where several processes run the tests in groups")
    assert request.node.nodeid.endswith("::test_a_group_is_seen@kubernetes")
