"""Which values can stand in a name, and that equal ones have one name."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum, Flag, StrEnum
from fractions import Fraction
from io import BytesIO
from ipaddress import IPv4Address, IPv4Network
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, SecretBytes, SecretStr
from starlette.datastructures import QueryParams, UploadFile

from grelmicro.errors import SettingsValidationError
from grelmicro.names import NameTemplate

BERLIN = ZoneInfo("Europe/Berlin")


def name(value: object) -> str:
    return NameTemplate("x:{x}").name({"x": value})


def hours(count: float) -> timezone:
    return timezone(timedelta(hours=count))


class Shade(StrEnum):
    DARK = "dark"


class Pair(Enum):
    ONE = (1, 2)
    NOTHING = None
    TOKEN = SecretStr("t")
    PRICE = Decimal("1.50")


class Rights(Flag):
    READ = 1
    WRITE = 2


class Money:
    def __str__(self) -> str:
        return "5 EUR"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        (Shade.DARK, "dark"),
        (Rights.READ | Rights.WRITE, "3"),
        (Pair.NOTHING, "=none"),
        (Pair.PRICE, "1.5"),
        (42, "42"),
        (True, "True"),
        (1.5, "1.5"),
        (0.0, "0.0"),
        (1e300, "1e+300"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (Decimal("1.25"), "1.25"),
        (Decimal("1E-7"), "1E-7"),
        (Decimal("-Infinity"), "-Infinity"),
        (Decimal("NaN"), "NaN"),
        (Decimal("1E+1000000"), "1E+1000000"),
        (Fraction(1, 2), "1/2"),
        (UUID(int=1), str(UUID(int=1))),
        (date(2024, 2, 1), "2024-02-01"),
        (time(10, 30), "10:30:00"),
        (time(10, 30, tzinfo=BERLIN), "10:30:00"),
        (datetime(2024, 2, 1, 10, 30), "2024-02-01 10:30:00"),
        (datetime(2024, 2, 1, 10, 30, tzinfo=UTC), "2024-02-01 10:30:00+00:00"),
        (timedelta(hours=25), "1 day, 1:00:00"),
        (IPv4Address("10.0.0.1"), "10.0.0.1"),
        (IPv4Network("10.0.0.0/8"), "10.0.0.0/8"),
        (AnyUrl("http://Example.org"), "http://example.org/"),
        (PurePosixPath("/a//b/"), "/a/b"),
        (Money(), "5 EUR"),
    ],
)
def test_text(value: object, text: str) -> None:
    assert name(value) == f"x:{text}"


@pytest.mark.parametrize(
    "equal",
    [
        [Decimal(text) for text in ("1", "1.0", "1.000", "0.1E1", "100E-2")],
        [Decimal(text) for text in ("100", "1E2", "1.00E+2", "100.0")],
        [Decimal(text) for text in ("0", "-0", "0.00", "0E+5", "-0E-9")],
        [Decimal(text) for text in ("-2.50", "-2.5", "-25E-1")],
        [Decimal(text) for text in ("1E+1000000", "10E+999999", "1.0E+1000000")],
        [Decimal("1E+300"), Decimal(10**300)],
        [0.0, -0.0],
        [datetime(2024, 2, 1, 10, tzinfo=UTC), datetime(2024, 2, 1, 11, tzinfo=BERLIN)],
        [datetime(2024, 10, 27, 4, tzinfo=BERLIN), datetime(2024, 10, 27, 3, tzinfo=UTC)],
        [datetime(1, 1, 1, 0, tzinfo=hours(14)), datetime(1, 1, 1, 1, tzinfo=hours(15))],
        [datetime(9999, 12, 31, 23, tzinfo=hours(-3)), datetime(9999, 12, 31, 22, tzinfo=hours(-4))],
        [time(10, 30, tzinfo=hours(2)), time(8, 30, tzinfo=UTC), time(9, 30, tzinfo=hours(1))],
        [time(0, 30, tzinfo=hours(1)), time(1, 30, tzinfo=hours(2))],
    ],
    ids=repr,
)
def test_equal_values_have_one_name(equal: list[object]) -> None:
    assert all(value == equal[0] for value in equal)
    assert len({name(value) for value in equal}) == 1


@pytest.mark.parametrize(
    "others",
    [
        [Decimal("1"), Decimal("-1"), Decimal("1.0000000000000000000000000000000000001"), Decimal("1E+1")],
        [Decimal("1E+1000000"), Decimal("1E+1000001"), Decimal("-1E+1000000")],
        [datetime(2024, 2, 1, 10), datetime(2024, 2, 1, 10, tzinfo=UTC), datetime(2024, 2, 1, 10, tzinfo=BERLIN)],
        [datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1)],
        [datetime(1, 1, 1, 0, tzinfo=hours(14)), datetime(1, 1, 1, 0, tzinfo=hours(15))],
        [time(0, 30, tzinfo=hours(1)), time(23, 30, tzinfo=UTC), time(23, 30), time(0, 30)],
    ],
    ids=repr,
)
def test_different_values_have_different_names(others: list[object]) -> None:
    assert len({name(value) for value in others}) == len(others)


decimals = st.decimals(allow_nan=False) | st.builds(
    lambda digits, exponent: Decimal(digits).scaleb(exponent), st.integers(-10, 10), st.integers(-2, 2)
)


@given(first=decimals, second=decimals)
def test_decimals_have_one_name_if_they_are_equal(first: Decimal, second: Decimal) -> None:
    assert (name(first) == name(second)) == (first == second)
    with localcontext(prec=1):
        assert Decimal(name(first).removeprefix("x:")) == first


@given(zones=st.lists(st.integers(-1439, 1439), min_size=2, max_size=2), data=st.data())
def test_datetimes_and_times_have_one_name_if_they_are_equal(zones: list[int], data: st.DataObject) -> None:
    offsets = [timezone(timedelta(minutes=minutes)) for minutes in zones]
    moment = data.draw(st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29)))
    first, second = (moment.replace(tzinfo=UTC).astimezone(offset) for offset in offsets)
    assert name(first) == name(second)
    assert (name(first.timetz()) == name(second.timetz())) == (first.timetz() == second.timetz())


class Point(NamedTuple):
    x: int


@dataclass(frozen=True)
class Parcel:
    weight: int


class Order(BaseModel):
    item_id: int


class Told(list[int]):
    def __str__(self) -> str:
        return "told"


class Shown:
    def __repr__(self) -> str:
        return "shown"


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "value",
    [
        [1],
        (1,),
        Point(1),
        {"a": 1},
        OrderedDict(a=1),
        {1},
        frozenset(),
        deque([1]),
        range(3),
        Told(),
        Parcel(1),
        Order(item_id=1),
        object(),
        Shown(),
        numbers(),
        UploadFile(BytesIO()),
        QueryParams("a=1"),
        b"a",
        bytearray(b"a"),
        memoryview(b"a"),
        1j,
        str,
        len,
        Order(item_id=1).model_dump,
        Pair.ONE,
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_without_a_sure_text_is_no_name(value: Any) -> None:
    kind = type(value.value if isinstance(value, Enum) else value).__name__
    rule = rf"\{{x.y\}}, whose value is {kind} and no text or number: name a field of it, like \{{x.y.id\}}"
    for text in ("x:{x.y}", "x:{z}:{x.y}"):
        with pytest.raises(SettingsValidationError, match=rule):
            NameTemplate(text).name({"x": {"y": value}, "z": 1})


@pytest.mark.parametrize("value", [SecretStr("s3cret"), SecretBytes(b"s3cret"), Pair.TOKEN])
def test_secret_is_no_name(value: object) -> None:
    with pytest.raises(SettingsValidationError, match=r"\{x\}, whose value is Secret\w+, a secret") as refusal:
        name(value)
    assert "s3cret" not in str(refusal.value)


@pytest.mark.parametrize(
    "value", [10**5000, -(10**1_000_000), Fraction(10**5000, 3)], ids=["int", "negative", "fraction"]
)
def test_number_of_too_many_digits_is_no_name(value: object) -> None:
    with pytest.raises(SettingsValidationError, match=r"\{x\}, whose value is \w+ and has too many digits"):
        name(value)


@pytest.mark.parametrize(
    "text",
    ["1E+999999999999999999", "1E-999999999999999999", "1" * 2_000_000 + "0" * 2_000_000],
    ids=["high", "low", "long"],
)
def test_huge_decimal_is_not_written_out(text: str) -> None:
    assert len(name(Decimal(text))) < 255
