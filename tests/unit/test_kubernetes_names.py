"""The names of Lease objects: legal, readable where that can be, and one for each name."""

import re
import sys
import unicodedata
from random import Random

import pytest

from grelmicro.backends.kubernetes.names import hints_name, lease_name, prefix_label
from tests.helpers.matrix import further

LEGAL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""The rule of Kubernetes for names of objects: an RFC 1123 subdomain."""

LEGAL_LABEL = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")

HASHED = re.compile(r"(.*\.)?h-[a-z2-7]{20}")


def is_legal(name: str) -> bool:
    return len(name) <= 253 and LEGAL.fullmatch(name) is not None


def random_names(count: int) -> set[str]:
    """Names as applications may give them, many of them alike."""
    random = Random(4)
    alphabets = [
        "abc-.:",
        "aA1_-.:/ ",
        "".join(map(chr, range(32, 127))),
        "".join(chr(point) for point in range(0xA0, 0x3000) if unicodedata.category(chr(point)) not in ("Cc", "Cs")),
        "".join(chr(random.randrange(0xE000, sys.maxunicode + 1)) for _ in range(2000)),
    ]
    names: set[str] = set()
    while len(names) < count:
        alphabet = random.choice(alphabets)
        kind = random.choice(("lock:", "tasklock:", "leader:", "schedule:", ""))
        length = random.choice((random.randint(1, 6), random.randint(1, 250)))
        names.add(kind + "".join(random.choice(alphabet) for _ in range(length)))
    return names


@pytest.mark.parametrize("number", [10_000, *further(100_000)])
def test_as_many_random_names_have_as_many_legal_names(number: int) -> None:
    names = random_names(number)
    leases = {lease_name("grelmicro", name) for name in names}
    assert len(leases) == number
    assert all(is_legal(lease) for lease in leases)
    assert number / 100 < sum(HASHED.fullmatch(lease) is None for lease in leases) < number * 0.99  # of both kinds


@pytest.mark.parametrize(
    ("name", "lease"),
    [
        ("lock:cart", "grelmicro.lock.cart"),
        ("lock:order-42.eu", "grelmicro.lock.order-42.eu"),
        ("leader:main", "grelmicro.leader.main"),
        ("tasklock:a", "grelmicro.tasklock.a"),
    ],
)
def test_a_name_of_small_letters_stays_readable(name: str, lease: str) -> None:
    assert lease_name("grelmicro", name) == lease


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("lock:Order:42", "grelmicro.lock.order-42.h-"),
        ("lock:order_42", "grelmicro.lock.order-42.h-"),
        ("lock:Größe", "grelmicro.lock.gr-e.h-"),
        ("lock:-", "grelmicro.lock.h-"),
        ("🔒", "grelmicro.h-"),
        ("lock:" + "x" * 250, "grelmicro.lock." + "x" * 215 + ".h-"),
        ("cart", "grelmicro.cart.h-"),
    ],
)
def test_any_other_name_is_readable_in_part(name: str, begin: str) -> None:
    lease = lease_name("grelmicro", name)
    assert is_legal(lease)
    assert lease.startswith(begin)
    assert HASHED.fullmatch(lease)


def test_a_name_that_looks_like_a_hashed_one_is_hashed_too() -> None:
    hashed = lease_name("grelmicro", "lock:Cart")
    forged = "lock:" + hashed.removeprefix("grelmicro.lock.")
    assert lease_name("grelmicro", forged) != hashed
    assert HASHED.fullmatch(lease_name("grelmicro", forged))


def test_the_longest_readable_name_has_253_characters() -> None:
    longest = "lock:" + "x" * (253 - len("grelmicro.lock."))
    assert len(lease_name("grelmicro", longest)) == 253
    assert not HASHED.fullmatch(lease_name("grelmicro", longest))
    assert HASHED.fullmatch(lease_name("grelmicro", longest + "x"))


PREFIXES = ["shop", "Shop", "shop.lock", "lock", "shop-", "-shop", "_shop", "SHOP", "shop_1", "shop-1", ".", "a" * 63]
PREFIXES += ["h-" + "a" * 20, "shop.h-" + "a" * 20, "shop.hints", "hints"]


def test_prefixes_and_names_together_are_never_taken_for_each_other() -> None:
    names = ["lock:cart", "lock.cart", "lock:lock:cart", "cart", "hints", "lock:hints", ":", "shop:lock", "x:lock:cart"]
    leases = [lease_name(prefix, name) for prefix in PREFIXES for name in names]
    leases += [hints_name(prefix) for prefix in PREFIXES]
    assert all(is_legal(lease) for lease in leases)
    assert len(set(leases)) == len(leases)


def test_labels_of_prefixes_are_legal_and_never_taken_for_each_other() -> None:
    values = [prefix_label(prefix) for prefix in PREFIXES]
    assert all(len(value) <= 63 and LEGAL_LABEL.fullmatch(value) for value in values)
    assert len(set(values)) == len(values)
    assert prefix_label("Shop_1.eu") == "Shop_1.eu"


def test_the_length_of_a_prefix_cannot_be_moved_into_the_name() -> None:
    assert lease_name("A", "Block:x") != lease_name("AB", "lock:x")
