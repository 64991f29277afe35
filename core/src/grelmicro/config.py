"""Settings: keyword, then environment, then default, checked once and frozen."""

import os
import re
import unicodedata
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Annotated, ClassVar, Generic, TypeVar, cast
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from grelmicro.errors import SettingsValidationError
from grelmicro.spelling import warn_of_unknown

LONGEST = 10 * 366 * 24 * 3600.0
"""Ten years: the longest duration that is accepted, in seconds."""

SHORTEST_INTERVAL = 0.001
"""The shortest pause between things that are repeated, in seconds."""


Duration = float | timedelta
"""How a duration is given: in seconds, or as a timedelta. Settings keep it in seconds."""


def in_seconds(duration: Duration) -> float:
    """`duration` in seconds; nothing is checked."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def number(value: object) -> object:
    """`value`, a timedelta in seconds; a bool, which counts as a number elsewhere, is refused."""
    if isinstance(value, bool):
        raise ValueError("should be a number of seconds, not true or false")
    return value.total_seconds() if isinstance(value, timedelta) else value


def _worker(value: object) -> object:
    if value is None or isinstance(value, UUID):
        return value if value is None else str(value)
    if not isinstance(value, str):
        raise ValueError("should be a valid string")
    if not (0 < len(value) <= 128 and value.isprintable()):
        raise ValueError("should have 1 to 128 characters without control characters")
    return value


Seconds = Annotated[float, BeforeValidator(number), Field(gt=0, le=LONGEST, allow_inf_nan=False)]
"""A duration in seconds: more than 0, at most ten years."""

Ratio = Annotated[float, BeforeValidator(number), Field(ge=0, lt=1, allow_inf_nan=False)]
"""A share: 0 or more, less than 1."""

Interval = Annotated[Seconds, Field(ge=SHORTEST_INTERVAL)]
"""A pause in seconds: at least a millisecond."""


class Config(BaseModel):
    """A frozen set of settings. It composes in an application's own pydantic-settings class."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    kind: ClassVar[str]
    """The segment of its environment variables: `GREL_{kind}_...`."""

    def _yield(self, **limits: float) -> None:
        """Lower a default that does not go with what was given; for validators. It does not count as given then."""
        for field, limit in limits.items():
            if field not in self.model_fields_set:
                self.__dict__[field] = min(self.__dict__[field], limit)


def check_worker(source: str, worker: object) -> str:
    """`worker` as text, if it can be a worker's name; `""` for None.

    Args:
        source: where it comes from, for the error.
        worker: what to check.

    Raises:
        SettingsValidationError: it cannot.
    """
    try:
        return str(_worker(worker) or "")
    except ValueError as error:
        raise SettingsValidationError(f"{source} {error}: name this worker, such as 'web-1'") from None


def worker_of_environment() -> str:
    """The readable name of this process by the environment variable GREL_WORKER, as it is now; `""` if it has none.

    Raises:
        SettingsValidationError: it cannot be one.
    """
    return check_worker("GREL_WORKER", os.environ.get("GREL_WORKER") or None)


class WorkerConfig(Config):
    """Settings of something that holds leases under a worker's name."""

    worker: Annotated[str | UUID | None, BeforeValidator(_worker)] = None
    """Readable name of this worker, the prefix of what is stored as holder; None: 16 random hex characters."""


C = TypeVar("C", bound=Config)


def build(
    config: type[C], owner: str, given: Mapping[str, object], *, name: str | None = None, prefix: str | None = None
) -> C:
    """The settings of one instance: those of `given` that are not None, then the environment, then the defaults.

    Args:
        config: the class of settings.
        owner: who asks, for error texts, such as `Lock 'cart'`.
        given: keywords.
        name: the instance's name, the second segment of `GREL_{kind}_{name}_{field}`; None reads no environment.
        prefix: replaces `GREL_{kind}_{name}_`, and switches the fall-back to `GREL_{kind}_{field}` off.

    Raises:
        SettingsValidationError: a value breaks a rule.
    """
    if prefix is not None:
        check_env_prefix(owner, prefix)
    keywords = {field: value for field, value in given.items() if value is not None}
    found = {} if name is None else _from_environment(config, name, prefix)
    if not keywords and not found:
        return cast(C, _default(config))
    values = {field: value for field, (value, _) in found.items()} | keywords
    try:
        return config(**values)
    except ValidationError as error:
        raise SettingsValidationError(_explain(error, owner, config, keywords, found)) from None


