"""What to try next: Optuna's TPE over the search space, without repeats.

Infeasible and failed candidates are told as PRUNED, from which TPE learns; a candidate is handed
out once. The first ones come from whoever has advice and from the written model's ranking; when
TPE only repeats itself, the ranking goes on where it stopped. When the whole space fits the budget
the ranking is simply walked to its end (brute force).

What a GPU would wait for is compiling. Candidates whose binary is there already, since they differ
from one that ran only in how it is launched, are handed out meanwhile: ``ask_compiled``.
"""

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Iterator

import optuna

from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.space import Config, Value
from autoflash.store.record import TrialStatus
from autoflash.target import Target
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.resources import Resources

logger = logging.getLogger(__name__)

# Of the ranking, tried before TPE has a say: its first ones, then others near the top that differ.
_FROM_RANKING = 16
_FIRST_RANKED = 4
# The share of a ranking that counts as near its top.
_NEAR_TOP = 0.05
# Proposals of TPE in a row that may be repeats or infeasible before the ranking takes over.
_PATIENCE = 12

# The name of a kernel, and what of a config its binary depends on.
Binary = tuple[str, Config]


def ranked(kernels: Iterable[Kernel], problem: Problem, target: Target) -> list[Candidate]:
    """Every feasible candidate, the one that the written model thinks fastest first."""
    scored = []
    for kernel in kernels:
        for config in kernel.space.configs(problem, target):
            blocks = kernel.estimate_blocks_per_sm(problem, config, target)
            ms = kernel.estimate_ms(problem, config, target, blocks)
            candidate = Candidate(kernel=kernel, config=config, came_from="ranking")
            scored.append((ms, kernel.name, config.to_json(), candidate))
    scored.sort(key=lambda item: item[:3])
    return [candidate for *_, candidate in scored]


