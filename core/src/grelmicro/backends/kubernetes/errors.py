"""What an answer of the API server means, in words that show nothing of what was sent."""

import logging
import re
from collections.abc import Mapping
from typing import Any

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
    400: "does not understand it: check that it is the API server of Kubernetes 1.14 or newer",
    401: "does not accept the credentials, though they were read again: check the token or certificate of the service "
    "account or the kubeconfig",
    405: "does not allow it: check the address, and any proxy before it",
    408: "waited for the rest of the request in vain: check the network",
    410: "no longer has the version to go on from: list again",
    413: "finds it too large: keep less data with the lease",
    422: "finds the object invalid: check what else writes it",
    429: "is too busy, for longer than the request may take: try again later, or raise request_timeout",
}
"""What a status means, and the remedy."""

LONGEST_TEXT = 200
"""Characters of a server's own words that are passed on."""

_told: set[tuple[str, str]] = set()
"""The verbs and namespaces of which the Role was logged in this process."""


class Gone(BackendUnavailableError):
    """The API server no longer has the version from which it should go on: list again."""


class ForbiddenError(BackendUnavailableError):
    """The rights of whoever asks do not suffice."""


def meaning(status: int, body: Mapping[str, Any], verb: str, namespace: str) -> str:
    """Why the API server did not do it, and what to do; follows its name in a sentence."""
    if status == 403:
        return _forbidden(body, verb, namespace)
    if status == 404:
        return f"has no namespace {namespace}: create it, or name another one"
    if 300 <= status < 400:
        return f"answered {status}, a redirection: give the address of the API server itself"
    known = REASONS.get(status)
    if known is not None:
        return known
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


def _named(body: Mapping[str, Any]) -> str:
    """The reason of a `Status`, which is one word; its message may repeat what was sent."""
    reason = str(body.get("reason", ""))
    return f" {reason}" if reason.isalnum() and len(reason) < 64 else ""
