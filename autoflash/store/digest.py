"""Records by what they say: one canonical text each, and the SHA-256 of it."""

import dataclasses
import functools
import hashlib
import json
import operator
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as _quoted
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
        f',"measurement":{_measurement_text(record.measurement)}'
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
        f',"measurement":{"null" if timed is None else _measurement_text(timed)}'
        f',"predicted_ms":{"null" if predicted is None else repr(float(predicted))}'
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


def _measurement_text(m: Measurement) -> str:
    # An int is a float to a caller, but must not be written differently.
    return (
        f'{{"median_ms":{float(m.median_ms)!r},"method":{_quoted(m.method)}'
        f',"noisy":{"true" if m.noisy else "false"},"p20_ms":{float(m.p20_ms)!r}'
        f',"p80_ms":{float(m.p80_ms)!r},"repeats":{m.repeats}'
        f',"sm_clock_mhz":{"null" if m.sm_clock_mhz is None else m.sm_clock_mhz}'
        f',"throttle":{_quoted(m.throttle)}}}'
    )


def _provenance_text(provenance: Provenance) -> str:
    return _PROVENANCE % tuple(map(_quoted, _FIELDS(provenance)))


_NAMES = sorted(field.name for field in dataclasses.fields(Provenance))
_FIELDS = operator.attrgetter(*_NAMES)
_PROVENANCE = "{" + ",".join(f'"{name}":%s' for name in _NAMES) + "}"


def _write(value: Any) -> str:
    return _quoted(value) if type(value) is str else _write_known(value)


# Of numbers that count something there are few.
_write_known = functools.lru_cache(maxsize=4096, typed=True)(canonical)


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
