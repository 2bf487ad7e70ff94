"""What to try next: Optuna over the search space, without repeats.

Failed candidates are told as PRUNED, from which the sampler learns; a candidate is handed out once.
The first ones come from whoever has advice and from the written model's ranking. When the whole
space fits the budget the ranking is simply walked to its end (brute force).

What a GPU would wait for is compiling. Candidates whose binary is there already, since they differ
from one that ran only in how it is launched, are handed out meanwhile: ``ask_compiled``.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import optuna

from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.space import Config, Value
from autoflash.store.record import TrialStatus
from autoflash.target import Target
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.resources import Resources
from autoflash.tuning.sampler import KERNEL, FeasibleSampler, parameters

# Of the ranking, tried before TPE has a say: its first ones, then others near the top that differ.
_FROM_RANKING = 16
_FIRST_RANKED = 4
# The share of a ranking that counts as near its top.
_NEAR_TOP = 0.05

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
        self._places = {_key(c): place for place, c in enumerate(candidates)}
        self._ranking: Iterator[Candidate] = iter(candidates)
        self._first = spread(candidates, _FROM_RANKING)
        self.advise(first)
        self._taken: set[str] = set()
        self._kernels = {c.kernel.name: c.kernel for c in candidates}
        walked = brute_force or not candidates
        self._sampler = None if walked else FeasibleSampler(candidates, seed)
        self._study = None if self._sampler is None else _create_study(self._sampler)
        self._open: dict[str, optuna.trial.Trial] = {}
        # By binary: the candidates of each, those first that rank first; the best time so far of
        # those that ran in this study, and their resources.
        self._sharing: dict[Binary, list[Candidate]] = {}
        for candidate in candidates:
            self._sharing.setdefault(_binary(candidate), []).append(candidate)
        self._compiled: dict[Binary, tuple[float, Resources]] = {}

    def advise(self, first: Iterable[Candidate]) -> None:
        """Try these before anything else, those that are feasible; only the ranking's first comes
        second: it is the best more often than a second neighbour's winner (docs/tuning.md)."""
        known = [c for c in first if _key(c) in self._places]
        self._first = known[:1] + self._first[:1] + known[1:] + self._first[1:]

    @property
    def size(self) -> int:
        """Feasible candidates in all."""
        return len(self._places)

    def ask(self) -> Candidate | None:
        """A candidate that was never handed out or replayed; None when all were."""
        if len(self._taken) >= len(self._places):
            return None
        while self._first:
            candidate = self._first.pop(0)
            if self._take(candidate):
                return candidate
        if self._study is not None:
            return self._propose(self._study)
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
        key = _key(candidate)
        if key in self._places:
            self._taken.add(key)
        if self._study is None or self._sampler is None:
            return
        # What isn't feasible now still teaches, but is no part of the space.
        self._sampler.learn(candidate, ms)
        trial = self._open.pop(key, None)
        state = optuna.trial.TrialState.PRUNED if ms is None else optuna.trial.TrialState.COMPLETE
        if trial is None:
            of_kernel = (KERNEL, f"{candidate.kernel.name}.")
            distributions = {
                name: distribution
                for name, distribution in self._sampler.distributions.items()
                if name.startswith(of_kernel)
            }
            replayed = optuna.trial.create_trial(
                state=state, value=ms, params=parameters(candidate), distributions=distributions
            )
            self._study.add_trial(replayed)
        else:
            self._study.tell(trial, ms, state=state)

    def _take(self, candidate: Candidate) -> bool:
        key = _key(candidate)
        if key in self._taken:
            return False
        if self._study is None:
            self._taken.add(key)
        else:
            self._study.enqueue_trial(parameters(candidate))
            self._propose(self._study)
        return True

    def _propose(self, study: optuna.Study) -> Candidate:
        """What the study asks for next: what was enqueued, or the sampler's choice."""
        trial = study.ask()
        candidate = self._suggest(trial)
        key = _key(candidate)
        assert self._sampler is not None
        self._sampler.take(self._places[key])
        self._taken.add(key)
        self._open[key] = trial
        return candidate

    def _suggest(self, trial: optuna.trial.Trial) -> Candidate:
        name = trial.suggest_categorical(KERNEL, sorted(self._kernels))
        kernel = self._kernels[name]
        values: dict[str, Value] = {}
        for param in kernel.space.params:
            chosen = trial.suggest_categorical(f"{name}.{param.name}", list(param.choices))
            # Optuna's types allow floats and None; the choices are ours.
            assert isinstance(chosen, bool | int | str)
            values[param.name] = chosen
        return Candidate(kernel=kernel, config=Config(**values), came_from="tpe")


def _create_study(sampler: FeasibleSampler) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="minimize", sampler=sampler)


def _binary(candidate: Candidate) -> Binary:
    return candidate.kernel.name, candidate.kernel.space.compiled(candidate.config)


def _key(candidate: Candidate) -> str:
    return f"{candidate.kernel.name} {candidate.config.to_json()}"
