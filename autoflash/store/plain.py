"""Records, trials, missed calls and locked configs as nested plain objects, and back from a
stranger's.

The database, the exchange files, locks and the file of missed calls are read through it: one
place that decides what a stranger may say: exact names, exact types, a kernel we have, a config of
its space. Every refusal is an InvalidInputError or a ConfigError.
"""

import dataclasses
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.kernels.access import ACCESSES
from autoflash.problem import FP8_FIELDS, Problem
from autoflash.store.parts import (
    MEASUREMENT_FIELDS,
    PROBLEM_FIELDS,
    PROVENANCE_FIELDS,
    TARGET_FIELDS,
    Same,
    config_of,
    kernel_of,
    kinds_of,
    mapping,
    noun_of,
    problem_of,
    target_of,
    typed,
)
from autoflash.store.record import (
    LockEntry,
    Measurement,
    MissedCalls,
    Provenance,
    Trial,
    TrialStatus,
    TuningRecord,
)
from autoflash.target import Target

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_RECORD_FIELDS = frozenset(field.name for field in dataclasses.fields(TuningRecord))
_TRIAL_FIELDS = frozenset(field.name for field in dataclasses.fields(Trial))
_LOCK_FIELDS = frozenset(field.name for field in dataclasses.fields(LockEntry))
_PROBLEM_NAMES = frozenset(PROBLEM_FIELDS)
_STATUSES = {known.value for known in TrialStatus}
_MISSED_FIELDS = frozenset(field.name for field in dataclasses.fields(MissedCalls))


def record_to_plain(record: TuningRecord) -> dict[str, Any]:
    """Strings, numbers, dicts: what ``record_from_plain`` takes."""
    return {
        **_common_to_plain(record),
        "measurement": _measurement_to_plain(record.measurement),
        "kind": record.kind,
    }


def trial_to_plain(trial: Trial) -> dict[str, Any]:
    """Strings, numbers, dicts: what ``trial_from_plain`` takes."""
    measurement = trial.measurement
    return {
        **_common_to_plain(trial),
        "status": trial.status.value,
        "reason": trial.reason,
        "measurement": None if measurement is None else _measurement_to_plain(measurement),
        "predicted_ms": None if trial.predicted_ms is None else float(trial.predicted_ms),
        "shared_bytes": trial.shared_bytes,
        "registers": trial.registers,
        "spills": trial.spills,
        "came_from": trial.came_from,
    }


def missed_to_plain(missed: MissedCalls) -> dict[str, Any]:
    """Strings, numbers, dicts: what ``missed_from_plain`` takes."""
    return {
        "problem": problem_to_plain(missed.problem),
        "target": target_to_plain(missed.target),
        "calls": missed.calls,
        "noted_at": missed.noted_at,
    }


def lock_entry_to_plain(entry: LockEntry) -> dict[str, Any]:
    """Strings, numbers, dicts, a list: what ``lock_entry_from_plain`` takes."""
    return {
        "problem": problem_to_plain(entry.problem),
        "target": target_to_plain(entry.target),
        "kernel": entry.kernel,
        "config": kernel_of(entry.kernel, entry.problem).space.plain(entry.config),
        "access": list(entry.access),
        "how": entry.how,
        "source_hash": entry.source_hash,
    }


def record_from_plain(plain: object) -> TuningRecord:
    """The record that ``plain`` describes. Raises InvalidInputError or ConfigError."""
    values = _exactly(plain, _RECORD_FIELDS, "record")
    return TuningRecord(
        **_common_from_plain(values),
        measurement=_noun(Measurement, values["measurement"]),
        kind=typed("kind", values["kind"], str),
    )


def trial_from_plain(plain: object) -> Trial:
    """The trial that ``plain`` describes. Raises InvalidInputError or ConfigError."""
    values = _exactly(plain, _TRIAL_FIELDS, "trial")
    measurement = values["measurement"]
    return Trial(
        **_common_from_plain(values),
        **own_of_trial(values),
        measurement=None if measurement is None else _noun(Measurement, measurement),
    )


