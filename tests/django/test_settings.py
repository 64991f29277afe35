"""The setting `GRELMICRO`: what is right, and what each mistake is called."""

from collections.abc import Mapping

import pytest
from django.test import override_settings

from grelmicro.errors import SettingsValidationError
from grelmicro_django.settings import Settings, read_settings


def test_every_key_is_read() -> None:
    given = {"STORE": "memory://", "NAMESPACE": "shop", "TASKS": "shop.tasks:tasks", "TEST": {"STORE": "memory://"}}
    with override_settings(GRELMICRO=given):
        assert read_settings().model_dump() == given


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "no 'STORE'"),
        ({"STROE": "memory://"}, "unknown key 'STROE': did you mean 'STORE'"),
        ({"store": "memory://"}, "unknown key 'store': did you mean 'STORE'"),
        ({"STORE": "memory://", "COLOUR": 1}, "unknown key 'COLOUR': the keys are STORE, NAMESPACE, TASKS, TEST"),
        ({"STORE": ""}, "['STORE'] is wrong"),
        ({"STORE": 5}, "['STORE'] is wrong"),
        ({"STORE": "memory://", "NAMESPACE": "a b\n"}, "amespace"),
        ({"STORE": "memory://", "TEST": {"STOER": "x"}}, "['TEST'] has the unknown key 'STOER': did you mean 'STORE'"),
        ("redis://:secret@cache/0", "should be a dict, not str"),
    ],
)
def test_a_mistake_is_named(given: object, text: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        Settings.of(given)
    assert text in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_missing_setting_is_named() -> None:
    with override_settings():
        from django.conf import settings

        del settings.GRELMICRO
        with pytest.raises(SettingsValidationError, match="the setting GRELMICRO is missing"):
            read_settings()


def test_a_value_is_never_shown() -> None:
    given: Mapping[str, object] = {"STORE": ["redis://:secret@cache/0"]}
    with pytest.raises(SettingsValidationError) as caught:
        Settings.of(given)
    assert "secret" not in repr(caught.value)
