"""Keywords that a class does not know, and the ones that were probably meant."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import NoReturn

LEASE = "lease_duration= says how many seconds it may be held without a renewal"
INTERVAL = "seconds= takes a number of seconds, or a timedelta"
WAIT = "acquire(timeout=) says how long a caller waits"

MEANT: Mapping[str, str] = {
    **dict.fromkeys(("microseconds", "milliseconds", "minutes", "hours", "days", "weeks"), INTERVAL),
    "blocking": "acquire_nowait() does not wait",
    "blocking_timeout": WAIT,
    "duration": LEASE,
    "expire": LEASE,
    "expires": LEASE,
    "namespace": "Coordination.from_url(url, namespace=) sets it",
    "timeout": f"{WAIT}, and {LEASE}",
    "ttl": LEASE,
}
"""What other libraries call a setting, and what it is here."""


def refuse_keywords(owner: str, unknown: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Raise the `TypeError` of Python for a keyword that is not known, with a hint.

    Args:
        owner: what was called, such as `Lock`.
        unknown: the keywords that it does not know.
        known: those that it knows.
    """
    keyword = next(iter(unknown))
    known = list(known)
    begins = [name for name in known if name.startswith(keyword)]
    if near := begins or get_close_matches(keyword, known, 1):
        hint = f"did you mean {near[0]}=?"
    else:
        hint = MEANT.get(keyword) or f"it knows {', '.join(f'{name}=' for name in known)}"
    raise TypeError(f"{owner}() got an unexpected keyword argument '{keyword}': {hint}")
