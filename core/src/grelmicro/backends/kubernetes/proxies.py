"""The proxy that the environment names for the API server, by the rules of kubectl and client-go."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.request import getproxies, getproxies_environment, proxy_bypass

from grelmicro.backends.kubernetes.library import URL

PORTS = {"http": 80, "https": 443}
"""The port of a URL that names none."""


def proxy_for(server: str) -> str | None:
    """The proxy on the way to `server`, a URL; None: it is reached directly.

    The variables are `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, in capital or small letters. Without any of them, the
    proxy settings of the system count, if there are any.
    """
    url = URL(server)
    if url.host is None:
        return None
    variables = getproxies_environment()
    if not variables:
        return None if proxy_bypass(url.host) else getproxies().get(url.scheme)
    proxy = variables.get(url.scheme)
    if not proxy or _is_excluded(url.host, url.port or PORTS.get(url.scheme, 0), variables.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_excluded(host: str, port: int, rules: str) -> bool:
    """Whether `NO_PROXY` lists a server; this machine itself always counts as listed, as with kubectl."""
    host = host.lower()
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(_fits(rule.strip().lower(), host, port) for rule in rules.split(","))


def _fits(rule: str, host: str, port: int) -> bool:
    """Whether one entry of `NO_PROXY` lists a server: `*`, a network, or an address or domain with or without port."""
    if rule == "*":
        return True
    address = _address(host)
    if "/" in rule:
        try:
            return address is not None and address in ip_network(rule, strict=False)
        except ValueError:
            return False
    name, only_port = _split(rule)
    if not name or (only_port and only_port != str(port)):
        return False
    listed = _address(name)
    if address is not None or listed is not None:
        return address == listed
    if name.startswith("*."):
        name = name[1:]
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")


def _split(rule: str) -> tuple[str, str]:
    """The name or address in an entry, and the port if it has one."""
    if rule.startswith("["):
        name, _, rest = rule[1:].partition("]")
        return name, rest.removeprefix(":")
    if rule.count(":") == 1:
        name, _, port = rule.partition(":")
        return name, port
    return rule, ""


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """The address that `host` is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None
