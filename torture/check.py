"""The proof: a log is replayed, and what must hold on it is checked.

All processes run on one host and stamp what they do with one clock, `CLOCK_BOOTTIME`, so stamps of different processes
can be compared. A process may be stopped between any two of its steps, so no stamp says when something happened: it
happened between the stamp before and the stamp after. Each rule takes the end of that span which makes its claim
certain. So a finding is never the work of a slow machine; and a span is as short as a few microseconds where its
process was not stopped, so hardly anything hides in one.

**Two holders.** A *claim* lasts from the first look at which the product said "valid" (the stamp before it: it was
granted earlier, and valid at that look, so valid in between) until the first of: its holder began the release; the
holder knew of a loss (the stamp after); the local deadline. The deadline is what was last read of it: the stamp before
a look plus the seconds that it said are left. A look that said "valid" prolongs the claim to itself, whatever
deadline was told. A stopped or killed process looks at nothing, but whatever it ran in that time would have believed
the deadline: it counts until then. Claims of one name never overlap. Nothing is assumed of when the store granted,
and nothing is allowed for inaccuracy.

**The store agrees.** Overlaps need a second holder at the right moment. So each holder reads the store's record now
and then: when its claim covers the whole of that read, the record must be live and bear its fence. When the record does
bear the fence, a deadline that was seen before the read must lie before the expiry that the store told, by the share of
the lease that is given up for drift (for a leader: by what lies between its renew deadline and its lease). A tenth of
that share is allowed for the rates of two clocks, and a millisecond for rounding.

**Fences.** They never change in a claim, and no two claims of a name have the same. Who was granted before another one
asked has the lower fence. Of two claims that were held, the one that was seen first has the lower fence: as claims do
not overlap, that is the order in which the store granted them. (A grant that was over before its process could look is
no claim in this sense; the two rules before hold for it too.)

**Writes.** The resource decides about one write at a time and numbers what it accepts. An accepted fence is never lower
than one accepted before; a write that was decided within the claim of its writer is never refused. Losers go on writing
on purpose after they lost, so that there is something to refuse.

**Losses.** When the local deadline has passed, an observer in the same process proves that the event loop runs: a
*beat* is a short sleep and then several rounds of the loop, each of which runs all that is due. If a beat began after
the end was seen, and ended before the earliest possible expiry in the store, then the process was scheduled in time,
and the signals of the loss (`wait_lost` returned; the work in the block was cancelled) must have come before that
expiry. If it was not scheduled in time, the signals must have come by the end of the second beat. Without a beat the
process was stopped or killed, and nothing is asked of it. And a loss is final: what was seen lost is never valid again.

**Order.** No worker ends unless it is told to, none by an error that the documentation does not announce, all end when
they are asked to, and after that every name is free or becomes free by itself. At most one line for each kill is cut
short.

A store that forgets everything at a restart cannot keep two holders apart: whoever was granted before it may believe
in the lease until its deadline. So where such a restart may lie between the two grants concerned, the rules of
overlaps, of the record and of refused writes do not apply; fences and the resource must make up for it: theirs do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from torture.claims import Claim, History, Record, Span, Write

RATES = 0.001
"""The share of a lease by which two clocks of one host may differ after it."""

ROUNDING = 0.001
"""Seconds that a store may round."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def check(history: History) -> list[Violation]:
    """What is wrong with a run."""
    return [Violation(rule, text) for rule, find in RULES.items() for text in find(history)]


def two_holders(history: History) -> Iterator[str]:
    """Claims of one name that overlap."""
    for first, second in overlaps(history):
        if not history.wiped(first.asked, second.granted):
            yield (
                f"{second} was held at {second.start:.6f}, when {first} was held for another "
                f"{first.end - second.start:.6f} s"
            )


def overlaps(history: History) -> Iterator[tuple[Claim, Claim]]:
    """Pairs of claims of one name that overlap, for whatever reason; the one that began first is first."""
    for claims in history.by_name():
        present: list[Claim] = []
        for claim in claims:
            if claim.start < claim.end:
                present = [other for other in present if other.end > claim.start]
                yield from ((other, claim) for other in present)
                present.append(claim)


def store_disagrees(history: History) -> Iterator[str]:
    """Records that do not say what their holder believes."""
    for claim in history.claims.values():
        for record in claim.records:
            same = record.live and record.fence == claim.fence
            if not same and claim.covers(record) and not history.wiped(claim.asked, record.ended):
                state = f"held under fence {record.fence}" if record.live else "free"
                yield f"{claim} was held, and the store said at {record.began:.6f} that it is {state}"
            if same and (beyond := _beyond(claim, record)) > 0:
                yield (
                    f"{claim} had a deadline that was {beyond:.6f} s too late for the expiry "
                    f"that the store told at {record.began:.6f}"
                )


def _beyond(claim: Claim, record: Record) -> float:
    """By how much the deadline that was seen last before `record` was too late for it."""
    seen = [look.until for look in claim.looks if look.valid and look.ended <= record.began]
    return seen[-1] + claim.margin - record.expires - claim.lease * RATES - ROUNDING if seen else 0.0


def fences_fall(history: History) -> Iterator[str]:
    """Fences that repeat, fall or change."""
    for claims in history.by_name():
        yield from _changed(claims)
        yield from _repeated(claims)
        yield from _not_above_earlier(claims)
        yield from _not_in_order(history, claims)