def check_env_prefix(owner: str, prefix: object) -> str:
    """`prefix`, if it is text.

    Args:
        owner: whose variables begin with it, for the error.
        prefix: what to check.

    Raises:
        SettingsValidationError: it is not.
    """
    if isinstance(prefix, str):
        return prefix
    raise SettingsValidationError(
        f"{owner}: env_prefix should be text, not {type(prefix).__name__}: "
        "give what the names of its environment variables begin with, such as 'SHOP_LOCK_'"
    )


@lru_cache
def _default(config: type[Config]) -> Config:
    return config()


def _explain(
    error: ValidationError,
    owner: str,
    config: type[Config],
    keywords: Mapping[str, object],
    found: Mapping[str, tuple[str, str]],
) -> str:
    """One line a broken rule: the setting, where it came from, the rule, the remedy."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        field = str(problem["loc"][0]) if problem["loc"] else ""
        rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if field in keywords or field not in found:
            source = "keyword" if field in keywords else "settings"
        else:
            source = f"environment variable {found[field][1]}"
        known = config.model_fields.get(field)
        if known is not None:
            remedy = f"give a value within the rule, or leave it out for the default {known.default}"
        elif field:
            remedy = "the settings are " + ", ".join(config.model_fields)
        else:
            remedy = "give values that satisfy it together with the defaults of those you leave out"
        lines.append(f"{owner}: {field + ' ' if field else ''}({source}) {rule}: {remedy}")
    return "; ".join(lines)


class _Environment:
    """The `GREL_` variables that say something, read again only when the process's environment changed."""

    def __init__(self) -> None:
        self._seen: object = None
        self._found: dict[str, dict[str, str]] = {}

    def of_kind(self, kind: str) -> dict[str, str]:
        """The variables that begin with `GREL_{kind}_`, by the rest of their name. Unknown ones are warned of."""
        # Comparing two dicts of the same objects takes half a microsecond, one look-up in os.environ takes two.
        raw = getattr(os.environ, "_data", os.environ)
        if raw != self._seen:
            self._seen, self._found = dict(raw), {}
        found = self._found.get(kind)
        if found is None:
            start = f"GREL_{kind}_"
            found = {key[len(start) :]: value for key, value in os.environ.items() if value and key.startswith(start)}
            self._found[kind] = found
            # Most processes have none, and looking for settings takes longer than looking for a variable.
            if variables := [key for key, value in os.environ.items() if value and key.startswith("GREL_")]:
                warn_of_unknown(kind, _fields(), variables)
        return found


def _fields() -> dict[str, list[str]]:
    """The settings of each kind, in upper case; an application may have added some to ours."""
    found: dict[str, list[str]] = {}
    classes: list[type[Config]] = [Config]
    while classes:
        config = classes.pop()
        classes.extend(config.__subclasses__())
        if kind := getattr(config, "kind", ""):
            known = found.setdefault(kind, [])
            known.extend(name for field in config.model_fields if (name := field.upper()) not in known)
    return found


_environment = _Environment()


def _from_environment(config: type[Config], name: str, prefix: str | None) -> dict[str, tuple[str, str]]:
    """The fields that the environment sets: their raw value and the variable's name. An empty one sets nothing."""
    if prefix is not None:
        own_names = {field: prefix + field.upper() for field in config.model_fields}
        return {field: (value, own) for field, own in own_names.items() if (value := os.environ.get(own))}
    variables = _environment.of_kind(config.kind)
    if not variables:
        return {}
    own = segment(name)
    found = {}
    for field in config.model_fields:
        rest = f"{own}_{field.upper()}"
        # One worker name for every instance of a kind would be no name at all, so it has no fall-back.
        if rest not in variables and (own == "DEFAULT" or field != "worker"):
            rest = field.upper()
        if rest in variables:
            found[field] = (variables[rest], f"GREL_{config.kind}_{rest}")
    return found


