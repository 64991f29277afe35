"""The page of the Kubernetes store tells the names and figures of the code."""

import re

import pytest

from grelmicro.backends.hints import LONGEST_PAUSE, TEST_INTERVAL
from grelmicro.backends.kubernetes import access, cluster, exchange, feed, observation, record, requests, store, table
from grelmicro.clock import DRIFT
from grelmicro.coordination.wait import SAFETY_POLL
from tests.docs.pages import PAGES

PAGE = PAGES["docs/stores/kubernetes.md"]
TEXT = " ".join(PAGE.split())

ANNOTATIONS = {
    value for name, value in vars(record).items() if name.isupper() and str(value).startswith("grelmicro.io/")
}


def test_every_annotation_and_label_is_explained() -> None:
    shown = {name for line in PAGE.splitlines() if line.startswith("| annotation") for name in named(line)}
    assert shown == ANNOTATIONS - {record.PREFIX}
    (labels,) = [line for line in PAGE.splitlines() if line.startswith("| labels")]
    assert set(record.labels("shop")) <= set(re.findall(r"`([\w./-]+)`", labels))
    assert record.selector("shop") in labels
    assert len(ANNOTATIONS) > 5


def named(line: str) -> list[str]:
    """The annotations in the first cell of a row."""
    return re.findall(r"`(grelmicro\.io/\w+)`", line.split("|")[1])


@pytest.mark.parametrize(
    ("said", "figures"),
    [
        (r"read again every (\d+) seconds; credentials", [access.FRESH]),
        (r"in a kubeconfig\) has (\d+) seconds", [access.LOADING]),
        (r"all its waits included; at most (\d+) \|", [cluster.LONGEST_REQUEST]),
        (r"less (\d+) %, and a watcher", [DRIFT * 100]),
        (r"the duration, (\d+) % more .*?, and (\d+) seconds", [DRIFT * 100, observation.SKEW]),
        (r"up to (\d+) leases, within a second", [table.FAREWELLS]),
        (r"ends a watch after (\d+) minutes", [requests.WATCHING / 60]),
        (
            r"tried again every (\d+) seconds while .*? in the last (\d+) seconds",
            [TEST_INTERVAL, feed.RECENT],
        ),
        (r"the right is tried again every (\d+) seconds at the latest", [LONGEST_PAUSE]),
        (r"not woken asks every (\d+) seconds", [SAFETY_POLL]),
        (
            r"up to (\d+) for requests, up to (\d+) for renewals",
            [exchange.PLACES["ordinary"], exchange.PLACES["urgent"]],
        ),
        (r"remembers up to ([\d,]+) of them", [observation.CAPACITY]),
    ],
)
def test_figures_are_those_of_the_code(said: str, figures: list[float]) -> None:
    found = re.search(said, TEXT)
    assert found is not None
    assert [float(figure.replace(",", "")) for figure in found.groups()] == pytest.approx(figures)


def test_a_second_is_a_second() -> None:
    assert store.TIDY_LIMIT == 1.0


def test_before_whom_others_went_is_told() -> None:
    assert observation.OVERTAKEN == 4
    assert "before which others went four times" in TEXT
