"""Records, trials and missed calls as nested plain objects, and back from a stranger's.

The database, the exchange files and the file of missed calls are read through it, so there is one
place that decides what a stranger may say: exact names, exact types, a kernel we have, a config of
its space. Every refusal is an InvalidInputError or a ConfigError.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.space import Config, SearchSpace
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
R = TypeVar("R")
TARGET_FIELDS: dict[str, type] = {
    "vendor": str,
    "name": str,
    "arch": str,
    "sm_count": int,
    "memory_gib": int,
}
_RECORD_FIELDS = frozenset(field.name for field in dataclasses.fields(TuningRecord))
_TRIAL_FIELDS = frozenset(field.name for field in dataclasses.fields(Trial))
_PROBLEM_FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
_MEASUREMENT_FIELDS = tuple(field.name for field in dataclasses.fields(Measurement))
_PROVENANCE_FIELDS = tuple(field.name for field in dataclasses.fields(Provenance))
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
    measurement = values["measurement"]
    return Trial(
        **_common_from_plain(values),
        **own_of_trial(values),
        measurement=None if measurement is None else _noun(Measurement, measurement),
    )


def own_of_trial(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial has and a record hasn't, of plain values. Raises InvalidInputError."""
    status = _typed("status", values["status"], str)
    if status not in _STATUSES:
        raise InvalidInputError(f"unknown trial status {status[:80]!r}")
    return {
        "status": TrialStatus(status),
        "reason": _typed("reason", values["reason"], str),
        "predicted_ms": _typed("predicted_ms", values["predicted_ms"], float | None),
        "shared_bytes": _typed("shared_bytes", values["shared_bytes"], int | None),
        "registers": _typed("registers", values["registers"], int | None),
        "spills": _typed("spills", values["spills"], int | None),
        "came_from": _typed("came_from", values["came_from"], str),
    }


def missed_from_plain(plain: object) -> MissedCalls:
    """The missed calls that ``plain`` describes. Raises InvalidInputError."""
    values = _exactly(plain, _MISSED_FIELDS, "missed calls")
    return MissedCalls(
        problem=_problem(values["problem"]),
        target=_target(values["target"]),
        calls=_typed("calls", values["calls"], int),
        noted_at=_typed("noted_at", values["noted_at"], str),
    )


def _common_to_plain(noun: TuningRecord | Trial) -> dict[str, Any]:
    return {
        "problem": problem_to_plain(noun.problem),
        "target": target_to_plain(noun.target),
        "kernel": noun.kernel,
        "config": dict(noun.config),
        "provenance": _fields_of(noun.provenance, _PROVENANCE_FIELDS),
    }


def _common_from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    problem = _problem(values["problem"])
    return {
        "problem": problem,
        "target": _target(values["target"]),
        "kernel": values["kernel"],
        "config": config_of(Same(kernel_of(values["kernel"], problem).space), values["config"]),
        "provenance": _noun(Provenance, values["provenance"]),
    }


def problem_to_plain(problem: Problem) -> dict[str, Any]:
    """Its fields."""
    return _fields_of(problem, _PROBLEM_FIELDS)


def _measurement_to_plain(measurement: Measurement) -> dict[str, Any]:
    plain = _fields_of(measurement, _MEASUREMENT_FIELDS)
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


def kernel_of(name: object, problem: Problem) -> Kernel:
    """The kernel ``name``, which must serve the problem's op. Raises InvalidInputError."""
    kernel = KERNELS.get(_typed("kernel", name, str))
    if kernel is None:
        assert isinstance(name, str)
        raise InvalidInputError(f"unknown kernel {name[:80]!r}: known are {', '.join(KERNELS)}")
    if kernel.op != problem.op:
        raise InvalidInputError(f"kernel {kernel.name} computes {kernel.op!r}, not {problem.op!r}")
    return kernel


class Same:
    """A search space as a key of a cache: to hash what it holds takes longer than parsing does."""

    __slots__ = ("space",)

    def __init__(self, space: SearchSpace) -> None:
        self.space = space

    def __hash__(self) -> int:
        return id(self.space)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.space is other.space


def config_of(same: Same, plain: object) -> Config:
    """The config of that space that ``plain`` describes. Raises InvalidInputError or
    ConfigError."""
    values = _mapping(plain, "config")
    return _parsed(same, tuple(values), *values.values())


def _problem(plain: object) -> Problem:
    values = _exactly(plain, _kinds(Problem).keys(), "problem")
    return problem_of(*map(values.__getitem__, _PROBLEM_FIELDS))


def _noun(kind: type[T], plain: object) -> T:
    names = _kinds(kind)
    values = _exactly(plain, names.keys(), kind.__name__.lower())
    return noun_of(kind, tuple(map(values.__getitem__, names)))


def noun_of(kind: type[T], values: tuple[Any, ...]) -> T:
    """A dataclass of plain values, in the order of its fields; it checks the ranges itself. Raises
    InvalidInputError."""
    kinds = _kinds(kind)
    types = (kind, *map(type, values))
    # Nearly all rows are alike, and to look into a union takes long.
    if types not in _GOOD_TYPES:
        for (name, wanted), value in zip(kinds.items(), values, strict=True):
            _typed(name, value, wanted)
        _GOOD_TYPES.add(types)
    return kind(**dict(zip(kinds, values, strict=True)))


# What passed: a handful, since a noun lets few types through.
_GOOD_TYPES: set[tuple[type, ...]] = set()


@functools.cache
def _kinds(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind)}


def _remembered(make: Callable[..., R]) -> Callable[..., R]:
    """Of many records few problems, targets and configs differ. Arguments are told apart by type
    too: 1 is not True. What a stranger gives may not even be hashable."""
    known = functools.lru_cache(maxsize=4096, typed=True)(make)

    @functools.wraps(make)
    def remember(*values: Any) -> R:
        try:
            return known(*values)
        except TypeError:
            return make(*values)

    return remember


@_remembered
def problem_of(*values: Any) -> Problem:
    """The problem of these fields, in their order. Raises InvalidInputError."""
    return noun_of(Problem, values)


@_remembered
def target_of(*values: Any) -> Target:
    """The target of these TARGET_FIELDS. Raises InvalidInputError."""
    for (name, kind), value in zip(TARGET_FIELDS.items(), values, strict=True):
        _typed(name, value, kind)
    return target_from_identity(**dict(zip(TARGET_FIELDS, values, strict=True)))


@_remembered
def _parsed(same: Same, names: tuple[str, ...], *values: Any) -> Config:
    return same.space.parse(dict(zip(names, values, strict=True)))


def _exactly(plain: object, names: AbstractSet[str], what: str) -> Mapping[str, Any]:
    if isinstance(plain, dict) and plain.keys() == names:
        return plain
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
    if type(value) is kind:
        return value
    kinds = typing.get_args(kind) or (kind,)
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        wanted = " or ".join(k.__name__ for k in kinds)
        raise InvalidInputError(f"{name}: must be {wanted}, not {type(value).__name__}")
    return value
