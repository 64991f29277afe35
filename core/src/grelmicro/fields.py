"""A field of a value, like `order.item_id`: what stands there, and whose mistake it is when that is no use."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Json, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails

ANYTHING = (Any, object, Json)

SHOWN = (str, int, float, dict, list, BaseModel)
"""Kinds of values that an error can show to those who sent them: no files."""


def field_of(value: object, name: str) -> object:
    """What a mapping has under a key, else the attribute of a value; None has None.

    Raises:
        KeyError: the mapping has no such key.
        AttributeError: the value has no such attribute.
    """
    if value is None:
        return None
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def fault_of(annotation: Any, value: object, names: Sequence[str]) -> ErrorDetails | None:
    """What whoever sent a value did wrong, when a field of it is missing or no text.

    It is their mistake where their data chose what stands there, because the declaration leaves it open: as with `Any`,
    a union, a mapping or a field that no model declares. Where the declaration tells the type, whatever they
    send is of that type, and the mistake is that of whoever named the field.

    Args:
        annotation: the type with which the value is declared.
        value: what pydantic made of the data.
        names: the fields on the way, from the value on; none stands for the value itself.

    Returns:
        What pydantic would tell; its `loc` has what the sender calls the fields. None: it is no mistake of the sender.
    """
    chosen = _is_open(annotation)
    loc: list[int | str] = []
    kind = "string_type"
    for name in names:
        alias, is_open = _declared(value, name)
        loc.append(alias)
        try:
            value = field_of(value, name)
        except (KeyError, AttributeError):
            kind, chosen = "missing", chosen or bool(is_open)
            break
        chosen = chosen if is_open is None else is_open
    if not chosen:
        return None
    fault = InitErrorDetails(type=kind, loc=tuple(loc), input=value if isinstance(value, SHOWN) else None)
    return ValidationError.from_exception_data("value", [fault]).errors(include_url=False)[0]


def _declared(value: object, name: str) -> tuple[str, bool | None]:
    """What the sender calls a field, and whether it chooses its type; None: that is as with the value itself."""
    if isinstance(value, Mapping):
        return name, True
    if isinstance(value, BaseModel):
        known = type(value).model_fields.get(name)
        if known is None:
            return name, value.model_extra is not None and not hasattr(type(value), name)
        return _alias(known) or name, _is_open(known.annotation)
    if not is_dataclass(value):
        return name, None
    hints: dict[str, Any] = {}
    with suppress(NameError):  # a class that is known inside a function alone
        hints = get_type_hints(type(value))
    return name, name in hints and _is_open(hints[name])


def _alias(known: FieldInfo) -> str | None:
    return known.validation_alias if isinstance(known.validation_alias, str) else known.alias


def _is_open(annotation: Any) -> bool:
    """Whether values of several types fit, None aside."""
    annotation = getattr(annotation, "__value__", annotation)  # of a named alias
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return len(kinds) > 1 or _is_open(kinds[0])
    return annotation in ANYTHING or isinstance(annotation, TypeVar)
