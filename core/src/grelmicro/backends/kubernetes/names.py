"""The names of Lease objects: legal in Kubernetes, one for each name, and readable where that can be."""

import re
from base64 import b32encode
from hashlib import sha256

LONGEST = 253
"""Characters of an object's name, at most."""

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_READABLE = re.compile(rf"({_LABEL.pattern}):({_LABEL.pattern}(?:\.{_LABEL.pattern})*)")
_HASHED = re.compile(r"(?:.*\.)?h-[a-z2-7]{20}")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_OTHERS = re.compile(r"[^a-z0-9]+")


def lease_name(prefix: str, name: str) -> str:
    """The name of the Lease object that keeps `name`; no other prefix and name have the same one.

    A name such as `lock:cart`, of small letters, digits, `-` and `.`, is readable: `grelmicro.lock.cart`. Any other
    gets a hash, as `grelmicro.lock.order-42.h-` and 20 letters or digits for `lock:order:42`.

    Args:
        prefix: of the store, `grelmicro` by default.
        name: what is stored: the kind, a colon, and the name that the application gave.
    """
    parts = _READABLE.fullmatch(name)
    if parts is not None and _LABEL.fullmatch(prefix):
        plain = f"{prefix}.{parts[1]}.{parts[2]}"
        if len(plain) <= LONGEST and not _HASHED.fullmatch(plain):
            return plain
    kind, _, rest = name.partition(":")
    return _hashed([prefix, kind, rest], f"{len(prefix)}:{prefix}{name}")


def hints_name(prefix: str) -> str:
    """The name of the Lease object over which a process tests its watch; `lease_name` never gives it."""
    if _LABEL.fullmatch(prefix):
        return f"{prefix}.hints"
    return _hashed([prefix, "hints"], f"hints:{prefix}")


def prefix_label(prefix: str) -> str:
    """The value of the label by which the objects of a store are found; one for each prefix."""
    if _LABEL_VALUE.fullmatch(prefix) and not _HASHED.fullmatch(prefix):
        return prefix
    return _hashed([prefix], f"label:{prefix}", longest=63)


def _hashed(parts: list[str], text: str, longest: int = LONGEST) -> str:
    """What is readable of `parts`, and a hash of `text`."""
    digest = sha256(text.encode(errors="surrogatepass")).digest()
    suffix = "h-" + b32encode(digest).decode().lower()[:20]
    slugs = [_OTHERS.sub("-", part.lower()).strip("-") for part in parts]
    readable = ".".join(slug for slug in slugs if slug)[: longest - len(suffix) - 1].rstrip("-.")
    return f"{readable}.{suffix}" if readable else suffix
