"""The text of a value, where it has one that equal values have, too, and no others."""

from collections.abc import Callable, Collection
from datetime import UTC, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import Enum

from pydantic import BaseModel

LONGEST_NUMBER = 255
"""Digits that a decimal number of high exponent can have to be written out."""

EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOTHING, DAY = timedelta(), timedelta(days=1)


class NoTextError(ValueError):
    """A value has no text that could be relied on; tells what it is, and never itself."""


def text_of(value: object) -> str | None:
    """The text of a scalar; that of an enum is its value's. None has none.

    It is what an f-string gives, but for equal values that have several texts there: `Decimal("1.0")` is `1`, `-0.0`
    is `0.0`, and a datetime with an offset is in UTC.

    Raises:
        NoTextError: it is a secret, has several values in it, or its type does not say what its text is.
    """
    while isinstance(value, Enum):
        value = value.value
    if value is None or type(value) is str:
        return value
    if hasattr(type(value), "get_secret_value"):
        raise NoTextError(f"{type(value).__name__}, a secret: names are stored and logged")
    for kind, write in WRITERS:
        if isinstance(value, kind):
            return write(value)
    _check(value)
    return _plain(value)


def _plain(value: object) -> str:
    try:
        return str(value)
    except ValueError:
        raise NoTextError(f"{type(value).__name__} and has too many digits, or no text") from None


def _check(value: object) -> None:
    """Refuse what has no text that its type decided on: others tell an address, or the order of a set."""
    kind = type(value)
    if kind.__str__ is object.__str__ or isinstance(value, BaseModel | Collection) or callable(value):
        raise NoTextError(f"{kind.__name__} and no text or number")


def _decimal(value: Decimal) -> str:
    """Without zeros at the end, but written out where that is no huge text; nothing is rounded."""
    if not value.is_finite():
        return str(value)
    if not value:
        return "0"
    exact = value.normalize(EXACT)
    text = str(exact)
    return f"{exact:f}" if "E+" in text and exact.adjusted() < LONGEST_NUMBER else text


def _datetime(value: datetime) -> str:
    if value.utcoffset() is None:
        return str(value)
    try:
        return str(value.astimezone(UTC))
    except OverflowError:  # in the first or last hours of the calendar
        return str(value - EPOCH)


def _time(value: time) -> str:
    offset = value.utcoffset()
    if offset is None:
        return str(value)
    in_day = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
    since = in_day - offset
    # Without a date there is no day before and none after: 00:30+01:00 is another time than 23:30+00:00.
    return str((EPOCH + since).timetz()) if NOTHING <= since < DAY else str(since)


WRITERS: tuple[tuple[type, Callable[..., str]], ...] = (
    (str, str),
    (float, lambda value: str(value or 0.0)),
    (int, _plain),
    (Decimal, _decimal),
    (datetime, _datetime),
    (time, _time),
)
"""How to write what has no `__str__` of its own, or one that tells equal values apart."""
