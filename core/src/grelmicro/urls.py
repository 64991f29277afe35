"""The scheme of a store's URL, and what is wrong with text that is none."""

from collections.abc import Collection
from difflib import get_close_matches

from grelmicro.errors import SettingsValidationError

UNSUPPORTED_DRIVERS = {
    "sentinel": "Redis Sentinel is not supported: give redis:// and the address of the primary",
    "cluster": "Redis Cluster is not supported: give redis:// and the address of one server",
    "srv": "addresses in DNS records of type SRV are not supported: give host and port",
}
"""What follows the `+` of a scheme and is no driver, but another way to find the server."""

FILE_ENDINGS = (".db", ".sqlite", ".sqlite3")


def known_scheme(owner: str, url: object, schemes: Collection[str]) -> str:
    """The scheme of `url` without a driver: `postgresql` of `postgresql+psycopg://`.

    Args:
        owner: what takes the URL, for the error's text.
        url: what to look at.
        schemes: those that are known.

    Raises:
        SettingsValidationError: it is no URL, or its scheme is not known. The text never contains the URL.
    """
    text = check_url(owner, url, "sqlite:///locks.db, for example")
    if "://" not in text:
        raise SettingsValidationError(f"{owner}: url has no scheme: {_remedy_for_no_scheme(text, schemes)}")
    scheme, _, driver = text.partition("://")[0].lower().partition("+")
    if driver in UNSUPPORTED_DRIVERS:
        raise SettingsValidationError(f"{owner}: {UNSUPPORTED_DRIVERS[driver]}")
    if scheme not in schemes:
        near = get_close_matches(scheme, schemes, 1)
        hint = f"did you mean {near[0]}://? Or " if near else ""
        raise SettingsValidationError(f"{owner}: the URL's scheme is not known: {hint}begin it with {_list(schemes)}")
    return scheme


def check_url(owner: str, url: object, form: str) -> str:
    """`url`, if it is text, not empty, and without what a shell or an env file may have left around it.

    Args:
        owner: what takes the URL, for the error's text.
        url: what to look at.
        form: how it should look.

    Raises:
        SettingsValidationError: it is not.
    """
    if not isinstance(url, str):
        rule = f"should be text, not {type(url).__name__}"
    elif not url.strip():
        rule = "is empty"
    elif url[0] in "\"' \t\n" or url[-1] in "\"' \t\n":
        raise SettingsValidationError(f"{owner}: url has quotation marks or spaces around it: remove them")
    else:
        return url
    raise SettingsValidationError(f"{owner}: url {rule}: is the variable that it is read from set? Its form is {form}")


def _remedy_for_no_scheme(text: str, schemes: Collection[str]) -> str:
    if text.lower().endswith(FILE_ENDINGS):
        return (
            "did you mean a SQLite file? Write sqlite:/// before its path, as in sqlite:///locks.db, "
            "and sqlite://// before an absolute one"
        )
    return f"begin it with {_list(schemes)}"


def _list(schemes: Collection[str]) -> str:
    return " or ".join(f"{scheme}://" for scheme in schemes)