def _changed(claims: Sequence[Claim]) -> Iterator[str]:
    for claim in claims:
        if fences := {look.fence for look in claim.looks} - {claim.fence}:
            yield f"{claim} was seen with fence {', '.join(map(str, sorted(fences)))} later"


def _repeated(claims: Sequence[Claim]) -> Iterator[str]:
    first: dict[int, Claim] = {}
    for claim in claims:
        if (other := first.setdefault(claim.fence, claim)) is not claim:
            yield f"{claim} has the fence of {other}"


def _not_above_earlier(claims: Sequence[Claim]) -> Iterator[str]:
    """Those that were asked for after a grant, but whose fence is lower."""
    by_grant = sorted(claims, key=lambda claim: claim.granted)
    highest: Claim | None = None
    position = 0
    for claim in sorted(claims, key=lambda claim: claim.asked):
        while position < len(by_grant) and by_grant[position].granted < claim.asked:
            if highest is None or by_grant[position].fence > highest.fence:
                highest = by_grant[position]
            position += 1
        if highest is not None and claim.fence < highest.fence:
            yield f"{claim} was asked for after {highest} was granted"


def _not_in_order(history: History, claims: Sequence[Claim]) -> Iterator[str]:
    """Those that were held after another one, but whose fence is lower."""
    highest: Claim | None = None
    for claim in claims:
        if claim.start == inf:
            continue
        if highest is not None and claim.fence < highest.fence:
            if not history.wiped(claim.asked, highest.granted):
                yield f"{claim} was held after {highest}"
        else:
            highest = claim


def stale_writes(history: History) -> Iterator[str]:
    """Writes that were accepted and should not, or the reverse."""
    names: dict[str, list[Write]] = {}
    for write in history.writes:
        if write.accepted:
            names.setdefault(write.name, []).append(write)
        else:
            yield from _refused_a_holder(history, write)
    for writes in names.values():
        yield from _accepted_stale(sorted(writes, key=lambda write: write.number))


def _accepted_stale(writes: Iterable[Write]) -> Iterator[str]:
    highest: Write | None = None
    for write in writes:
        if highest is not None and write.number == highest.number:
            yield f"{write} and {highest} were both accepted as number {write.number}"
        if highest is not None and write.fence < highest.fence:
            yield f"{write} was accepted after {highest}"
        else:
            highest = write


def _refused_a_holder(history: History, write: Write) -> Iterator[str]:
    claim = history.claims.get(write.claim)
    if claim is None or not claim.covers(Span(write.at, write.at)) or history.wiped(claim.asked, write.at):
        return
    yield f"{write} was refused although it was held, since fence {write.highest} was accepted before"


def late_losses(history: History) -> Iterator[str]:
    """Losses that were not signalled in time, or were taken back."""
    for claim in history.claims.values():
        valid = [look.valid for look in claim.looks]
        if False in valid and True in valid[valid.index(False) :]:
            yield f"{claim} was seen to be lost, and to be held again later"
        signals = {"wait_lost": claim.lost.get("signal", inf)}
        if claim.guarded:
            signals["the cancellation"] = min(claim.lost.get("cancelled", inf), claim.lost.get("looked", inf))
        limit = loss_limit(claim)
        for title, at in signals.items():
            if at > limit:
                yield f"{claim}: {title} came {_how_late(at, limit)} after {limit:.6f}, although the process ran"


def loss_limit(claim: Claim) -> float:
    """When a loss must have been signalled; infinite when it was no loss, or the process did not run."""
    if not claim.beats:
        return inf
    if in_time(claim):
        limit = claim.remote_expiry
    elif len(claim.beats) > 1:
        limit = claim.beats[1].ended
    else:
        return inf
    return limit if claim.released > limit else inf


def in_time(claim: Claim) -> bool:
    """Whether the process certainly ran between the end of the claim and the expiry in the store."""
    return bool(claim.beats) and claim.beats[0].ended <= claim.remote_expiry


def _how_late(at: float, limit: float) -> str:
    return "never" if at == inf else f"{at - limit:.6f} s"


def disorder(history: History) -> Iterator[str]:
    """Workers that did not run or end as they should."""
    for entry in history.of_kind("crash"):
        yield f"{entry.who} failed: {entry.facts['error'].strip().splitlines()[-1]} (line {entry.line})"
    for entry in history.of_kind("exit"):
        if entry.facts["code"] != 0 and not entry.facts["killed"]:
            yield f"{entry.facts['worker']} ended with code {entry.facts['code']} (line {entry.line})"
    cut, kills = history.of_kind("unreadable"), history.of_kind("kill")
    if len(cut) > len(kills):
        yield f"{len(cut)} lines of the log cannot be read after {len(kills)} kills; the first is {cut[0].line}"
    if not history.of_kind("over"):
        yield "the log has no end: the run was broken off"
    if not history.claims:
        yield "nothing was ever granted, so nothing is proved"


RULES: dict[str, Callable[[History], Iterator[str]]] = {
    "two holders": two_holders,
    "store": store_disagrees,
    "fence": fences_fall,
    "write": stale_writes,
    "loss": late_losses,
    "order": disorder,
}
