"""`NameTemplate`: names of locks from the values of a request."""

import pickle
from enum import Enum, IntEnum
from hashlib import sha256
from time import process_time
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from grelmicro.errors import SettingsValidationError
from grelmicro.names import LONGEST, NameTemplate, NoNameError


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


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


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


def test_model_that_takes_any_field_is_as_a_mapping() -> None:
    template = NameTemplate("order:{order.sku}")
    assert template.name({"order": Open.model_validate({"sku": "a"})}) == "order:a"
    with pytest.raises(KeyError, match=r"order\.sku"):
        template.name({"order": Open()})


def test_error_about_a_value_can_be_pickled() -> None:
    with pytest.raises(NoNameError) as refusal:
        NameTemplate("order:{order.item_ids}").name({"order": {"item_ids": [1]}})
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert (copy.field, str(copy)) == ("order.item_ids", str(refusal.value))


def test_missing_attribute_is_told() -> None:
    with pytest.raises(SettingsValidationError, match=r"has the field \{order\.sku\}, but Order has no 'sku'"):
        NameTemplate("order:{order.sku}").name({"order": Order(item_id=7)})


texts = st.text(max_size=300) | st.none()


@pytest.mark.slow
@given(first=st.tuples(texts, texts), second=st.tuples(texts, texts))
def test_different_values_have_different_names(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    template = NameTemplate("move:{x}:{y}")
    names = [template.name({"x": x, "y": y}) for x, y in (first, second)]
    assert (names[0] == names[1]) == (first == second)
    assert all(name.isascii() and name.isprintable() and 0 < len(name) <= LONGEST for name in names)


@pytest.mark.slow
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


def test_names_of_values_up_to_the_longest_are_those_that_they_were() -> None:
    """Processes of another release hold the same locks."""
    value = "ü" * LONGEST
    digest = sha256(f"page:{value}".encode()).hexdigest()
    assert NameTemplate("page:{url}").name({"url": value}) == f"page:={digest}"
    digest = sha256(f"page:{'%C3%BC' * LONGEST}:=none".encode()).hexdigest()
    assert NameTemplate("page:{url}:{x}").name({"url": value, "x": None}) == f"page:={digest}"


LONG = "x" * 300


@pytest.mark.parametrize(
    "others",
    [
        [{"x": LONG, "y": ""}, {"x": "", "y": LONG}, {"x": LONG[:150], "y": LONG[150:]}, {"x": LONG, "y": None}],
        [{"x": LONG, "y": "1:2"}, {"x": LONG + "1", "y": "2"}, {"x": LONG + ":1", "y": "2"}],
        [{"x": LONG, "y": "=none"}, {"x": LONG, "y": "-"}, {"x": LONG, "y": None}],
        [{"x": LONG, "y": "\ud800"}, {"x": LONG, "y": "\ufffd"}, {"x": LONG, "y": "?"}],
    ],
)
def test_long_values_are_told_apart(others: list[dict[str, object]]) -> None:
    texts = ("a:{x}:{y}", "a:{x}/{y}", "a:{x}:{y}!")
    names = {NameTemplate(text).name(values) for text in texts for values in others}
    assert len(names) == len(texts) * len(others)


def test_long_value_has_one_name_whatever_its_field_is_called() -> None:
    names = {NameTemplate(text).name({"x": LONG, "y": {"z": LONG}}) for text in ("a:{x}", "a:{y.z}")}
    assert len(names) == 1


def test_encoded_value_cannot_give_the_digest_of_a_long_one() -> None:
    """A client that knows what a digest is made of, and has it made by the encoding, comes to another name."""
    template = NameTemplate("2:{x}")
    assert template.name({"x": "%0A" * 100}) != template.name({"x": "2:300:" + "\n" * 100})


@pytest.mark.parametrize("text", ["a:{x}", "a:{x}:{y}", "a:{x}:{x}"])
@pytest.mark.parametrize("character", ["%", "\0", "\u200b", "=", "ü", "\ud800"])
def test_huge_values_are_not_encoded(text: str, character: str) -> None:
    """A request must not keep the others waiting: encoding this takes a hundred times as long."""
    template, value = NameTemplate(text), character * 2_000_000
    began = process_time()
    value.encode(errors="surrogatepass")
    for _ in range(20):
        sha256(value.encode(errors="surrogatepass"))
    allowed = process_time() - began
    began = process_time()
    assert len(template.name({"x": value, "y": 1})) <= LONGEST
    assert process_time() - began < allowed


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{a}", "needs text beside its fields"),
        ("", "needs text beside its fields"),
        ("cart:{", "each { has its }"),
        ("cart:}", "each { has its }"),
        (None, r'text like "order:\{order_id\}": got NoneType'),
        (3, r'text like "order:\{order_id\}": got int'),
        (print, r'write @locked\("order:\{order_id\}"\) with a name'),
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
def test_bad_template_is_refused(text: Any, rule: str) -> None:
    with pytest.raises(SettingsValidationError, match=rule):
        NameTemplate(text)


def test_missing_value_is_no_name() -> None:
    with pytest.raises(KeyError):
        NameTemplate("cart:{cart_id}").name({"other": 1})
