"""Find the backend of a primitive: the one it was given, else that of the app which serves the present code."""

import logging
import weakref
from typing import Any, Generic, TypeVar, cast

from grelmicro.context import App, active_app
from grelmicro.coordination.protocols import Backend
from grelmicro.errors import OutOfContextError, SettingsValidationError

logger = logging.getLogger("grelmicro.coordination")

B = TypeVar("B", bound=Backend)

_fitting: dict[type, weakref.WeakSet[type]] = {}
"""The classes that were found to be what a protocol asks for: to look at all its members takes longer than a lock."""


class BackendSource(Generic[B]):
    """Where one primitive gets its backend.

    Args:
        title: the primitive, for error texts, such as `Lock 'cart'`.
        slot: the property of the app's Coordination that serves it, such as `lock_backend`.
        protocol: what a given backend must be.
        asked: what the primitive was built with: a backend, a `Coordination` that has one, or the name of one; None:
            the app's own.
    """

    __slots__ = ("_app", "_found", "_slot", "_title", "asked", "given")

    def __init__(self, title: str, slot: str, protocol: type, asked: Any) -> None:
        self.asked = asked
        self.given: B | None = None
        if isinstance(asked, str) and (not asked or "://" in asked):
            raise SettingsValidationError(
                f"{title}: backend is text, but no name of a Coordination: give a URL to "
                "Coordination.from_url(url, name=), and its name here"
            )
        if asked is not None and not isinstance(asked, str):
            given = asked if _fits(asked, protocol) else getattr(asked, slot, None)
            if given is None:
                raise SettingsValidationError(
                    f"{title}: backend should be a {protocol.__name__}, a Coordination or the name of one, not "
                    f"{type(asked).__name__}: of a provider, pass provider.lock() or provider.leaderelection()"
                )
            self.given = cast(B, given)
        self._title = title
        self._slot = slot
        self._app: weakref.ref[App] | None = None
        self._found: B | None = None  # the backend of that app

    def find(self, *, any_loop: bool = False) -> B:
        """The backend to use now; `any_loop` for threads.

        Raises:
            OutOfContextError: no app serves this code, or it has none of that kind, or another app served before.
        """
        if self.given is not None:
            return self.given
        app = active_app(self._title, any_loop=any_loop)
        before = self._app() if self._app is not None else None
        if self._found is None or before is not app:
            self._stay(before, app)
            self._found = self.of(app)
        return self._found

    def of(self, app: App) -> B:
        """The backend to use in an app, whichever serves this code.

        Raises:
            OutOfContextError: it has none of that kind.
        """
        if self.given is not None:
            return self.given
        name = self.asked if isinstance(self.asked, str) else "default"
        return cast(B, getattr(app.get("coordination", name), self._slot))

    def _stay(self, before: App | None, app: App) -> None:
        """Never move silently from one app's store to another's: who holds it there does not exclude anyone here."""
        if before is app:
            return
        if before is not None and before.is_open:
            raise OutOfContextError(
                f"{self._title} was used with another app that is still open: "
                "build one for each app, with app.coordination.lock(...) or backend="
            )
        if before is not None:
            logger.warning("%s now uses another app than before, whose leases it knows nothing of", self._title)
        self._app, self._found = weakref.ref(app), None


def _fits(given: object, protocol: type) -> bool:
    known = _fitting.setdefault(protocol, weakref.WeakSet())
    if type(given) not in known:
        if not isinstance(given, protocol):
            return False
        known.add(type(given))
    return True
