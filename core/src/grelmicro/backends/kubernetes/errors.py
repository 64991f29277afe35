"""What an answer of the API server means, in words that show nothing of what was sent."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from grelmicro.backends.kubernetes.record import NAME
from grelmicro.errors import BackendUnavailableError

logger = logging.getLogger("grelmicro.coordination")

RESOURCE = "leases.coordination.k8s.io"

ROLE = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: grelmicro
  namespace: {namespace}
rules:
- apiGroups: ["coordination.k8s.io"]
  resources: ["leases"]
  verbs: ["get", "list", "watch", "create", "update"]"""

REASONS: Mapping[int, str] = {
    400: "does not accept it: {words}: check the admission webhooks of the cluster, and its version (1.14 or newer)",
    401: "does not accept the credentials, though they were read again: check the token or certificate of the service "
    "account or the kubeconfig",
    405: "does not allow it: check the address, and any proxy before it",
    408: "waited for the rest of the request in vain: check the network",
    410: "no longer has the version to go on from: list again",
    413: "finds it too large: keep less data with the lease",
    422: "finds the object invalid: {words}: check the policies of the cluster, and what else writes the object",
    429: "is too busy, for longer than the request may take: try again later, or raise request_timeout",
}
"""What a status means, with the server's own words in some, and the remedy."""

LASTING = frozenset((400, 401, 403, 404, 405, 413, 422))
"""The statuses that stay until a setting, here or there, is changed."""

LONGEST_TEXT = 200
"""Characters of a server's own words that are passed on."""

SHORTEST_SECRET = 6
"""Characters of a value that was sent from which on it is cut out of a text also where it has no quotation marks."""

HOLDER = re.compile(r"[0-9a-f]{16,}")
"""What proves ownership in a holder; the API server may know those of others."""

_told: set[tuple[str, str]] = set()
"""The verbs and namespaces of which the Role was logged in this process."""


class Gone(BackendUnavailableError):
    """The API server no longer has the version from which it should go on: list again."""


class ForbiddenError(BackendUnavailableError):
    """The rights of whoever asks do not suffice."""


def meaning(status: int, body: Mapping[str, Any], verb: str, namespace: str, content: bytes | None) -> str:
    """Why the API server did not do it, and what to do; follows its name in a sentence.

    `content` is what was sent: of its values, such as a holder, nothing is repeated.
    """
    if status == 403:
        return _forbidden(body, verb, namespace)
    if status == 404:
        return f"has no namespace {namespace}: create it, or name another one"
    if 300 <= status < 400:
        return f"answered {status}, a redirection: give the address of the API server itself"
    known = REASONS.get(status)
    if known is not None:
        return known.format(words=_words(body, content))
    return f"answered {status}{_named(body)}: check the log of the API server"


def _forbidden(body: Mapping[str, Any], verb: str, namespace: str) -> str:
    message = str(body.get("message", ""))
    if "NamespaceTerminating" in str(body.get("details", "")):
        return f"takes nothing new in namespace {namespace}, which is being deleted: use another one"
    found = re.search(r'User "([^"]*)" cannot ', message)
    if found is None:
        return f"refused to {verb} {RESOURCE} in namespace {namespace}: {message[:LONGEST_TEXT] or 'it gave no reason'}"
    if (verb, namespace) not in _told:
        _told.add((verb, namespace))
        logger.warning(
            "%s may not %s leases.coordination.k8s.io in namespace %s: "
            "apply this Role, and bind it to that user or service account:%s",
            found[1],
            verb,
            namespace,
            "\n" + ROLE.format(namespace=namespace),
        )
    return f"does not let {found[1]} {verb} {RESOURCE} in namespace {namespace}: bind a Role that allows it"


def _words(body: Mapping[str, Any], content: bytes | None) -> str:
    """The server's own words, without the values that were sent: neither whole, nor the parts that it quotes."""
    sent = _values_of(content) if content is not None else []

    def quoted(found: re.Match[str]) -> str:
        inner = found[1].replace('\\"', '"')
        return '"..."' if inner and any(inner in value for value in sent) else found[0]

    text = HOLDER.sub("...", " ".join(str(body.get("message", "")).split()))
    text = re.sub(r'"((?:[^"\\]|\\.)*)"', quoted, text)
    for value in sorted(sent, key=len, reverse=True):
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "...")
    return text[:LONGEST_TEXT].rstrip(".: ") or "it gave no reason"


def _values_of(content: bytes) -> list[str]:
    """What a Lease object says that may be secret: the texts in its spec and its annotations."""
    found = json.loads(content)
    annotations = found["metadata"].get("annotations") or {}
    texts = list(_texts([found.get("spec"), {name: text for name, text in annotations.items() if name != NAME}]))
    for text in texts.copy():
        with suppress(ValueError):  # the data is JSON in a text
            texts += _texts(json.loads(text))
    return texts


def _texts(thing: object) -> Iterator[str]:
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, list):
        for each in thing:
            yield from _texts(each)
    elif isinstance(thing, str):
        yield thing


def _named(body: Mapping[str, Any]) -> str:
    """The reason of a `Status`, which is one word; its message may repeat what was sent."""
    reason = str(body.get("reason", ""))
    return f" {reason}" if reason.isalnum() and len(reason) < 64 else ""
