"""What a merge of two sides would do, told before anything is written."""

from collections.abc import Iterable
from dataclasses import dataclass

from autoflash.store.digest import unique
from autoflash.store.merge import Key, grouped, why, winner, words
from autoflash.store.record import TuningRecord


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key of which the two sides don't hold the same records.

    ``wins`` is 'ours', 'theirs', 'both' (the same record stands on both sides, but the histories
    differ) or 'neither' (what stood on one side is taken back by the other). ``stands`` is the
    record that stands once they are merged; ``reason`` says why.
    """

    key: Key
    wins: str
    reason: str
    stands: TuningRecord
    ours: TuningRecord | None
    theirs: TuningRecord | None
    only_ours: int
    only_theirs: int


def differences(ours: Iterable[TuningRecord], theirs: Iterable[TuningRecord]) -> list[Difference]:
    """What differs, by target and bucket; nothing if both sides hold the same records."""
    left, right = grouped(ours), grouped(theirs)
    found = []
    for key in {**left, **right}:
        a, b = unique(left.get(key, [])), unique(right.get(key, []))
        if a.keys() != b.keys():
            found.append(_difference(key, a, b))
    return sorted(found, key=lambda d: (repr(d.key.target), d.key.bucket.label(), d.key.kernel))


def _difference(key: Key, a: dict[str, TuningRecord], b: dict[str, TuningRecord]) -> Difference:
    everything = {**a, **b}
    stands = winner(everything.values())
    assert stands is not None, "a key without records"
    ours, theirs = winner(a.values()), winner(b.values())
    wins = {
        (True, True): "both",
        (True, False): "ours",
        (False, True): "theirs",
        (False, False): "neither",
    }[stands == ours, stands == theirs]
    return Difference(
        key=key,
        wins=wins,
        reason=_reason(stands, ours, theirs, words(everything.values())),
        stands=stands,
        ours=ours,
        theirs=theirs,
        only_ours=len(a.keys() - b.keys()),
        only_theirs=len(b.keys() - a.keys()),
    )


def _reason(
    stands: TuningRecord,
    ours: TuningRecord | None,
    theirs: TuningRecord | None,
    standing: list[TuningRecord],
) -> str:
    if ours is None or theirs is None:
        return "known to one side alone"
    beaten = ours if stands != ours else theirs
    if beaten == stands:
        return "the same record stands; the histories differ"
    # Its origin has said something else since: that decides before any comparison between origins.
    if beaten not in standing:
        word = next(w for w in standing if w.provenance.origin == beaten.provenance.origin)
        return f"{why(word, beaten)}: its own origin's word of {word.provenance.created_at[:10]}"
    return why(stands, beaten)
