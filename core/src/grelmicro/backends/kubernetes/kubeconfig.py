"""Kubeconfig files: what is wrong with them is told in words, since waiting does not help.

The library says it, too, but with whole entries of the file in its texts, secrets among them. So none of its texts
about a kubeconfig are shown, and what it would stumble over is looked at before.
"""

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grelmicro.backends.kubernetes.library import YAMLError, load_yaml
from grelmicro.errors import SettingsValidationError

LISTS = {"clusters": "cluster", "contexts": "context", "users": "user"}
"""The lists of a kubeconfig, and what is in each entry beside its name."""

NOBODY = "nobody: the context names no user"


def files_of(paths: str) -> Iterator[Path]:
    """The files that there are of those that are named as in `KUBECONFIG`."""
    for path in paths.split(os.pathsep):
        if path and (file := Path(path).expanduser()).is_file():
            yield file


def check_file(path: Path) -> None:
    """Check the form of a file.

    Raises:
        SettingsValidationError: it is no kubeconfig.
        OSError: it cannot be read.
    """
    try:
        content = load_yaml(path.read_bytes())
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # its text may repeat a part of the file
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise _no_kubeconfig(path, f"it is no YAML{place}") from None
    if content is None:
        raise _no_kubeconfig(path, "it is empty")
    if not isinstance(content, dict):
        raise _no_kubeconfig(path, "it has no keys such as `clusters`")
    for key, part in LISTS.items():
        entries = content.get(key) or []
        if not isinstance(entries, list):
            raise _no_kubeconfig(path, f"{key} is no list")
        for entry in entries:
            if not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
                raise _no_kubeconfig(path, f"an entry of {key} has no name")
            if not isinstance(entry.get(part) or {}, dict):
                raise _no_kubeconfig(path, f"the {part} {entry['name']!r} has no keys")


class Choice:
    """What a context chooses of the kubeconfig that several files make together.

    Args:
        merged: as the library puts it together.
        title: what it is called in error texts.
        context: the context; None: the current one.

    Raises:
        SettingsValidationError: it chooses something that is not there, or is wrong.
    """

    def __init__(self, merged: dict[str, Any], title: str, context: str | None) -> None:
        self._merged = merged
        self._title = title
        self.context = self._context(context)
        of_context, _ = self._get("contexts", self.context)
        cluster, folder = self._get("clusters", self._named(of_context, "cluster"))
        if not of_context.get("user"):  # with TLS the library needs one
            of_context["user"] = NOBODY
            self._merged["users"].append({"name": NOBODY, "user": {}})
        self.user, folder_of_user = self._get("users", self._named(of_context, "user"))
        self.namespace = of_context.get("namespace")
        if not (isinstance(cluster.get("server"), str) and cluster["server"]):
            raise self._wrong("has no server in the cluster of that context: give its address")
        # The library looks for the client's certificate where the cluster's file is.
        for entry, key, base in (
            (cluster, "certificate-authority", folder),
            (self.user, "client-certificate", folder),
            (self.user, "client-key", folder),
            (self.user, "tokenFile", folder_of_user),
        ):
            self._check_content(entry, key, base)

    def _context(self, context: str | None) -> str:
        names = [_plain(each)["name"] for each in self._merged.get("contexts") or ()]
        current = self._merged.get("current-context")
        if context is not None:
            if context not in names:
                raise SettingsValidationError(
                    f"Kubernetes: context is none of those in {self._title}: "
                    "check the name with `kubectl config get-contexts`"
                )
            return context
        if not (isinstance(current, str) and current):
            raise self._wrong("has no current-context: give context, or set one with `kubectl config use-context`")
        if current not in names:
            raise self._wrong(f"has the current-context {current!r}, which is not in it: give context, or correct it")
        return current

    def _named(self, of_context: dict[str, Any], part: str) -> str:
        name = of_context.get(part)
        if not (isinstance(name, str) and name):
            raise self._wrong(f"has a context {self.context!r} that names no {part}: give a name")
        return name

    def _get(self, key: str, name: object) -> tuple[dict[str, Any], str]:
        """What an entry has, and the folder from which its files are looked for."""
        found = next((each for each in self._merged.get(key) or () if _plain(each)["name"] == name), None)
        if found is None:
            raise self._wrong(
                f"has a context {self.context!r} that names the {LISTS[key]} {name!r}, which is not in it: correct one"
            )
        entry, part = _plain(found), LISTS[key]
        # A key without a value is none, which the library does not know.
        entry[part] = {key: value for key, value in (entry.get(part) or {}).items() if value is not None}
        folder = os.path.dirname(os.path.abspath(getattr(found, "path", None) or ""))
        return entry[part], folder

    def _check_content(self, entry: dict[str, Any], key: str, folder: str) -> None:
        """Check what can be given as a file or in place."""
        in_place = "token" if key == "tokenFile" else f"{key}-data"
        if in_place in entry:
            if in_place != "token":
                try:
                    base64.standard_b64decode(entry[in_place] or "")
                except (ValueError, TypeError):
                    raise self._wrong(f"has a {in_place} that is not base64: copy it whole") from None
        elif key in entry:
            if not isinstance(entry[key], str):
                raise self._wrong(f"has a {key} that is no path: correct it")
            path = os.path.normpath(os.path.join(folder, entry[key]))
            if not os.path.isfile(path):
                raise self._wrong(f"names {path} as {key}, a file that does not exist: check the path")

    def _wrong(self, what: str) -> SettingsValidationError:
        return SettingsValidationError(f"Kubernetes: {self._title} {what}")


def _plain(entry: Any) -> dict[str, Any]:
    """An entry of a list; the library wraps it."""
    found: dict[str, Any] = getattr(entry, "value", entry)
    return found


def _no_kubeconfig(path: Path, why: str) -> SettingsValidationError:
    return SettingsValidationError(f"Kubernetes: {path} is no kubeconfig: {why}; check it with `kubectl config view`")
