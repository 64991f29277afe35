"""The names of the locks under which views and functions run, made of what they are called with."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from typing import Any, Literal, get_args

from asgiref.sync import sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest

from grelmicro.callables import Parameters, title_of
from grelmicro.coordination import LockTemplate
from grelmicro.errors import SettingsValidationError

Anonymous = Literal["session", "share"]

Value = Callable[..., object]
"""Makes the value of a field of what the view is called with."""

REQUEST = "request"
USER = f"{REQUEST}.user"

DIGEST_LENGTH = 32
"""Characters that stand for the key of a session, which is a secret."""


def request_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """The request with which a view is called, or a method of one; None where there is none.

    That of Django REST framework has Django's inside.
    """
    for value in (*args[:2], kwargs.get(REQUEST)):
        if isinstance(value, HttpRequest) or isinstance(getattr(value, "_request", None), HttpRequest):
            return value
    return None


class Naming:
    """The name of the lock for each call of a function.

    Args:
        template: has the name.
        function: what is called.
        values: make the values of fields.
        anonymous: what a user stands for who is not logged in; None: such a request is refused.

    Raises:
        SettingsValidationError: a field has no value, or a value no field.
    """

    def __init__(
        self,
        template: LockTemplate,
        function: Callable[..., Any],
        values: Mapping[str, Value],
        anonymous: Anonymous | None,
    ) -> None:
        self._template = template
        self._text = template.template.text
        self._title = title_of(function)
        self._fields = template.template.fields
        self._values = values
        self._anonymous = anonymous
        self._parameters = Parameters(function, follow_wrapped=not _takes_other_arguments(function))
        names = [name for _, name in template.template.parts if name is not None]
        self._has_user = any(name == USER or name.startswith(f"{USER}.") for name in names)
        self._has_arguments = any(field not in values for field in self._fields)
        for field in self._fields:
            if field not in values and field != REQUEST and not self._parameters.has(field):
                raise SettingsValidationError(
                    f"lock name {self._text!r} has the field {{{field}}}, but {self._title} has no such parameter: it "
                    f"has {', '.join(self._parameters.names) or 'none'}"
                )

    def name(self, args: tuple[object, ...], kwargs: Mapping[str, object], request: Any) -> str:
        """The name for a call.

        Raises:
            BadRequest: the client sent no value for it, as of a header.
            PermissionDenied: it is made of the user, and there is none.
            SettingsValidationError: a value is missing, or is none that can stand in a name.
        """
        if not self._fields:
            return self._text_of({})
        made = {field: make(*args, **kwargs) for field, make in self._values.items()}
        for value in made.values():
            if inspect.isawaitable(value):
                _close(value)
                raise TypeError(f"{self._title} is not async, and a value of its lock's name is: make it without async")
        user = self._known(request, request.user) if self._asks_user(request) else None
        return self._text_of(self._all(args, kwargs, request, user, made))

    async def aname(self, args: tuple[object, ...], kwargs: Mapping[str, object], request: Any) -> str:
        """The same for a call of what is async: the user is looked up in a thread, and values may be awaited."""
        if not self._fields:
            return self._text_of({})
        made: dict[str, object] = {}
        for field, make in self._values.items():
            value = make(*args, **kwargs)
            made[field] = await value if inspect.isawaitable(value) else value
        user = None
        if self._asks_user(request):
            look_up = getattr(request, "auser", None)
            found = await (look_up() if look_up is not None else sync_to_async(_look_up)(request))
            user = await sync_to_async(self._known)(request, found)
        return self._text_of(self._all(args, kwargs, request, user, made))

    def _text_of(self, values: Mapping[str, object]) -> str:
        try:
            return self._template.name(values)
        except KeyError as missing:
            field = str(missing.args[0])
        if field.startswith(f"{REQUEST}."):
            raise BadRequest(f"the request has no {{{field}}}, of which the lock name {self._text!r} is made")
        known = ", ".join(values) or "none"
        raise SettingsValidationError(
            f"lock name {self._text!r} has the field {{{field}}}, but {self._title} was called without it: it was "
            f"called with {known}"
        )

    def _all(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        request: Any,
        user: object,
        made: Mapping[str, object],
    ) -> Mapping[str, object]:
        if not self._has_arguments:
            return made
        arguments = self._parameters.arguments(args, kwargs)
        if request is None:
            return {**arguments, **made}
        return {**arguments, REQUEST: request if user is None else _Request(request, user), **made}

    def _asks_user(self, request: Any) -> bool:
        if not self._has_user or request is None:
            return False
        if not hasattr(request, "user"):
            raise SettingsValidationError(
                f"lock name {self._text!r} has the user of the request, but the request has none: add "
                "django.contrib.auth.middleware.AuthenticationMiddleware to MIDDLEWARE"
            )
        return True

    def _known(self, request: Any, user: Any) -> object:
        """What stands for the user in a name.

        Raises:
            PermissionDenied: nobody is logged in.
        """
        if user.is_authenticated or self._anonymous == "share":
            return user
        if self._anonymous == "session":
            return _Session(request)
        raise PermissionDenied(
            f"lock name {self._text!r} is made of the user of the request, who is not logged in: write "
            "@login_required above @locked, or anonymous='session' or 'share'"
        )


def check_anonymous(title: str, anonymous: object) -> None:
    """Raise `SettingsValidationError` unless it is one of the choices, or None."""
    if anonymous is not None and anonymous not in get_args(Anonymous):
        raise SettingsValidationError(f"{title}: anonymous should be 'session', 'share' or None")


def check_values(title: str, fields: tuple[str, ...], values: Mapping[str, object]) -> None:
    """Raise `SettingsValidationError` unless each value is a function, and one of a field."""
    for name, value in values.items():
        if name not in fields:
            raise SettingsValidationError(
                f"{title}: '{name}' is neither a setting nor a field of the name, whose fields are "
                f"{', '.join(fields) or 'none'}: leave it out, or write {{{name}}} in the name"
            )
        if not callable(value):
            raise SettingsValidationError(
                f"{title}: '{name}' should be a function that makes the value, called with what the view is called "
                f"with, as in {name}=lambda request, **kwargs: ..."
            )


class _Request:
    """A request in a name, whose user is known."""

    def __init__(self, request: Any, user: object) -> None:
        self._request = request
        self.user = user

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


class _Session:
    """Stands for a user who is not logged in: each attribute, such as `pk`, tells the session."""

    def __init__(self, request: Any) -> None:
        if not hasattr(request, "session"):
            raise SettingsValidationError(
                "anonymous='session' needs sessions: add django.contrib.sessions.middleware.SessionMiddleware to "
                "MIDDLEWARE"
            )
        if request.session.session_key is None:
            request.session.create()
        key: str = request.session.session_key
        self._text = f"session-{sha256(key.encode()).hexdigest()[:DIGEST_LENGTH]}"

    def __getattr__(self, name: str) -> str:
        return self._text

    def __str__(self) -> str:
        return self._text


def _takes_other_arguments(function: Callable[..., Any]) -> bool:
    """Whether it has what it wraps from Django, although it is called in another way: without `self`."""
    return isinstance(function, partial) or hasattr(function, "view_class")


def _look_up(request: Any) -> Any:
    user = request.user
    bool(user.is_authenticated)  # else it is looked up later, on the event loop
    return user


def _close(value: object) -> None:
    if inspect.iscoroutine(value):
        value.close()
