"""Merging records by evidence: which of several stands, and why. Pure functions over lists.

A merge is a union: every record of both sides stays, as the history. Who stands is a function of
that set alone, so it can't depend on who was merged first, in which order or how often:

1. Of what one origin said of a key (kernel, bucket, target), its *word* stands: measured before
   predicted, clean before noisy, then the newest. A re-tune times the old winner again.
2. Of the words of several origins, whose dates say nothing of each other: measured before
   predicted, clean before noisy, the newer versions (triton, torch, driver), more repeats, the
   higher rate (the lower time, where the problem is the same), then the lower digest.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autoflash.problem import Bucket
from autoflash.store.digest import Tie, record_digest, unique
from autoflash.store.record import TuningRecord

_VERSION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})*)(.*)", re.DOTALL)
_PRE_RELEASE = re.compile(r"[._-]?(?:a|b|c|rc|alpha|beta|dev|pre)(?:[^a-z]|$)")


@dataclass(frozen=True)
class Key:
    """What records compete for."""

    kernel: str
    bucket: Bucket
    target: tuple[object, ...]


Groups = dict[Key, list[TuningRecord]]


def key_of(record: TuningRecord) -> Key:
    """The key of ``record``."""
    return Key(record.kernel, record.bucket, record.target.identity)


@functools.lru_cache(maxsize=4096)
def parse_version(text: str) -> tuple[tuple[int, ...], bool]:
    """Sorts as versions do: 3.10 after 3.9, 3.7 after 3.7rc1, 3.7 as 3.7.0; what is none first.

    What a build adds (2.11.0+cu130) says nothing of its age.
    """
    found = _VERSION.match(text)
    if found is None:
        return (), False
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), _PRE_RELEASE.match(found[2]) is None


def versions_of(record: TuningRecord) -> tuple[object, ...]:
    """The versions that decide how fast a kernel is, the weightiest first."""
    p = record.provenance
    return tuple(parse_version(text) for text in (p.triton, p.torch, p.driver))


def word_order(record: TuningRecord) -> tuple[Any, ...]:
    """Sort key, best last, of what one origin said."""
    m, p = record.measurement, record.provenance
    measured = record.kind == "measured"
    return (measured, not m.noisy, p.created_at, -m.median_ms, _Last(Tie(record)))


def merge_order(record: TuningRecord) -> tuple[Any, ...]:
    """Sort key, best last, between the words of several origins."""
    return tuple(rank(record) for _, rank in _MERGE_RULE)


def serving_order(record: TuningRecord) -> tuple[Any, ...]:
    """Sort key, best last, between the kernels of a bucket, each by the record that stands.

    A slow kernel takes fewer repeats in the same time: they are no evidence against a fast one.
    """
    return tuple(rank(record) for name, rank in _MERGE_RULE if name != "more repeats")


def merged(*sides: Iterable[TuningRecord]) -> list[TuningRecord]:
    """All records of all sides, each once, in the order of their digests."""
    return list(unique([record for side in sides for record in side]).values())


def grouped(records: Iterable[TuningRecord]) -> Groups:
    """The records by what they compete for."""
    groups: Groups = {}
    for record in records:
        groups.setdefault(key_of(record), []).append(record)
    return groups


def words(records: Iterable[TuningRecord]) -> list[TuningRecord]:
    """What stands of each origin's records of each key."""
    said: dict[tuple[Key, str], list[TuningRecord]] = {}
    for record in records:
        said.setdefault((key_of(record), record.provenance.origin), []).append(record)
    return [max(of_origin, key=word_order) for of_origin in said.values()]


def winner(records: Iterable[TuningRecord]) -> TuningRecord | None:
    """The record that stands of those of one key."""
    return max(words(records), key=merge_order, default=None)


def winners(records: Iterable[TuningRecord]) -> dict[Key, TuningRecord]:
    """The record that stands for each key."""
    standing: Groups = {}
    for record in words(records):
        standing.setdefault(key_of(record), []).append(record)
    return {key: max(of_key, key=merge_order) for key, of_key in standing.items()}


def why(winning: TuningRecord, other: TuningRecord) -> str:
    """What decided between two records of a key, in a few words."""
    a, b = winning.provenance, other.provenance
    if record_digest(winning) == record_digest(other):
        return "the same record"
    for name, rank in _MERGE_RULE[:2]:
        if rank(winning) != rank(other):
            return name
    if a.origin == b.origin:
        return "newer" if a.created_at != b.created_at else "lower time of the same run"
    for name, rank in _MERGE_RULE[2:]:
        if rank(winning) != rank(other):
            return name
    raise AssertionError("records with different digests were equal")


class _Last:
    """Turns a sort key around."""

    __slots__ = ("_key",)

    def __init__(self, key: Any) -> None:
        self._key = key

    def __lt__(self, other: "_Last") -> bool:
        return bool(other._key < self._key)

    def __gt__(self, other: "_Last") -> bool:
        return bool(self._key < other._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Last) and bool(self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)


def _rate(record: TuningRecord) -> float:
    """Records of a bucket may be of problems of different sizes, whose times don't compare."""
    return max(record.problem.flops, 1) / record.measurement.median_ms


_MERGE_RULE: tuple[tuple[str, Callable[[TuningRecord], Any]], ...] = (
    ("measured, not predicted", lambda record: record.kind == "measured"),
    ("clean, not noisy", lambda record: not record.measurement.noisy),
    ("newer versions", versions_of),
    ("more repeats", lambda record: record.measurement.repeats),
    ("lower time", _rate),
    ("a tie: lower digest", lambda record: _Last(Tie(record))),
)
