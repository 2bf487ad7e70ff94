"""The parts of records and trials from a stranger's values: of many records few of these differ.

Each is checked to the letter when it is first seen, and remembered.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.space import Config, SearchSpace
from autoflash.store.record import Measurement, Provenance, target_from_identity
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
# In the order of the dataclasses.
PROBLEM_FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
MEASUREMENT_FIELDS = tuple(field.name for field in dataclasses.fields(Measurement))
PROVENANCE_FIELDS = tuple(field.name for field in dataclasses.fields(Provenance))


def kernel_of(name: object, problem: Problem) -> Kernel:
    """The kernel ``name``, which must serve the problem's op, and fp8 if it is of that. Raises
    InvalidInputError."""
    kernel = KERNELS.get(typed("kernel", name, str))
    if kernel is None:
        assert isinstance(name, str)
        raise InvalidInputError(f"unknown kernel {name[:80]!r}: known are {', '.join(KERNELS)}")
    if kernel.op != problem.op:
        raise InvalidInputError(f"kernel {kernel.name} computes {kernel.op!r}, not {problem.op!r}")
    if kernel.fp8 != problem.is_fp8:
        served = "only k and v in fp8" if kernel.fp8 else "no fp8"
        raise InvalidInputError(f"kernel {kernel.name} takes {served}: {problem.label()}")
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
    values = mapping(plain, "config")
    return _parsed(same, tuple(values), *values.values())


def noun_of(kind: type[T], values: tuple[Any, ...]) -> T:
    """A dataclass of plain values, in the order of its fields; it checks the ranges itself. Raises
    InvalidInputError."""
    kinds = kinds_of(kind)
    types = (kind, *map(type, values))
    # Nearly all rows are alike, and to look into a union takes long.
    if types not in _GOOD_TYPES:
        for (name, wanted), value in zip(kinds.items(), values, strict=True):
            typed(name, value, wanted)
        _GOOD_TYPES.add(types)
    return kind(**dict(zip(kinds, values, strict=True)))


# What passed: a handful, since a noun lets few types through.
_GOOD_TYPES: set[tuple[type, ...]] = set()


@functools.cache
def kinds_of(kind: type) -> dict[str, Any]:
    """The type of each field of a dataclass, in their order."""
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
def provenance_of(*values: Any) -> Provenance:
    """The provenance of these fields, in their order: what a study stores has one. Raises
    InvalidInputError."""
    return noun_of(Provenance, values)


@_remembered
def target_of(*values: Any) -> Target:
    """The target of these TARGET_FIELDS. Raises InvalidInputError."""
    for (name, kind), value in zip(TARGET_FIELDS.items(), values, strict=True):
        typed(name, value, kind)
    return target_from_identity(**dict(zip(TARGET_FIELDS, values, strict=True)))


@_remembered
def _parsed(same: Same, names: tuple[str, ...], *values: Any) -> Config:
    return same.space.parse(dict(zip(names, values, strict=True)))


def mapping(plain: object, what: str) -> Mapping[str, Any]:
    """``plain`` if it is an object. Raises InvalidInputError, which names it by ``what``."""
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise InvalidInputError(f"{what}: must be an object, not {type(plain).__name__}")
    return plain


def typed(name: str, value: object, kind: Any) -> Any:
    """``value`` if it is of ``kind`` to the letter: True is no int, but an int is a float."""
    if type(value) is kind:
        return value
    kinds = typing.get_args(kind) or (kind,)
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        wanted = " or ".join(k.__name__ for k in kinds)
        raise InvalidInputError(f"{name}: must be {wanted}, not {type(value).__name__}")
    return value
