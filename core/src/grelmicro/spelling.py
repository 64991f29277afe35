"""Environment variables that set nothing, and the ones that were probably meant."""

import logging
from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher

logger = logging.getLogger("grelmicro.config")

NEAR = 0.8
"""How alike two names are, from 0 to 1, before one is taken for a misspelling of the other."""

_warned: set[str] = set()


def warn_of_unknown(kind: str, fields_of: Mapping[str, Collection[str]], variables: Iterable[str]) -> None:
    """Log one warning, once in a process, for each variable of a kind that sets nothing.

    Args:
        kind: the kind of settings, such as `LEADERELECTION`.
        fields_of: the settings of each kind, in upper case.
        variables: the names of environment variables.
    """
    for variable in variables:
        if variable in _warned or (problem := _problem(variable, kind, fields_of)) is None:
            continue
        _warned.add(variable)
        logger.warning("environment variable %s is not known and sets nothing: %s", variable, problem)


def _problem(variable: str, kind: str, fields_of: Mapping[str, Collection[str]]) -> str | None:
    """What to do about a variable; None where it is known, or is of another kind."""
    own, fields = f"GREL_{kind}_", fields_of[kind]
    rest = variable.removeprefix(own)
    if rest == variable:
        return _split_kind(variable, kind, fields)
    if any(rest == field or rest.endswith(f"_{field}") for field in fields):
        return None
    if meant := _nearest(rest, fields):
        return f"did you mean {own}{meant}?"
    others = (_split_kind(variable, other, theirs) for other, theirs in fields_of.items())
    return next(filter(None, others), f"the settings of {own}... are {', '.join(fields)}")


def _split_kind(variable: str, kind: str, fields: Collection[str]) -> str | None:
    """What is meant by a variable whose kind is written with underscores; None where it is not."""
    meant = _nearest(_after_split_kind(variable, kind), fields)
    return f"did you mean GREL_{kind}_{meant}?" if meant else None


def _after_split_kind(variable: str, kind: str) -> str:
    """What follows a kind that is written with underscores, as in `GREL_LEADER_ELECTION_...`; "" where it is not."""
    segments = variable.removeprefix("GREL_").split("_")
    for count in range(2, len(segments)):
        if "".join(segments[:count]) == kind:
            return "_".join(segments[count:])
    return ""


def _nearest(rest: str, fields: Iterable[str]) -> str:
    """`rest` with its end replaced by the field that it is most like; "" where it is like none."""
    segments = rest.split("_")
    best, likeness = "", NEAR
    for start in range(len(segments)):
        end = "_".join(segments[start:])
        for field in fields:
            alike = SequenceMatcher(None, end, field).ratio()
            if alike > likeness:
                best, likeness = "_".join([*segments[:start], field]), alike
    return best
