"""`NameTemplate`: names of locks from the values of a request."""

from enum import Enum, IntEnum
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from grelmicro.errors import SettingsValidationError
from grelmicro.names import LONGEST, NameTemplate


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("text", "values", "name"),
    [
        ("reindex", {}, "reindex"),
        ("cart:{cart_id}", {"cart_id": 42}, "cart:42"),
        ("cart:{cart_id}", {"cart_id": "a b/c"}, "cart:a b/c"),
        ("cart:{cart_id}", {"cart_id": "Zoë"}, "cart:Zoë"),
        ("cart:{cart_id}", {"cart_id": "ada@example.org"}, "cart:ada@example.org"),
        ("cart:{cart_id}", {"cart_id": "50%\n"}, "cart:50%25%0A"),
        ("cart:{a}:{b}", {"a": "a b/c", "b": "Zoë"}, "cart:a%20b%2Fc:Zo%C3%AB"),
        ("cart:{cart_id}", {"cart_id": ""}, "cart:"),
        ("cart:{id}", {"id": UUID(int=1)}, "cart:00000000-0000-0000-0000-000000000001"),
        ("{a}:{b}", {"a": 1, "b": 2}, "1:2"),
        ("{a}:{a}", {"a": 1}, "1:1"),
        ("paint:{color}", {"color": Color.RED}, "paint:red"),
        ("alarm:{level}", {"level": Level.HIGH}, "alarm:3"),
        ("find:{q}", {"q": None}, "find:=none"),
        ("find:{q}", {"q": "=none"}, "find:%3Dnone"),
        ("{{set}}:{a}", {"a": 1}, "{set}:1"),
    ],
)
def test_name(text: str, values: dict[str, object], name: str) -> None:
    assert NameTemplate(text).name(values) == name


def test_fields_are_told_once() -> None:
    assert NameTemplate("{b}:{a}:{b}").fields == ("b", "a")


class Place(BaseModel):
    zip_code: str = "10 1"
    streets: tuple[str, ...] = ()


class Order(BaseModel):
    item_id: int
    place: Place | None = None


@pytest.mark.parametrize(
    ("text", "values", "name"),
    [
        ("order:{order.item_id}", {"order": Order(item_id=7)}, "order:7"),
        ("order:{order.item_id}", {"order": {"item_id": 7}}, "order:7"),
        ("order:{order.item_id}", {"order": None}, "order:=none"),
        ("order:{order.place.zip_code}", {"order": Order(item_id=7)}, "order:=none"),
        ("order:{order.place.zip_code}", {"order": Order(item_id=7, place=Place())}, "order:10 1"),
        ("{order.item_id}:{order.place.zip_code}", {"order": Order(item_id=7, place=Place())}, "7:10%201"),
        ("{order.item_id}:{shop}", {"order": {"item_id": "a:b"}, "shop": "c"}, "a%3Ab:c"),
    ],
)
def test_field_of_a_value(text: str, values: dict[str, object], name: str) -> None:
    assert NameTemplate(text).name(values) == name


def test_values_that_it_needs_are_told_without_their_fields() -> None:
    assert NameTemplate("{order.item_id}:{shop}:{order.sku}").fields == ("order", "shop")


@pytest.mark.parametrize("values", [{}, {"order": {}}, {"order": {"place": {}}}])
def test_missing_key_is_told_with_its_field(values: dict[str, object]) -> None:
    with pytest.raises(KeyError) as missing:
        NameTemplate("order:{order.place.zip_code}").name(values)
    assert missing.value.args == ("order.place.zip_code",)


def test_missing_attribute_is_told() -> None:
    with pytest.raises(SettingsValidationError, match=r"has the field \{order\.sku\}, but Order has no 'sku'"):
        NameTemplate("order:{order.sku}").name({"order": Order(item_id=7)})


@pytest.mark.parametrize(
    "value", [Order(item_id=7), {"a": 1}, {1, 2}, frozenset(), object(), str, Order(item_id=7).model_dump]
)
def test_value_whose_text_says_nothing_sure_is_no_name(value: object) -> None:
    """Equal ones would not always have one name: they would not exclude each other."""
    with pytest.raises(SettingsValidationError, match=r"no text or number: name a field of it, like \{order\.id\}"):
        NameTemplate("order:{order}").name({"order": value})


texts = st.text(max_size=300) | st.none()


@given(first=st.tuples(texts, texts), second=st.tuples(texts, texts))
def test_different_values_have_different_names(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    template = NameTemplate("move:{x}:{y}")
    names = [template.name({"x": x, "y": y}) for x, y in (first, second)]
    assert (names[0] == names[1]) == (first == second)
    assert all(name.isascii() and name.isprintable() and 0 < len(name) <= LONGEST for name in names)


@given(first=texts, second=texts)
def test_different_values_of_one_field_have_different_names(first: str | None, second: str | None) -> None:
    template = NameTemplate("user:{x}!")
    names = [template.name({"x": x}) for x in (first, second)]
    assert (names[0] == names[1]) == (first == second)
    assert all(name.isprintable() and 0 < len(name) <= LONGEST for name in names)


@given(value=st.text(max_size=200).filter(lambda text: text.isprintable() and "%" not in text and text[:1] != "="))
def test_one_field_gives_the_name_that_an_f_string_does(value: str) -> None:
    assert NameTemplate("user:{x}").name({"x": value}) == f"user:{value}"


def test_a_separator_in_a_value_is_no_separator() -> None:
    template = NameTemplate("move:{x}:{y}")
    assert template.name({"x": "1:2", "y": "3"}) != template.name({"x": "1", "y": "2:3"})


def test_long_values_are_told_by_a_digest() -> None:
    template = NameTemplate("page:{url}")
    names = {template.name({"url": "x" * length}) for length in (250, 251, 300, 301)}
    assert len(names) == 4
    assert all(name.startswith("page:") for name in names)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{a}", "needs text beside its fields"),
        ("", "needs text beside its fields"),
        ("cart:{", "each { has its }"),
        ("cart:}", "each { has its }"),
        (None, "each { has its }"),
        ("cart:{}", "no plain name"),
        ("cart:{0}", "no plain name"),
        ("cart:{a._b}", "no plain name"),
        ("cart:{a.__class__}", "no plain name"),
        ("cart:{a.}", "no plain name"),
        ("cart:{a.b()}", "no plain name"),
        ("cart:{a[b]}", "no plain name"),
        ("cart:{a!r}", "no plain name"),
        ("cart:{a:>3}", "no plain name"),
        ("cart:{a}{b}", "needs a separator"),
        ("cart:{a}x{b}", "needs a separator"),
        ("cart:{a}-{b}", "needs a separator"),
    ],
)
def test_bad_template_is_refused(text: str, rule: str) -> None:
    with pytest.raises(SettingsValidationError, match=rule):
        NameTemplate(text)


def test_missing_value_is_no_name() -> None:
    with pytest.raises(KeyError):
        NameTemplate("cart:{cart_id}").name({"other": 1})
