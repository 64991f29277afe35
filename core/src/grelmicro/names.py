"""`NameTemplate`: the name of a lock, built from values so that different ones never share a name."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from string import Formatter
from urllib.parse import quote

from pydantic import BaseModel

from grelmicro.errors import SettingsValidationError

LONGEST = 255
"""Characters that a name can have."""


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """A name with fields, such as `cart:{cart_id}`.

    With one field the value stands there as it is, so that `user:{mail}` names the lock that `Lock(f"user:{mail}")`
    does; only `%`, a `=` at its beginning and what is not printable are percent-encoded. With several, every character
    of a value but ASCII letters, digits, `-`, `.`, `_` and `~` is, so `a:{x}:{y}` gives `a:1%3A2:3` for the values
    `1:2` and `3`, and no other values give the same name. An enum stands for its value and None for `=none`. A name of
    more than 255 characters ends in a digest of the whole.

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
        encoded = _encoded if sum(name is not None for _, name in self.parts) > 1 else _kept
        filled = "".join(
            literal + ("" if name is None else encoded(self._value(name, values))) for literal, name in self.parts
        )
        if len(filled) <= LONGEST:
            return filled
        # No encoded value begins with "=", so such a name is nobody else's.
        digest = "=" + sha256(filled.encode()).hexdigest()
        return self.parts[0][0][: LONGEST - len(digest)] + digest

    def _value(self, name: str, values: Mapping[str, object]) -> object:
        first, *rest = name.split(".")
        try:
            value = values[first]
            for step in rest:
                if isinstance(value, Mapping):
                    value = value[step]
                elif value is not None:
                    value = getattr(value, step)
        except KeyError:
            raise KeyError(name) from None
        except AttributeError:
            rule = f"has the field {{{name}}}, but {type(value).__name__} has no '{step}'"
            raise _refusal(self.text, rule) from None
        if _has_no_text(value):
            raise _refusal(
                self.text,
                f"has the field {{{name}}}, whose value is {type(value).__name__} and no text or number: "
                f"name a field of it, like {{{name}.id}}",
            )
        return value


def _encoded(value: object) -> str:
    """A value beside others: nothing in it can be taken for what separates them."""
    return "=none" if value is None else quote(_text(value), safe="", errors="surrogatepass")


def _kept(value: object) -> str:
    """A value that stands alone, as it is wherever that is a name, and no other value's."""
    if value is None:
        return "=none"
    text = _text(value)
    if text.isprintable() and "%" not in text and not text.startswith("="):
        return text
    first = "%3D" if text.startswith("=") else ""
    return first + "".join(
        character if character.isprintable() and character != "%" else quote(character, safe="", errors="surrogatepass")
        for character in (text[1:] if first else text)
    )


def _has_no_text(value: object) -> bool:
    """Whether equal values may have different texts: those of a set or mapping tell the order, others an address."""
    kind = type(value)
    if kind is str or kind is int:
        return False
    if isinstance(value, BaseModel | Mapping | Set):
        return True
    return callable(value) or (kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__)


def _text(value: object) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def _parts(text: str) -> tuple[tuple[str, str | None], ...]:
    try:
        parsed = list(Formatter().parse(text))
    except (TypeError, ValueError):
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
