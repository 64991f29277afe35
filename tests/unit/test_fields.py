"""Fields of values: what stands there, and whether whoever sent the value made a mistake."""

from collections import UserDict
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, Json, JsonValue

from grelmicro.fields import fault_of, field_of

T = TypeVar("T")


class Toy(BaseModel):
    model_config = ConfigDict(extra="allow")
    names: list[str] = []
    data: Any = Field(default=None, alias="the-data")
    size: Any = Field(default=None, validation_alias="the-size")
    color: Any = Field(default=None, validation_alias=AliasChoices("colour", "color"))


@dataclass
class Parcel:
    content: Any
    labels: list[str]


def test_a_mapping_has_keys_and_other_values_have_attributes() -> None:
    assert field_of({"keys": 1}, "keys") == 1
    assert field_of(UserDict(data=1), "data") == 1
    assert field_of(Parcel("x", []), "content") == "x"
    assert field_of(None, "content") is None
    with pytest.raises(KeyError):
        field_of({}, "keys")
    with pytest.raises(AttributeError):
        field_of("x", "content")


@pytest.mark.parametrize("annotation", [Any, object, Json, T, int | str, JsonValue, Annotated[Any, "x"] | None])
def test_declarations_that_leave_the_type_open(annotation: Any) -> None:
    assert fault_of(annotation, [1], ()) == {
        "type": "string_type",
        "loc": (),
        "msg": "Input should be a valid string",
        "input": [1],
    }


@pytest.mark.parametrize("annotation", [int, list[int], list[int] | None, Annotated[int, "x"], Json[list[int]], Toy])
def test_declarations_that_tell_the_type(annotation: Any) -> None:
    assert fault_of(annotation, [1], ()) is None


@pytest.mark.parametrize(
    ("value", "name", "loc"),
    [
        (Toy.model_validate({"the-data": [1]}), "data", "the-data"),
        (Toy.model_validate({"the-size": [1]}), "size", "the-size"),
        (Toy.model_validate({"colour": [1]}), "color", "color"),
        (Toy.model_validate({"more": [1]}), "more", "more"),
        (Parcel([1], []), "content", "content"),
        ({"any": [1]}, "any", "any"),
    ],
)
def test_fields_are_called_as_the_sender_calls_them(value: object, name: str, loc: str) -> None:
    fault = fault_of(type(value), value, [name])
    assert fault is not None
    assert (fault["type"], fault["loc"], fault["input"]) == ("string_type", (loc,), [1])


def test_what_is_missing_is_the_senders_mistake_where_it_could_have_sent_it() -> None:
    fault = fault_of(Toy, Toy(), ["more"])
    assert fault is not None
    assert (fault["type"], fault["loc"], fault["msg"]) == ("missing", ("more",), "Field required")
    assert fault_of(Parcel, Parcel(1, []), ["more"]) is None


def test_a_class_inside_a_function_has_types_that_nobody_can_read() -> None:
    class Inner: ...

    @dataclass
    class Outer:
        inner: "Inner"
        data: Any

    assert fault_of(Outer, Outer(Inner(), [1]), ["data"]) is None


@pytest.mark.parametrize("value", [object(), b"x", open])
def test_only_what_was_sent_as_data_is_shown(value: object) -> None:
    fault = fault_of(Any, value, ())
    assert fault is not None
    assert fault["input"] is None
