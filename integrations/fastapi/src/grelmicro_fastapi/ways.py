"""The way from a parameter to a field of it, like `order.item_id`: where it leads, and who chose the types there."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Json
from pydantic.fields import FieldInfo

ANYTHING = (Any, object, Json)


class Way(NamedTuple):
    """What is at the end of a way, and what the client calls that."""

    loc: tuple[str, ...]
    value: object
    """What stands there; where nothing does, what has no such field."""
    found: bool
    chosen: bool
    """Whether the client's data chose its type, because the declaration of the parameter leaves it open."""


def way(annotation: Any, value: object, steps: Sequence[str]) -> Way:
    """Go from the value of a parameter through its fields."""
    loc: tuple[str, ...] = ()
    chosen = _is_open(annotation)
    for step in steps:
        if value is None:
            break
        alias, is_open = _declared(value, step)
        loc = (*loc, alias)
        try:
            value = value[step] if isinstance(value, Mapping) else getattr(value, step)
        except (KeyError, AttributeError):
            return Way(loc, value, False, chosen or bool(is_open))
        chosen = chosen if is_open is None else is_open
    return Way(loc, value, True, chosen)


def _declared(value: object, step: str) -> tuple[str, bool | None]:
    """What the client calls a field, and whether it chooses its type; None: that is as with the value itself."""
    if isinstance(value, Mapping):
        return step, True
    if isinstance(value, BaseModel):
        known = type(value).model_fields.get(step)
        if known is None:
            return step, value.model_extra is not None and not hasattr(type(value), step)
        return _alias(known) or step, _is_open(known.annotation)
    if not is_dataclass(value):
        return step, None
    hints: dict[str, Any] = {}
    with suppress(NameError):  # a class that is known inside a function alone
        hints = get_type_hints(type(value))
    return step, step in hints and _is_open(hints[step])


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
