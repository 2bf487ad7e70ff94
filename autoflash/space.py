"""Tunable parameters, what they may be, and which combinations make sense."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoflash.errors import ConfigError
from autoflash.problem import Problem
from autoflash.target import Target

Value = bool | int | str


class Config(Mapping[str, Value]):
    """One value per Param; immutable and hashable. Build it with keywords: Config(BLOCK_M=128)."""

    __slots__ = ("_hash", "_values")

    def __init__(self, **values: Value) -> None:
        self._values = dict(sorted(values.items()))
        # 1 == True in Python: the type is part of what a config says.
        self._hash = hash(tuple((k, type(v), v) for k, v in self._values.items()))

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_json() == other.to_json()

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v!r}' for k, v in self._values.items())})"

    def integer(self, name: str) -> int:
        """The value of an integer Param."""
        value = self._values[name]
        assert isinstance(value, int), name
        return value

    def to_json(self) -> str:
        """Canonical text: sorted keys, no spaces."""
        return json.dumps(self._values, separators=(",", ":"))

    def label(self) -> str:
        """A short name for tables."""
        return " ".join(f"{k}={v}" for k, v in self._values.items())


@dataclass(frozen=True, kw_only=True)
class Param:
    """A tunable name and its choices. ``doc`` says what it does to the kernel.

    ``before``: the choice that configs of a time before this Param stand for, so that adding one
    leaves records in force; None for a Param that was there from the start. ``compiled``: whether
    it changes the binary, or only how that is launched.
    """

    name: str
    choices: tuple[Value, ...]
    doc: str
    before: Value | None = None
    compiled: bool = True


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A predicate that returns why a config can't or shouldn't run, or None if it may.

    ``reads`` names the Params that it looks at, if it can: then it may be asked about a config that
    has no more than these, and rejects all that share them at once. ``advice``: what it rejects
    would run, and is only not worth trying; a record of a neighbouring problem may still be used.
    """

    name: str
    why_not: Callable[[Config, Problem, Target], str | None]
    reads: tuple[str, ...] | None = None
    advice: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Params and the constraints between them."""

    params: tuple[Param, ...]
    constraints: tuple[Constraint, ...]

    @property
    def size(self) -> int:
        """Number of combinations before constraints."""
        count = 1
        for param in self.params:
            count *= len(param.choices)
        return count

    def parse(self, values: Mapping[str, Any]) -> Config:
        """A Config from a stranger's mapping; ConfigError unless it is exactly of this space, or of
        one before some Params were added."""
        values = {**self._before, **values}
        names = {param.name for param in self.params}
        if set(values) != names:
            odd = sorted(set(values) ^ names, key=str)
            raise ConfigError(f"config must name exactly {sorted(names)}; off: {str(odd)[:200]}")
        for param in self.params:
            value = values[param.name]
            if not any(type(value) is type(c) and value == c for c in param.choices):
                raise ConfigError(
                    f"{param.name}={str(value)[:80]!r}: must be one of {list(param.choices)}"
                )
        return Config(**values)

    def plain(self, config: Config) -> dict[str, Value]:
        """What ``parse`` takes: without the Params that say what configs from before them mean, so
        that a config is written the same whether it is older than these or not."""
        before = self._before
        return {name: value for name, value in config.items() if before.get(name) != value}

    @property
    def _before(self) -> dict[str, Value]:
        """What configs from before some Params stand for, by these Params."""
        return {p.name: p.before for p in self.params if p.before is not None}

    def compiled(self, config: Config) -> Config:
        """What of ``config`` the binary depends on: configs that agree in it share one."""
        return Config(**{p.name: config[p.name] for p in self.params if p.compiled})

    def why_not(
        self, config: Config, problem: Problem, target: Target, *, advice: bool = True
    ) -> str | None:
        """The first constraint's reason against ``config``, or None; without ``advice``, only a
        reason why it can't run."""
        for constraint in self.constraints:
            if constraint.advice and not advice:
                continue
            reason = constraint.why_not(config, problem, target)
            if reason is not None:
                return f"{constraint.name}: {reason}"
        return None

    def all_configs(self) -> Iterator[Config]:
        """Every combination, in declaration order, without regard to constraints."""
        names = [param.name for param in self.params]
        for values in itertools.product(*(param.choices for param in self.params)):
            yield Config(**dict(zip(names, values, strict=True)))

    def configs(self, problem: Problem, target: Target) -> list[Config]:
        """Every combination that all constraints let through, in the order of ``all_configs``.

        Param by Param, each constraint as soon as all that it reads is set: a large space has many
        combinations, but few beginnings that are worth going on with.
        """
        partial = [Config()]
        for param, constraints in zip(self.params, self._due(), strict=True):
            partial = [
                config
                for before in partial
                for config in (Config(**before, **{param.name: c}) for c in param.choices)
                if all(c.why_not(config, problem, target) is None for c in constraints)
            ]
        return partial

    def _due(self) -> list[list[Constraint]]:
        """For each Param, the constraints that can be asked once it is set."""
        names = [param.name for param in self.params]
        due: list[list[Constraint]] = [[] for _ in names]
        for constraint in self.constraints:
            reads = names if constraint.reads is None else constraint.reads
            due[max(map(names.index, reads), default=0)].append(constraint)
        return due
