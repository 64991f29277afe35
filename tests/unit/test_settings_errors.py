"""A broken rule is a `SettingsValidationError` that names the setting, the rule and the remedy, never the value."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LeaderElection, Lock, TaskLock
from grelmicro.errors import GrelmicroError, SettingsValidationError
from grelmicro.providers.memory import MemoryProvider

REMEDY = "give a value within the rule, or leave it out for the default"
NAME = "give 1 to 255 characters without control characters, such as 'cart' or 'order:42'"

KEYWORDS: list[tuple[dict[str, object], str]] = [
    ({"lease_duration": 0}, f"lease_duration (keyword) should be greater than 0: {REMEDY} 60.0"),
    ({"lease_duration": -1}, f"lease_duration (keyword) should be greater than 0: {REMEDY} 60.0"),
    ({"lease_duration": math.nan}, f"lease_duration (keyword) should be greater than 0: {REMEDY} 60.0"),
    (
        {"lease_duration": math.inf},
        f"lease_duration (keyword) should be less than or equal to 316224000: {REMEDY} 60.0",
    ),
    ({"lease_duration": 1e300}, f"lease_duration (keyword) should be less than or equal to 316224000: {REMEDY} 60.0"),
    ({"lease_duration": 10**400}, f"lease_duration (keyword) should be a valid number: {REMEDY} 60.0"),
    (
        {"lease_duration": True},
        f"lease_duration (keyword) should be a number of seconds, not true or false: {REMEDY} 60.0",
    ),
    (
        {"lease_duration": "five"},
        f"lease_duration (keyword) should be a valid number, unable to parse string as a number: {REMEDY} 60.0",
    ),
    ({"lease_duration": [5]}, f"lease_duration (keyword) should be a valid number: {REMEDY} 60.0"),
    ({"retry_interval": 0}, f"retry_interval (keyword) should be greater than 0: {REMEDY} 0.1"),
    ({"retry_interval": 1e-4}, f"retry_interval (keyword) should be greater than or equal to 0.001: {REMEDY} 0.1"),
    ({"retry_jitter": -0.1}, f"retry_jitter (keyword) should be greater than or equal to 0: {REMEDY} 0.1"),
    ({"retry_jitter": 1}, f"retry_jitter (keyword) should be less than 1: {REMEDY} 0.1"),
    (
        {"auto_renew": "maybe"},
        f"auto_renew (keyword) should be a valid boolean, unable to interpret input: {REMEDY} False",
    ),
    ({"max_hold": 0}, f"max_hold (keyword) should be greater than 0: {REMEDY} None"),
    ({"worker": 5}, f"worker (keyword) should be a valid string: {REMEDY} None"),
    ({"worker": ""}, f"worker (keyword) should have 1 to 128 characters without control characters: {REMEDY} None"),
    (
        {"worker": "a\nb"},
        f"worker (keyword) should have 1 to 128 characters without control characters: {REMEDY} None",
    ),
    (
        {"lease_duration": -1, "max_hold": -1},
        f"lease_duration (keyword) should be greater than 0: {REMEDY} 60.0; "
        f"Lock 'cart': max_hold (keyword) should be greater than 0: {REMEDY} None",
    ),
]


@pytest.mark.parametrize(("settings", "text"), KEYWORDS)
def test_a_keyword(settings: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        Lock("cart", **settings)  # type: ignore[arg-type]
    assert str(caught.value) == f"Lock 'cart': {text}"


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("GREL_LOCK_CART_LEASE_DURATION", "-5", f"should be greater than 0: {REMEDY} 60.0"),
        (
            "GREL_LOCK_CART_LEASE_DURATION",
            " ",
            f"should be a valid number, unable to parse string as a number: {REMEDY} 60.0",
        ),
        ("GREL_LOCK_LEASE_DURATION", "nan", f"should be greater than 0: {REMEDY} 60.0"),
        (
            "GREL_LOCK_LEASE_DURATION",
            "secret",
            f"should be a valid number, unable to parse string as a number: {REMEDY} 60.0",
        ),
    ],
)
def test_a_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsValidationError) as caught:
        Lock("cart")
    assert str(caught.value) == f"Lock 'cart': lease_duration (environment variable {variable}) {text}"


@pytest.mark.parametrize("kind", [Lock, TaskLock, LeaderElection])
@pytest.mark.parametrize("prefix", [5, b"SHOP_", ["SHOP_"], True])
def test_a_prefix(kind: type[Lock] | type[TaskLock] | type[LeaderElection], prefix: object) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        kind("cart", env_prefix=prefix)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"{kind.__name__} 'cart': env_prefix should be text, not {type(prefix).__name__}: "
        "give what the names of its environment variables begin with, such as 'SHOP_LOCK_'"
    )


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(SettingsValidationError) as caught:
        TaskLock("report", min_hold_duration=100)
    assert str(caught.value) == (
        "TaskLock 'report': (settings) min_hold_duration should be at most lease_duration: "
        "give values that satisfy it together with the defaults of those you leave out"
    )


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "is empty"),
        ("x" * 256, "has 256 characters"),
        ("a\nb", "has control characters"),
        ("a\x00b", "has control characters"),
        ("a\x85b", "has control characters"),
        ("a\ud800", "has control characters"),
        (5, "should be text, not int"),
        (None, "should be text, not NoneType"),
        (b"cart", "should be text, not bytes"),
    ],
)
@pytest.mark.parametrize("kind", [Lock, TaskLock])
def test_a_name(kind: type[Lock] | type[TaskLock], name: object, rule: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        kind(name)  # type: ignore[arg-type]
    assert str(caught.value) == f"{kind.__name__}: name {rule}: {NAME}"


@pytest.mark.parametrize("name", ["x" * 255, " ", "order:42", "日本語", "🔒" * 255, "a\u200bb", "{", "%s", "../.."])
def test_any_other_text_is_a_name(name: str) -> None:
    assert Lock(name).name == name


@pytest.mark.parametrize("timeout", [-1, -1e-9, math.nan, math.inf, 1e300, True, "5", [], 10**400])
async def test_a_timeout(timeout: object) -> None:
    text = "timeout should be a number of seconds, 0 or more and at most ten years: give it as int or float, such as 5"
    async with MemoryProvider().lock() as backend:
        lock = Lock("cart", backend=backend)
        with pytest.raises(SettingsValidationError) as caught:
            await lock.acquire(timeout=timeout)  # type: ignore[arg-type]
        assert str(caught.value) == text
        with pytest.raises(SettingsValidationError) as caught:
            lock.from_thread.acquire(timeout=timeout)  # type: ignore[arg-type]
        assert str(caught.value) == text
        assert not await lock.locked()


MEMORY = "the URL of the memory store is memory:// and has no path or options"
NAMESPACE = "namespace should be 1 to 63 letters, digits, '_', '-' or '.': name the application, such as 'shop'"

USES: list[tuple[str, Callable[[], object], str]] = [
    ("memory with a host", lambda: Coordination.from_url("memory://user:secret@host"), MEMORY),
    ("memory with an option", lambda: Coordination.from_url("memory://?secret=1"), MEMORY),
    ("namespace", lambda: Coordination.from_url("memory://", namespace="secret shop"), NAMESPACE),
    ("long namespace", lambda: MemoryProvider(namespace="x" * 64), NAMESPACE),
    (
        "no provider",
        lambda: Coordination(5),
        "Coordination takes a provider or a store first, not int: "
        "give a single backend as lock=, election= or schedule=",
    ),
    (
        "no backend",
        lambda: Coordination(lock=5),
        "Coordination lock= takes a provider, a store or a LockBackend, not int",
    ),
    (
        "unknown scope",
        lambda: Coordination(MemoryStore, requires="secret"),  # type: ignore[arg-type]
        "Coordination requires should be one of process, host, cluster",
    ),
    (
        "small scope",
        lambda: Coordination(MemoryStore, requires="host"),
        "Coordination requires='host', but MemoryStore coordinates within one process only: "
        "use a store that every worker can reach",
    ),
    (
        "retention",
        lambda: MemoryStore(retention=0),
        "retention should be a number of seconds, more than 0 and at most ten years: "
        "give it as int or float, such as 5",
    ),
]


@pytest.mark.parametrize(("use", "text"), [each[1:] for each in USES], ids=[each[0] for each in USES])
def test_a_use(use: Callable[[], object], text: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        use()
    assert str(caught.value).startswith(text)
    if not text.endswith(" "):
        assert str(caught.value) == text
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, GrelmicroError)
    assert isinstance(caught.value, ValueError)


def test_a_store_of_another_kind_is_named_in_the_urls(tmp_path: Path) -> None:
    assert Coordination.from_url("memory://").lock_backend.scope == "process"
    assert Coordination.from_url("MEMORY://", namespace="shop").lock_backend.scope == "process"
    assert Coordination.from_url(f"sqlite:///{tmp_path}/locks.db", requires="host").lock_backend.scope == "host"