def spread(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The first candidates of a ranking, then those near its top that bring most choices which were
    not among the ones before: the first of a ranking are often all but alike."""
    pool = candidates[: max(count, int(_NEAR_TOP * len(candidates)))]
    if len(pool) <= count:
        return pool
    found = pool[:_FIRST_RANKED][:count]
    pool = pool[len(found) :]
    seen = {choice for candidate in found for choice in _choices(candidate)}
    while pool and len(found) < count:
        # Of equals max takes the first, which is the better ranked.
        best = max(pool, key=lambda candidate: len(_choices(candidate) - seen))
        pool.remove(best)
        found.append(best)
        seen |= _choices(best)
    return found


def _choices(candidate: Candidate) -> set[tuple[str, str, Value]]:
    return {(candidate.kernel.name, *item) for item in candidate.config.items()}


class Search:
    """One study: hands out candidates and learns from their times."""

    def __init__(
        self,
        candidates: list[Candidate],
        *,
        brute_force: bool = False,
        first: Iterable[Candidate] = (),
        seed: int = 0,
    ) -> None:
        self._feasible = {_key(c): c for c in candidates}
        self._ranking: Iterator[Candidate] = iter(candidates)
        self._brute_force = brute_force
        self._first = spread(candidates, _FROM_RANKING)
        self.advise(first)
        self._taken: set[str] = set()
        self._open: dict[str, optuna.trial.Trial] = {}
        self._kernels = {c.kernel.name: c.kernel for c in candidates}
        # By binary: the candidates of each, those first that rank first; the best time so far of
        # those that ran in this study, and their resources.
        self._sharing: dict[Binary, list[Candidate]] = {}
        for candidate in candidates:
            self._sharing.setdefault(_binary(candidate), []).append(candidate)
        self._compiled: dict[Binary, tuple[float, Resources]] = {}
        self._study = _create_study(seed)

    def advise(self, first: Iterable[Candidate]) -> None:
        """Try these before anything else, those that are feasible."""
        self._first = [c for c in first if _key(c) in self._feasible] + self._first

    @property
    def size(self) -> int:
        """Feasible candidates in all."""
        return len(self._feasible)

    def ask(self) -> Candidate | None:
        """A candidate that was never handed out or replayed; None when all were."""
        if len(self._taken) >= len(self._feasible):
            return None
        while self._first:
            candidate = self._first.pop(0)
            if self._take(candidate):
                return candidate
        if not self._brute_force:
            for _ in range(_PATIENCE):
                proposal = self._propose()
                if proposal is not None:
                    return proposal
        for candidate in self._ranking:
            if self._take(candidate):
                return candidate
        return None

    def ask_compiled(self) -> tuple[Candidate, Outcome] | None:
        """The same of those whose binary has run in this study, the fastest one's first, with what
        compiling it said; None when there is none."""
        for binary in sorted(self._compiled, key=lambda binary: self._compiled[binary][0]):
            for candidate in self._sharing[binary]:
                if self._take(candidate):
                    outcome = Outcome(status=TrialStatus.ok, resources=self._compiled[binary][1])
                    return dataclasses.replace(candidate, came_from="compiled"), outcome
            del self._sharing[binary], self._compiled[binary]
        return None

    def tell(self, candidate: Candidate, ms: float | None, outcome: Outcome | None = None) -> None:
        """The candidate's time in ms, or None if it failed; ``outcome`` if it ran in this study."""
        if candidate.kernel.name not in self._kernels:
            # Replayed, of a kernel that has no feasible config now: there is nothing to learn.
            return
        binary = _binary(candidate)
        if ms is not None and outcome and outcome.resources and binary in self._sharing:
            best = self._compiled.get(binary, (ms, outcome.resources))[0]
            self._compiled[binary] = (min(ms, best), outcome.resources)
        trial = self._open.pop(_key(candidate), None)
        if trial is None:
            # Replayed; what isn't feasible now still teaches, but is no part of the space.
            if _key(candidate) in self._feasible:
                self._taken.add(_key(candidate))
            state = optuna.trial.TrialState.COMPLETE if ms else optuna.trial.TrialState.PRUNED
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    value=ms,
                    params=self._params(candidate),
                    distributions=self._distributions(candidate),
                )
            )
        elif ms is None:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, ms)

    def _take(self, candidate: Candidate) -> bool:
        if _key(candidate) in self._taken:
            return False
        self._taken.add(_key(candidate))
        if not self._brute_force:
            self._study.enqueue_trial(self._params(candidate))
            trial = self._study.ask()
            self._suggest(trial)
            self._open[_key(candidate)] = trial
        return True

    def _propose(self) -> Candidate | None:
        trial = self._study.ask()
        candidate = self._suggest(trial)
        key = _key(candidate)
        if key not in self._feasible or key in self._taken:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return None
        self._taken.add(key)
        self._open[key] = trial
        return candidate

    def _suggest(self, trial: optuna.trial.Trial) -> Candidate:
        names = sorted(self._kernels)
        name = trial.suggest_categorical("kernel", names)
        kernel = self._kernels[name]
        values: dict[str, Value] = {}
        for param in kernel.space.params:
            chosen = trial.suggest_categorical(f"{name}.{param.name}", list(param.choices))
            # Optuna's types allow floats and None; the choices are ours.
            assert isinstance(chosen, bool | int | str)
            values[param.name] = chosen
        return Candidate(kernel=kernel, config=Config(**values), came_from="tpe")

    def _params(self, candidate: Candidate) -> dict[str, bool | int | str]:
        name = candidate.kernel.name
        values = {f"{name}.{param}": value for param, value in candidate.config.items()}
        return {"kernel": name, **values}

    def _distributions(
        self, candidate: Candidate
    ) -> dict[str, optuna.distributions.BaseDistribution]:
        name = candidate.kernel.name
        categorical = optuna.distributions.CategoricalDistribution
        found: dict[str, optuna.distributions.BaseDistribution] = {
            f"{name}.{param.name}": categorical(list(param.choices))
            for param in candidate.kernel.space.params
        }
        return {"kernel": categorical(sorted(self._kernels)), **found}


def _create_study(seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Optuna calls joint sampling and the constant liar experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=_FROM_RANKING,
            multivariate=True,
            group=True,
            constant_liar=True,
        )
    return optuna.create_study(direction="minimize", sampler=sampler)


def _binary(candidate: Candidate) -> Binary:
    return candidate.kernel.name, candidate.kernel.space.compiled(candidate.config)


def _key(candidate: Candidate) -> str:
    return f"{candidate.kernel.name} {candidate.config.to_json()}"
