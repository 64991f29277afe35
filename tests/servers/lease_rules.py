"""What an API server demands of a Lease, and what it keeps of one: for the imitation in `leases_api.py`."""

import re
from collections.abc import Callable, Iterator
from typing import Any

Object = dict[str, Any]

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_KEY = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
ANNOTATIONS = 256 * 1024
"""Bytes that all annotations of an object may have together."""

INT32 = range(-(2**31), 2**31)


def is_int32(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in INT32


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_time(value: object) -> bool:
    return isinstance(value, str) and MICRO_TIME.fullmatch(value) is not None


def is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


SPEC: dict[str, Callable[[object], bool]] = {
    "holderIdentity": is_text,
    "leaseDurationSeconds": is_int32,
    "acquireTime": is_time,
    "renewTime": is_time,
    "leaseTransitions": is_int32,
    "strategy": is_text,
    "preferredHolder": is_text,
}
"""The fields of a Lease's spec; the last two came with Kubernetes 1.31."""

METADATA: dict[str, Callable[[object], bool]] = {
    "name": is_text,
    "namespace": is_text,
    "uid": is_text,
    "resourceVersion": is_text,
    "creationTimestamp": is_text,
    "labels": is_texts,
    "annotations": is_texts,
    "ownerReferences": lambda value: isinstance(value, list),
    "finalizers": lambda value: isinstance(value, list),
}
"""The fields of an object's metadata that matter here."""


def decoded(body: Object) -> Object:
    """The object as the server understands it: without fields that it does not know.

    Raises:
        ValueError: a field is not of its type, which is answered with 400.
    """
    if body.get("kind", "Lease") != "Lease" or body.get("apiVersion", "coordination.k8s.io/v1") != (
        "coordination.k8s.io/v1"
    ):
        raise ValueError(f"{body.get('apiVersion')}, Kind={body.get('kind')} is not what the address is for")
    return {
        "kind": "Lease",
        "apiVersion": "coordination.k8s.io/v1",
        "metadata": {field: value for field, value in _part(body, "metadata", METADATA).items() if value != ""},
        "spec": _part(body, "spec", SPEC),
    }


def _part(body: Object, part: str, fields: dict[str, Callable[[object], bool]]) -> Object:
    given = body.get(part) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{part} is no object")
    kept = {field: value for field, value in given.items() if field in fields and value is not None}
    for field, value in kept.items():
        if not fields[field](value):
            raise ValueError(f"{part}.{field}: {value!r} cannot be read")
    return kept


def faults(lease: Object) -> Iterator[str]:
    """What is wrong with a Lease whose fields are of their types, which is answered with 422."""
    metadata, spec = lease["metadata"], lease["spec"]
    name = metadata.get("name", "")
    if not NAME.fullmatch(name) or len(name) > 253:
        yield f"metadata.name: {name!r} is no lowercase RFC 1123 subdomain of at most 253 characters"
    for key, value in metadata.get("labels", {}).items():
        if not is_key(key):
            yield f"metadata.labels: {key!r} is no qualified name"
        if not LABEL_VALUE.fullmatch(value):
            yield f"metadata.labels: {value!r} is no label's value"
    for key in metadata.get("annotations", {}):
        if not is_key(key.lower()):
            yield f"metadata.annotations: {key!r} is no qualified name"
    if sum(len(part.encode()) for item in metadata.get("annotations", {}).items() for part in item) > ANNOTATIONS:
        yield f"metadata.annotations: must have at most {ANNOTATIONS} bytes"
    if spec.get("leaseDurationSeconds", 1) <= 0:
        yield "spec.leaseDurationSeconds: must be greater than 0"
    if spec.get("leaseTransitions", 0) < 0:
        yield "spec.leaseTransitions: must be greater than or equal to 0"


def is_key(key: str) -> bool:
    """Whether it is a name with or without a prefix that is a domain."""
    prefix, slash, name = key.rpartition("/")
    return LABEL_KEY.fullmatch(name) is not None and (
        not slash or (NAME.fullmatch(prefix) is not None and len(prefix) <= 253)
    )
