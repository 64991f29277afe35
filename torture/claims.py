"""What a log says, by claim: each lease from its grant to its end, as the process that held it saw it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from torture.log import Entry


@dataclass(frozen=True, slots=True)
class Span:
    """Something that was asked and answered: it happened at an instant in between, which nobody knows exactly."""

    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Look(Span):
    """What the product said to its user."""

    valid: bool
    left: float
    fence: int

    @property
    def until(self) -> float:
        """A moment until which the product certainly believed itself to hold it, if nothing ended that."""
        return self.began + self.left


@dataclass(frozen=True, slots=True)
class Record(Span):
    """What the store said when its holder asked."""

    live: bool
    fence: int
    left: float

    @property
    def expires(self) -> float:
        """A moment after which the store may certainly give it to another, unless it is renewed after this."""
        return self.ended + self.left


@dataclass(slots=True)
class Claim:
    """One lease that a process was granted."""

    line: int
    who: str
    claim: str
    name: str
    fence: int
    asked: float
    granted: float
    lease: float
    margin: float
    """Seconds between its local deadline and the earliest moment at which the store may give it to another."""
    guarded: bool
    """A loss cancels the work."""
    looks: list[Look] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    beats: list[Span] = field(default_factory=list)
    """Proofs that the event loop ran after the end."""
    released: float = inf
    """When its holder began to give it up."""
    lost: dict[str, float] = field(default_factory=dict)
    """When which signal of a loss arrived."""

    @property
    def start(self) -> float:
        """When it was certainly held; infinite when it never was, since the grant came too late."""
        return self.looks[0].began if self.looks and self.looks[0].valid else inf

    @property
    def end(self) -> float:
        """Until when its holder certainly counted as one by the rule of local deadlines."""
        return min(self.deadline, self.released, self.known_lost)

    @property
    def deadline(self) -> float:
        """The last local deadline that was seen; where the product claimed more than that, the last claim."""
        return max((max(look.began, look.until) for look in self.looks if look.valid), default=-inf)

    @property
    def known_lost(self) -> float:
        """When its holder first knew of a loss."""
        seen = (look.ended for look in self.looks if not look.valid)
        return min([*self.lost.values(), next(seen, inf)])

    @property
    def remote_expiry(self) -> float:
        """The earliest moment at which the store may give it to another, by the last deadline that was seen."""
        return max((look.until + self.margin for look in self.looks if look.valid), default=-inf)

    def covers(self, span: Span) -> bool:
        """Whether it was held by the rule of local deadlines during the whole of a span."""
        return self.start <= span.began and span.ended < self.end

    def __str__(self) -> str:
        return f"{self.name} fence {self.fence} of {self.who} (line {self.line})"


@dataclass(frozen=True, slots=True)
class Write:
    """A decision of the resource."""

    line: int
    at: float
    claim: str
    name: str
    fence: int
    accepted: bool
    number: int
    highest: int

    def __str__(self) -> str:
        return f"{self.name} fence {self.fence} (line {self.line})"


@dataclass(slots=True)
class History:
    """A whole log."""

    claims: dict[str, Claim] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    wipes: list[Span] = field(default_factory=list)
    """Restarts over which the store forgot everything."""
    entries: dict[str, list[Entry]] = field(default_factory=dict)
    """All lines, by what they tell."""

    def of_kind(self, what: str) -> list[Entry]:
        """The lines that tell one thing."""
        return self.entries.get(what, [])

    def by_name(self) -> Iterator[list[Claim]]:
        """The claims of each name that were held at some moment, in the order of their beginnings."""
        names: dict[str, list[Claim]] = {}
        for claim in self.claims.values():
            names.setdefault(claim.name, []).append(claim)
        for claims in names.values():
            yield sorted(claims, key=lambda claim: claim.start)

    def wiped(self, after: float, before: float) -> bool:
        """Whether the store may have forgotten everything in that time."""
        return any(wipe.began <= before and after <= wipe.ended for wipe in self.wipes)


def history(entries: Iterable[Entry]) -> History:
    """Read a log."""
    found = History()
    for entry in entries:
        found.entries.setdefault(entry.what, []).append(entry)
        _add(found, entry, entry.facts)
    return found


def _add(found: History, entry: Entry, facts: Mapping[str, object]) -> None:
    """Put a line where it belongs. What is told of a claim whose grant is missing was cut off by a kill."""
    if entry.what == "grant":
        found.claims[entry.facts["id"]] = _claim(entry)
    elif entry.what == "write":
        found.writes.append(_write(entry))
    elif entry.what == "restart":
        if facts["forgets"]:
            found.wipes.append(Span(entry.at, entry.facts["until"]))
    elif (claim := found.claims.get(str(facts.get("id")))) is not None:
        _tell(claim, entry)


def _claim(entry: Entry) -> Claim:
    facts = entry.facts
    return Claim(
        line=entry.line,
        who=entry.who,
        claim=facts["id"],
        name=facts["name"],
        fence=facts["fence"],
        asked=facts["asked"],
        granted=entry.at,
        lease=facts["lease"],
        margin=facts["margin"],
        guarded=facts["guarded"],
    )


def _write(entry: Entry) -> Write:
    facts = entry.facts
    return Write(
        line=entry.line,
        at=entry.at,
        claim=facts["id"],
        name=facts["name"],
        fence=facts["fence"],
        accepted=facts["accepted"],
        number=facts["number"],
        highest=facts["highest"],
    )


def _tell(claim: Claim, entry: Entry) -> None:
    facts = entry.facts
    if entry.what == "look":
        claim.looks.append(Look(entry.at, facts["until"], facts["valid"], facts["left"], facts["fence"]))
    elif entry.what == "read":
        claim.records.append(Record(entry.at, facts["until"], facts["live"], facts["fence"], facts["left"]))
    elif entry.what == "beat":
        claim.beats.append(Span(entry.at, facts["until"]))
    elif entry.what == "release":
        claim.released = min(claim.released, entry.at)
    elif entry.what == "lost":
        claim.lost.setdefault(facts["via"], entry.at)
