"""The setting `GRELMICRO` of a project."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Self

from django.conf import settings as django_settings
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from grelmicro.config import check_namespace
from grelmicro.errors import SettingsValidationError

NAME = "GRELMICRO"

EXAMPLE = 'GRELMICRO = {"STORE": "redis://localhost:6379/1", "NAMESPACE": "shop"}'


class UnknownKeyError(SettingsValidationError):
    """`GRELMICRO` has a key that is not known."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TestRunSettings(_Model):
    """What replaces settings in a test run."""

    __test__ = False

    STORE: str = Field(min_length=1)
    """The store of a test run."""


class Settings(_Model):
    """The keys of `GRELMICRO`."""

    STORE: str = Field(min_length=1)
    """The URL of a store, `database:ALIAS` or `cache:ALIAS?db=N`."""
    NAMESPACE: str | None = None
    """What separates this project from others on the same store. None: the default of the core."""
    TASKS: str | None = Field(default=None, pattern=r"^[^\s:]+:[^\s:]+$")
    """The `module:attribute` of the project's `Tasks`."""
    TEST: TestRunSettings | None = None
    """What replaces `STORE` in a test run, where it is a private memory store else."""

    @classmethod
    def of(cls, given: object) -> Self:
        """The settings that `given` has.

        Raises:
            SettingsValidationError: it is no mapping, or a key or a value breaks a rule. The values are not shown.
        """
        if not isinstance(given, Mapping):
            raise SettingsValidationError(f"{NAME} should be a dict, not {type(given).__name__}: {EXAMPLE}")
        try:
            made = cls.model_validate(dict(given))
        except ValidationError as error:
            # A key that is misspelt is both unknown and missing: the first says what to do.
            errors = sorted(
                error.errors(include_url=False, include_input=False), key=lambda each: each["type"] != "extra_forbidden"
            )
            unknown = errors[0]["type"] == "extra_forbidden"
            raise (UnknownKeyError if unknown else SettingsValidationError)(_text(errors[0])) from None
        if made.NAMESPACE is not None:
            check_namespace(made.NAMESPACE)
        return made


def read_settings() -> Settings:
    """The settings of the project as they are now.

    Raises:
        SettingsValidationError: `GRELMICRO` is not set, or breaks a rule.
    """
    given = getattr(django_settings, NAME, None)
    if given is None:
        raise SettingsValidationError(f"the setting {NAME} is missing: {EXAMPLE}")
    return Settings.of(given)


def _text(error: ErrorDetails) -> str:
    """What is wrong, and what to do about it."""
    *outer, key = error["loc"]
    place = "".join(f"[{part!r}]" for part in outer)
    if error["type"] == "extra_forbidden":
        known = list((TestRunSettings if outer else Settings).model_fields)
        near = get_close_matches(str(key).upper(), known, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
        return f"{NAME}{place} has the unknown key {key!r}: {advice}"
    if error["type"] == "missing":
        return f"{NAME}{place} has no {key!r}: {EXAMPLE}"
    return f"{NAME}{place}[{key!r}] is wrong: {error['msg']}"