def segment(name: str) -> str:
    """The part of an environment variable that stands for `name`: `order:{id}` gives `ORDER`, `a-b` gives `A_B`."""
    family = re.sub(r"\{[^{}]*\}", "", name)
    return re.sub(r"[^A-Z0-9]+", "_", family.upper()).strip("_")


def check_name(owner: str, name: object) -> str:
    """`name`, if it is any text of 1 to 255 characters without control characters.

    Raises:
        SettingsValidationError: it is not.
    """
    if isinstance(name, str) and 0 < len(name) <= 255 and (name.isprintable() or not _has_controls(name)):
        return name
    if not isinstance(name, str):
        rule = f"should be text, not {type(name).__name__}"
    elif not name:
        rule = "is empty"
    elif len(name) > 255:
        rule = f"has {len(name)} characters"
    else:
        rule = "has control characters"
    raise SettingsValidationError(
        f"{owner}: name {rule}: give 1 to 255 characters without control characters, such as 'cart' or 'order:42'"
    )


def _has_controls(name: str) -> bool:
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in name)


def check_namespace(namespace: str, *, setting: str = "namespace") -> str:
    """`namespace`, if it is 1 to 63 letters, digits, `_`, `-` or `.`.

    Args:
        namespace: what to check.
        setting: what it is called in the error.

    Raises:
        SettingsValidationError: it is not.
    """
    if isinstance(namespace, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,63}", namespace):
        return namespace
    raise SettingsValidationError(
        f"{setting} should be 1 to 63 letters, digits, '_', '-' or '.': name the application, such as 'shop'"
    )


def check_seconds(setting: str, value: object, *, zero: bool = False, least: float = 0.0) -> float:
    """`value` as seconds: a timedelta, or a number above 0 (or 0 itself, where `zero` says so), at most ten years.

    Args:
        setting: what it is called in the error.
        value: what to check.
        zero: whether 0 is accepted.
        least: the least that is accepted, where that is more than 0.

    Raises:
        SettingsValidationError: it is not.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and ((value > 0 and least <= value <= LONGEST) or (zero and value == 0))
    ):
        return float(value)
    lowest = "0 or more" if zero else f"{least:g} or more" if least else "more than 0"
    raise SettingsValidationError(
        f"{setting} should be a number of seconds, {lowest} and at most ten years: give it as int or float, such as 5"
    )


def check_config(config: C, kind: type[C]) -> C:
    """`config` as a `from_config` takes it; only its class is looked at.

    Raises:
        SettingsValidationError: it is no `kind`.
    """
    if not isinstance(config, kind):
        raise SettingsValidationError(
            f"from_config() takes a {kind.__name__}, not a {type(config).__name__}: build one, or give the settings "
            "to the class itself, as keywords"
        )
    return config


class Reconfigurable(Generic[C]):
    """Something whose settings can be replaced while it runs."""

    _config: C

    @property
    def config(self) -> C:
        """The settings in force."""
        return self._config

    async def reconfigure(self, new_config: C) -> None:
        """Put `new_config` in force from the next operation or loop on.

        Raises:
            SettingsValidationError: it is of another class, or would change the worker.
        """
        self._config = self._accept(new_config)

    def _accept(self, config: C) -> C:
        mine = type(self._config)
        if not isinstance(config, mine):
            raise SettingsValidationError(
                f"reconfigure() takes a {mine.__name__}, not a {type(config).__name__}: "
                "build one, or change the present one with config.model_copy(update={...})"
            )
        # A default is none of its own: what it yielded to may have changed. A subclass may have defaults of its own.
        given = config.model_fields_set if type(config) is mine else set(type(config).model_fields)
        # model_copy checks nothing, and a broken rule must not come into force.
        checked = build(mine, "reconfigure()", {field: getattr(config, field) for field in given})
        if not isinstance(checked, WorkerConfig) or not isinstance(self._config, WorkerConfig):
            return checked
        if checked.worker is None:
            return checked.model_copy(update={"worker": self._config.worker})
        if checked.worker != self._config.worker:
            raise SettingsValidationError(
                "reconfigure() cannot change the worker, since leases are held under its name: "
                "leave worker out, or build a new instance"
            )
        return checked
