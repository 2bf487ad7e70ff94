"""Records, trials and missed calls as nested plain objects, and back from a stranger's.

The database, the exchange files and the file of missed calls are read through it, so there is one
place that decides what a stranger may say: exact names, exact types, a kernel we have, a config of
its space. Every refusal is an InvalidInputError or a ConfigError.
"""

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.store.record import (
    Measurement,
    MissedCalls,
    Provenance,
    Trial,
    TrialStatus,
    TuningRecord,
    target_from_identity,
)
from autoflash.target import Target

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
TARGET_FIELDS: dict[str, type] = {
    "vendor": str,
    "name": str,
    "arch": str,
    "sm_count": int,
    "memory_gib": int,
}
_RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(TuningRecord))
_TRIAL_FIELDS = tuple(field.name for field in dataclasses.fields(Trial))
_PROBLEM_FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
_MEASUREMENT_FIELDS = tuple(field.name for field in dataclasses.fields(Measurement))
_PROVENANCE_FIELDS = tuple(field.name for field in dataclasses.fields(Provenance))
_MISSED_FIELDS = tuple(field.name for field in dataclasses.fields(MissedCalls))


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
        "predicted_ms": trial.predicted_ms,
        "shared_bytes": trial.shared_bytes,
        "registers": trial.registers,
        "spills": trial.spills,
        "came_from": trial.came_from,
    }


def missed_to_plain(missed: MissedCalls) -> dict[str, Any]:
    """Strings, numbers, dicts: what ``missed_from_plain`` takes."""
    return {
        "problem": missed.problem.as_dict(),
        "target": _target_to_plain(missed.target),
        "calls": missed.calls,
        "noted_at": missed.noted_at,
    }


def record_from_plain(plain: object) -> TuningRecord:
    """The record that ``plain`` describes. Raises InvalidInputError or ConfigError."""
    values = _exactly(plain, _RECORD_FIELDS, "record")
    return TuningRecord(
        **_common_from_plain(values),
        measurement=_noun(Measurement, values["measurement"]),
        kind=_typed("kind", values["kind"], str),
    )


def trial_from_plain(plain: object) -> Trial:
    """The trial that ``plain`` describes. Raises InvalidInputError or ConfigError."""
    values = _exactly(plain, _TRIAL_FIELDS, "trial")
    status = _typed("status", values["status"], str)
    if status not in {known.value for known in TrialStatus}:
        raise InvalidInputError(f"unknown trial status {status[:80]!r}")
    measurement = values["measurement"]
    return Trial(
        **_common_from_plain(values),
        status=TrialStatus(status),
        reason=_typed("reason", values["reason"], str),
        measurement=None if measurement is None else _noun(Measurement, measurement),
        predicted_ms=_typed("predicted_ms", values["predicted_ms"], float | None),
        shared_bytes=_typed("shared_bytes", values["shared_bytes"], int | None),
        registers=_typed("registers", values["registers"], int | None),
        spills=_typed("spills", values["spills"], int | None),
        came_from=_typed("came_from", values["came_from"], str),
    )


def missed_from_plain(plain: object) -> MissedCalls:
    """The missed calls that ``plain`` describes. Raises InvalidInputError."""
    values = _exactly(plain, _MISSED_FIELDS, "missed calls")
    return MissedCalls(
        problem=_noun(Problem, values["problem"]),
        target=_target(values["target"]),
        calls=_typed("calls", values["calls"], int),
        noted_at=_typed("noted_at", values["noted_at"], str),
    )


def _common_to_plain(noun: TuningRecord | Trial) -> dict[str, Any]:
    return {
        "problem": _fields_of(noun.problem, _PROBLEM_FIELDS),
        "target": _target_to_plain(noun.target),
        "kernel": noun.kernel,
        "config": dict(noun.config),
        "provenance": _fields_of(noun.provenance, _PROVENANCE_FIELDS),
    }


def _common_from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    problem = _noun(Problem, values["problem"])
    kernel = _typed("kernel", values["kernel"], str)
    return {
        "problem": problem,
        "target": _target(values["target"]),
        "kernel": kernel,
        "config": _config(kernel, problem, values["config"]),
        "provenance": _noun(Provenance, values["provenance"]),
    }


def _measurement_to_plain(measurement: Measurement) -> dict[str, Any]:
    plain = _fields_of(measurement, _MEASUREMENT_FIELDS)
    # An int is a float to a caller, but must not be written differently.
    return plain | {name: float(plain[name]) for name in ("median_ms", "p20_ms", "p80_ms")}


def _fields_of(noun: object, names: tuple[str, ...]) -> dict[str, Any]:
    # dataclasses.asdict copies deeply: two thirds of an export's time.
    return {name: getattr(noun, name) for name in names}


def _target_to_plain(target: Target) -> dict[str, Any]:
    return {name: getattr(target, name) for name in TARGET_FIELDS}


def _target(plain: object) -> Target:
    values = _exactly(plain, TARGET_FIELDS, "target")
    for name, kind in TARGET_FIELDS.items():
        _typed(name, values[name], kind)
    return target_from_identity(**values)


def _config(name: str, problem: Problem, plain: object) -> Config:
    kernel = KERNELS.get(name)
    if kernel is None:
        raise InvalidInputError(f"unknown kernel {name[:80]!r}: known are {', '.join(KERNELS)}")
    if kernel.op != problem.op:
        raise InvalidInputError(f"kernel {name} computes {kernel.op!r}, not {problem.op!r}")
    return kernel.space.parse(_mapping(plain, "config"))


def _noun(kind: type[T], plain: object) -> T:
    """A dataclass of plain values; it checks the ranges itself."""
    fields = _kinds(kind)
    values = _exactly(plain, fields, kind.__name__.lower())
    return kind(**{name: _typed(name, values[name], fields[name]) for name in fields})


@functools.cache
def _kinds(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind)}


def _exactly(plain: object, names: Collection[str], what: str) -> Mapping[str, Any]:
    values = _mapping(plain, what)
    if values.keys() != set(names):
        odd = sorted(values.keys() ^ set(names), key=str)
        state = "missing" if odd[0] in names else "unknown"
        raise InvalidInputError(f"{what}: field {odd[0][:80]!r} is {state}")
    return values


def _mapping(plain: object, what: str) -> Mapping[str, Any]:
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise InvalidInputError(f"{what}: must be an object, not {type(plain).__name__}")
    return plain


def _typed(name: str, value: object, kind: Any) -> Any:
    """``value`` if it is of ``kind`` to the letter: True is no int, but an int is a float."""
    # Nearly all are just that, and a union takes long to look into.
    if type(value) is kind:
        return value
    kinds = typing.get_args(kind) or (kind,)
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        wanted = " or ".join(k.__name__ for k in kinds)
        raise InvalidInputError(f"{name}: must be {wanted}, not {type(value).__name__}")
    return value
