"""Records by what they say: one canonical text each, and the SHA-256 of it."""

import dataclasses
import functools
import hashlib
import json
import operator
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.store.plain import problem_to_plain, target_to_plain
from autoflash.store.record import Measurement, Provenance, Trial, TuningRecord
from autoflash.target import Target

P = TypeVar("P", Config, Problem, Provenance, Target)

# Kept, since json.dumps makes a new one for each record.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(plain: object) -> str:
    """The one JSON text of ``plain``: sorted keys, no spaces, ASCII alone. No NaN, no infinity."""
    return _ENCODER.encode(plain)


def sha256(text: str) -> str:
    """In 64 hexadecimal digits."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def record_text(record: TuningRecord) -> str:
    """The canonical text of ``record``, in a fifth of the time that ``canonical`` takes: of many
    records few problems, targets and configs differ."""
    return (
        f'{{"config":{config_text(record)}'
        f',"kernel":{_write(record.kernel)}'
        f',"kind":{_write(record.kind)}'
        f',"measurement":{_flat(record.measurement, _MEASUREMENT)}'
        f',"problem":{part_text(record.problem)}'
        f',"provenance":{_shared(record.provenance, "", _provenance_text)}'
        f',"target":{part_text(record.target)}}}'
    )


def trial_text(trial: Trial) -> str:
    """As ``record_text``, of a trial."""
    timed = trial.measurement
    predicted = trial.predicted_ms
    return (
        f'{{"came_from":{_write(trial.came_from)}'
        f',"config":{config_text(trial)}'
        f',"kernel":{_write(trial.kernel)}'
        f',"measurement":{"null" if timed is None else _flat(timed, _MEASUREMENT)}'
        f',"predicted_ms":{"null" if predicted is None else _write_float(predicted)}'
        f',"problem":{part_text(trial.problem)}'
        f',"provenance":{_shared(trial.provenance, "", _provenance_text)}'
        f',"reason":{_write(trial.reason)}'
        f',"registers":{_write(trial.registers)}'
        f',"shared_bytes":{_write(trial.shared_bytes)}'
        f',"spills":{_write(trial.spills)}'
        f',"status":{_write(trial.status.value)}'
        f',"target":{part_text(trial.target)}}}'
    )


def part_text(part: Problem | Target) -> str:
    """The canonical text of a part that many records have in common."""
    if isinstance(part, Problem):
        return _shared(part, "", lambda problem: canonical(problem_to_plain(problem)))
    return _shared(part, "", lambda target: canonical(target_to_plain(target)))


def config_text(noun: TuningRecord | Trial) -> str:
    """The canonical text of its config."""
    space = KERNELS[noun.kernel].space
    return _shared(noun.config, noun.kernel, lambda config: canonical(space.plain(config)))


def _shared(part: P, kernel: str, to_text: Callable[[P], str]) -> str:
    # By its id, since its hash takes as long as all the rest. It is kept, so the id stays its own.
    found = _SHARED.get((id(part), kernel))
    if found is None:
        if len(_SHARED) >= _MAX_SHARED:
            _SHARED.clear()
        found = _SHARED[id(part), kernel] = (part, to_text(part))
    return found[1]


_SHARED: dict[tuple[int, str], tuple[Config | Problem | Provenance | Target, str]] = {}
_MAX_SHARED = 8192


Writer = Callable[[Any], str]
Layout = tuple[str, Callable[[Any], tuple[Any, ...]], list[Writer]]


def _flat(noun: Measurement | Provenance, layout: Layout) -> str:
    """``canonical`` of a noun whose fields are plain values."""
    text, fields, writers = layout
    return text % tuple([write(value) for write, value in zip(writers, fields(noun), strict=True)])


def _layout(kind: type[Measurement | Provenance]) -> Layout:
    """What to fill the values of the fields into, what gives these, and what writes each."""
    kinds = {field.name: field.type for field in dataclasses.fields(kind)}
    names = sorted(kinds)
    text = "{" + ",".join(f'"{name}":%s' for name in names) + "}"
    # An int is a float to a caller, but must not be written differently.
    writers: list[Writer] = [_write_float if kinds[name] is float else _write for name in names]
    return text, operator.attrgetter(*names), writers


def _write(value: Any) -> str:
    return encode_basestring_ascii(value) if type(value) is str else _write_known(value)


def _write_float(value: float) -> str:
    return repr(float(value))


# Of numbers that count something there are few.
_write_known = functools.lru_cache(maxsize=4096, typed=True)(canonical)


def _provenance_text(provenance: Provenance) -> str:
    return _flat(provenance, _PROVENANCE)


_MEASUREMENT = _layout(Measurement)
_PROVENANCE = _layout(Provenance)


def record_digest(record: TuningRecord) -> str:
    """Names ``record`` in any database or file: equal for equal records, and for no others."""
    return sha256(record_text(record))


def trial_digest(trial: Trial) -> str:
    """As ``record_digest``, of a trial."""
    return sha256(trial_text(trial))


class Tie:
    """Sorts records that all else leaves equal. A digest costs more than the rest of a comparison,
    so it is taken only when one is needed."""

    __slots__ = ("_record",)

    def __init__(self, record: TuningRecord) -> None:
        self._record = record

    def __lt__(self, other: "Tie") -> bool:
        return self._digest < other._digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tie) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"Tie({self._digest[:12]})"

    @property
    def _digest(self) -> str:
        return record_digest(self._record)


def unique(records: list[TuningRecord]) -> dict[str, TuningRecord]:
    """The records by their digests, in the order of these, so that no other order matters."""
    found: dict[str, Any] = {record_digest(record): record for record in records}
    return dict(sorted(found.items()))
