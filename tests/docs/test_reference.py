"""Every public name is in the reference; errors have a page that lists them all."""

import re

import pytest

import grelmicro.coordination
import grelmicro.errors
import grelmicro.leases
import grelmicro.task
import grelmicro.testing
import grelmicro_starlette
from tests.docs.pages import PAGES

PUBLIC = {
    "docs/reference/coordination.md": grelmicro.coordination.__all__,
    "docs/reference/leases.md": grelmicro.leases.__all__,
    "docs/reference/starlette.md": grelmicro_starlette.__all__,
    "docs/reference/task.md": grelmicro.task.__all__,
    "docs/reference/testing.md": grelmicro.testing.__all__,
}


@pytest.mark.parametrize("page", PUBLIC)
def test_every_public_name_has_its_place(page: str) -> None:
    named = re.findall(r"^(?:::: [\w.]+\.|`)(\w+)", PAGES[page], re.MULTILINE)
    assert [name for name in PUBLIC[page] if name not in named and not hasattr(grelmicro.errors, name)] == []