def own_of_trial(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial has and a record hasn't, of plain values. Raises InvalidInputError."""
    status = typed("status", values["status"], str)
    if status not in _STATUSES:
        raise InvalidInputError(f"unknown trial status {status[:80]!r}")
    return {
        "status": TrialStatus(status),
        "reason": typed("reason", values["reason"], str),
        "predicted_ms": typed("predicted_ms", values["predicted_ms"], float | None),
        "shared_bytes": typed("shared_bytes", values["shared_bytes"], int | None),
        "registers": typed("registers", values["registers"], int | None),
        "spills": typed("spills", values["spills"], int | None),
        "came_from": typed("came_from", values["came_from"], str),
    }


def missed_from_plain(plain: object) -> MissedCalls:
    """The missed calls that ``plain`` describes. Raises InvalidInputError."""
    values = _exactly(plain, _MISSED_FIELDS, "missed calls")
    return MissedCalls(
        problem=_problem(values["problem"]),
        target=_target(values["target"]),
        calls=typed("calls", values["calls"], int),
        noted_at=typed("noted_at", values["noted_at"], str),
    )


def lock_entry_from_plain(plain: object) -> LockEntry:
    """The entry of a lock that ``plain`` describes. Raises InvalidInputError or ConfigError, too
    for a config that can't run the tensors that it is said to be for."""
    values = _exactly(plain, _LOCK_FIELDS, "entry")
    names = typed("access", values["access"], list)
    entry = LockEntry(
        **_chosen_from_plain(values),
        access=tuple(typed("access", name, str) for name in names),
        how=typed("how", values["how"], str),
        source_hash=typed("source_hash", values["source_hash"], str),
    )
    known = ACCESSES[entry.problem.op]
    for name in entry.access:
        if name not in known:
            raise InvalidInputError(f"access {name[:80]!r}: must be one of {', '.join(known)}")
        if KERNELS[entry.kernel].adapt(entry.config, known[name]) != entry.config:
            raise InvalidInputError(f"{entry.kernel}: its config can't run tensors like {name!r}")
    return entry


def _common_to_plain(noun: TuningRecord | Trial) -> dict[str, Any]:
    return {
        "problem": problem_to_plain(noun.problem),
        "target": target_to_plain(noun.target),
        "kernel": noun.kernel,
        "config": kernel_of(noun.kernel, noun.problem).space.plain(noun.config),
        "provenance": _fields_of(noun.provenance, PROVENANCE_FIELDS),
    }


def _common_from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return _chosen_from_plain(values) | {"provenance": _noun(Provenance, values["provenance"])}


def _chosen_from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    problem = _problem(values["problem"])
    return {
        "problem": problem,
        "target": _target(values["target"]),
        "kernel": values["kernel"],
        "config": config_of(Same(kernel_of(values["kernel"], problem).space), values["config"]),
    }


def problem_to_plain(problem: Problem) -> dict[str, Any]:
    """Its fields; those of fp8 only where they differ from their defaults, so that other problems
    are written as they were before there were any, and read by those who know of none."""
    return problem.as_dict()


def _measurement_to_plain(measurement: Measurement) -> dict[str, Any]:
    plain = _fields_of(measurement, MEASUREMENT_FIELDS)
    # An int is a float to a caller, but must not be written differently.
    for name in ("median_ms", "p20_ms", "p80_ms"):
        plain[name] = float(plain[name])
    return plain


def _fields_of(noun: object, names: tuple[str, ...]) -> dict[str, Any]:
    # dataclasses.asdict copies deeply: two thirds of an export's time.
    return {name: getattr(noun, name) for name in names}


def target_to_plain(target: Target) -> dict[str, Any]:
    """Its identity."""
    return {name: getattr(target, name) for name in TARGET_FIELDS}


def _target(plain: object) -> Target:
    values = _exactly(plain, TARGET_FIELDS.keys(), "target")
    return target_of(*map(values.__getitem__, TARGET_FIELDS))


def _problem(plain: object) -> Problem:
    values = mapping(plain, "problem")
    values = _exactly({**FP8_FIELDS, **values}, _PROBLEM_NAMES, "problem")
    return problem_of(*map(values.__getitem__, PROBLEM_FIELDS))


def _noun(kind: type[T], plain: object) -> T:
    names = kinds_of(kind)
    values = _exactly(plain, names.keys(), kind.__name__.lower())
    return noun_of(kind, tuple(map(values.__getitem__, names)))


def _exactly(plain: object, names: AbstractSet[str], what: str) -> Mapping[str, Any]:
    if isinstance(plain, dict) and plain.keys() == names:
        return plain
    values = mapping(plain, what)
    if values.keys() != set(names):
        odd = sorted(values.keys() ^ set(names), key=str)
        state = "missing" if odd[0] in names else "unknown"
        raise InvalidInputError(f"{what}: field {odd[0][:80]!r} is {state}")
    return values
