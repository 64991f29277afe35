"""The URLs of Kubernetes namespaces, read strictly: one that is misread leads to leases that nobody shares."""

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from grelmicro.errors import SettingsValidationError
from grelmicro.urls import check_url

KNOWN = ("context", "kubeconfig", "prefix")

FORM = "kubernetes://namespace?context=...&kubeconfig=/path/to/config&prefix=..., each part of which can be left out"


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL says."""

    namespace: str | None
    kubeconfig: str | None
    context: str | None
    prefix: str | None


def parse(url: str) -> Address:
    """What a URL says; the namespace is checked elsewhere.

    Raises:
        SettingsValidationError: it has another form, or an option that is not known.
    """
    check_url("Kubernetes", url, FORM)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _wrong("has another form") from None
    if parts.scheme != "kubernetes":
        raise _wrong("begins with another scheme")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise _wrong(
            "has a user, a password or a port: the kubeconfig or the service account tells where the API server is, "
            "and who asks"
        )
    if parts.path not in ("", "/") or parts.fragment or "#" in url:
        raise _wrong("has more than a namespace and options")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if options.keys() - set(KNOWN):
        raise SettingsValidationError(
            f"Kubernetes: url has an option that is not known: those of kubernetes:// are {', '.join(KNOWN)}"
        )
    if len(pairs) > len(options):
        raise _wrong("has an option twice")
    if not all(options.values()):
        raise _wrong("has an option without a value")
    return Address(
        namespace=unquote(parts.netloc) or None,
        kubeconfig=options.get("kubeconfig"),
        context=options.get("context"),
        prefix=options.get("prefix"),
    )


def _wrong(rule: str) -> SettingsValidationError:
    return SettingsValidationError(f"Kubernetes: url {rule}; give {FORM}")
