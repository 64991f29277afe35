"""`NameTemplate`: the name of a lock, built from values so that different ones never share a name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from string import Formatter
from urllib.parse import quote

from pydantic import BaseModel

from grelmicro.errors import SettingsValidationError
from grelmicro.fields import field_of
from grelmicro.texts import NoTextError, text_of

LONGEST = 255
"""Characters that a name can have."""


class NoNameError(SettingsValidationError):
    """A value cannot stand in a name, or has no such attribute."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        """As it is written in the name, such as `order.item_id`."""

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, str(self))


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """A name with fields, such as `cart:{cart_id}`.

    With one field the value stands there as it is, so that `user:{mail}` names the lock that `Lock(f"user:{mail}")`
    does; only `%`, a `=` at its beginning and what is not printable are percent-encoded. With several, every character
    of a value but ASCII letters, digits, `-`, `.`, `_` and `~` is, so `a:{x}:{y}` gives `a:1%3A2:3` for the values
    `1:2` and `3`, and no other values give the same name. A name of more than 255 characters ends in a digest.

    Values are text, numbers, dates and times, and what has a `__str__` of its own, as `UUID`, IP addresses, URLs and
    paths have. An enum stands for its value and None for `=none`. Equal numbers, and datetimes of one instant, have
    one name: `Decimal("1.0")` is `1`, `-0.0` is `0.0`, and a datetime with an offset is in UTC.

    A field such as `order.item_id` is an attribute of a value, or the key of a mapping; one of None is None.

    Args:
        text: literal text and fields; `{{` and `}}` stand for braces.

    Raises:
        SettingsValidationError: it has no literal text, two fields could run into one another, or a field is no name.
    """

    text: str
    parts: tuple[tuple[str, str | None], ...] = field(init=False, repr=False, compare=False)
    """Literal text, and the field that follows it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _parts(self.text))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the values it needs, each once, in order: `order` for `{order.item_id}`."""
        return tuple(dict.fromkeys(name.partition(".")[0] for _, name in self.parts if name is not None))

    def name(self, values: Mapping[str, object]) -> str:
        """The name for these values.

        Raises:
            KeyError: a value is missing, or a mapping has no such key; it tells the field.
            SettingsValidationError: a value has no such attribute, or is none that can stand in a name.
        """
        texts = [self._text(name, values) for _, name in self.parts if name is not None]
        if sum(len(text) for text in texts if text is not None) > LONGEST:
            return self._digest(_unambiguous([literal for literal, _ in self.parts], texts))
        encode = _encoded if len(texts) > 1 else _kept
        rest = iter(texts)
        filled = "".join(literal + ("" if name is None else encode(next(rest))) for literal, name in self.parts)
        return filled if len(filled) <= LONGEST else self._digest(_bytes(filled))

    def _digest(self, whole: bytes) -> str:
        # No encoded value begins with "=", so such a name is nobody else's.
        digest = "=" + sha256(whole).hexdigest()
        return self.parts[0][0][: LONGEST - len(digest)] + digest

    def _text(self, name: str, values: Mapping[str, object]) -> str | None:
        value = self._value(name, values)
        try:
            return text_of(value)
        except NoTextError as reason:
            raise NoNameError(
                name,
                f"lock name {self.text!r} has the field {{{name}}}, whose value is {reason}: "
                f"name a field of it, like {{{name}.id}}, or another value",
            ) from None

    def _value(self, name: str, values: Mapping[str, object]) -> object:
        first, *rest = name.split(".")
        try:
            value = values[first]
            for step in rest:
                value = field_of(value, step)
        except KeyError:
            raise KeyError(name) from None
        except AttributeError:
            if isinstance(value, BaseModel) and value.model_extra is not None:  # it takes any, as a mapping does
                raise KeyError(name) from None
            raise NoNameError(
                name,
                f"lock name {self.text!r} has the field {{{name}}}, but {type(value).__name__} has no '{step}'",
            ) from None
        return value


def _encoded(text: str | None) -> str:
    """A value beside others: nothing in it can be taken for what separates them."""
    return "=none" if text is None else quote(text, safe="", errors="surrogatepass")


def _kept(text: str | None) -> str:
    """A value that stands alone, as it is wherever that is a name, and no other value's."""
    return "=none" if text is None else re.sub(r"\A=|[^ -$&-~]", _percent, text)


def _percent(found: re.Match[str]) -> str:
    character = found[0]
    printable = character.isprintable() and character not in "%="
    return character if printable else quote(character, safe="", errors="surrogatepass")


def _unambiguous(literals: Sequence[str], texts: Sequence[str | None]) -> bytes:
    """What no other values give, and no filled template: text has no byte 255."""
    parts = [None if text is None else _bytes(text) for text in (*literals, *texts)]
    return b"\xff" + b"".join(b"-" if part is None else b"%d:%b" % (len(part), part) for part in parts)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _parts(text: str) -> tuple[tuple[str, str | None], ...]:
    if not isinstance(text, str):
        found = f"got {type(text).__name__}"
        if callable(text):
            found = 'write @locked("order:{order_id}") with a name'
        raise SettingsValidationError(f'lock name should be text like "order:{{order_id}}": {found}')
    try:
        parsed = list(Formatter().parse(text))
    except ValueError:
        raise _refusal(text, "should be text in which each { has its }") from None
    parts: list[tuple[str, str | None]] = []
    for literal, name, spec, conversion in parsed:
        if name is not None and (spec or conversion or not _is_field(name)):
            raise _refusal(text, "has a field that is no plain name: write it like {order_id} or {order.item_id}")
        if name is not None and parts and parts[-1][1] is not None and not re.search(r"[^\w.~-]", literal, re.ASCII):
            raise _refusal(text, f"needs a separator, such as ':', between {{{parts[-1][1]}}} and {{{name}}}")
        if name is None and parts and parts[-1][1] is None:  # an escaped brace splits a literal text
            parts[-1] = (parts[-1][0] + literal, None)
        else:
            parts.append((literal, name))
    if not any(literal for literal, _ in parts):
        raise _refusal(text, "needs text beside its fields: say what is locked, like order:{order_id}")
    return tuple(parts)


def _is_field(name: str) -> bool:
    """Whether it is a name, or one with public attributes: nothing is called, and what is private stays so."""
    first, *rest = name.split(".")
    return first.isidentifier() and all(step.isidentifier() and not step.startswith("_") for step in rest)


def _refusal(text: object, rule: str) -> SettingsValidationError:
    return SettingsValidationError(f"lock name {text!r} {rule}")
