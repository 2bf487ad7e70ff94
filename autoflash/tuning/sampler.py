"""Optuna's tree-structured Parzen estimator over candidates that are known to be feasible.

Where constraints leave few of a space's combinations, a sampler that draws each Param proposes what
is infeasible or was tried ten times for each new candidate, and a tune waits for it. This one
weighs all candidates that are left, at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray

from autoflash.space import Value
from autoflash.tuning.job import Candidate

# As Optuna's: the share of the trials that count as good, the most of them, and what is drawn from
# their density to choose from by the ratio of both.
_GOOD_SHARE = 0.1
_MOST_GOOD = 25
_DRAWN = 24
# The prior of good trials falls by e in so large a part of a ranking.
_RANKED = 0.1
# The kernel's name, among the parameters of a trial.
KERNEL = "kernel"

Distributions = dict[str, optuna.distributions.BaseDistribution]


def parameters(candidate: Candidate) -> dict[str, Value]:
    """A candidate as the parameters of an Optuna trial."""
    name = candidate.kernel.name
    return {KERNEL: name, **{f"{name}.{param}": x for param, x in candidate.config.items()}}


class FeasibleSampler(optuna.samplers.BaseSampler):
    """TPE (Bergstra et al., 2011) for categorical parameters, multivariate: the density of good
    trials at x is the mean over them of a product of kernels, one per parameter, and so is that of
    the others; candidates under way count as bad (the constant liar). To the good ones' mean the
    ranking adds a prior, to the others' all candidates alike.

    ``take`` says that a candidate was handed out, ``learn`` what became of one, handed out or not.
    """

    def __init__(self, candidates: Sequence[Candidate], seed: int) -> None:
        """``candidates``: the most promising first."""
        self._candidates = list(candidates)
        self._place = {candidate: place for place, candidate in enumerate(candidates)}
        self._lot = np.random.default_rng(seed)
        self._free = np.ones(len(self._candidates), dtype=bool)
        kernels = sorted({c.kernel.name: c.kernel for c in candidates}.items())
        categorical = optuna.distributions.CategoricalDistribution
        self.distributions: Distributions = {KERNEL: categorical([name for name, _ in kernels])}
        # The number of each choice, by kernel: where its candidates lie, and their codes.
        self._places: dict[str, NDArray[np.int64]] = {}
        self._codes: dict[str, NDArray[np.int8]] = {}
        self._choices: dict[str, list[tuple[str, list[Value]]]] = {}
        for name, kernel in kernels:
            choices = [(param.name, list(param.choices)) for param in kernel.space.params]
            self._choices[name] = choices
            for param, values in choices:
                self.distributions[f"{name}.{param}"] = categorical(values)
            places = [i for i, c in enumerate(self._candidates) if c.kernel.name == name]
            self._places[name] = np.array(places)
            self._codes[name] = np.stack([self._code(self._candidates[i]) for i in places])
        self._uniform = np.empty(len(self._candidates))
        for name, own in self._places.items():
            sizes = [len(values) for _, values in self._choices[name]]
            self._uniform[own] = 1.0 / (len(self._places) * np.prod(sizes))
        promise = np.exp(-np.arange(len(self._candidates)) / (_RANKED * len(self._candidates)))
        self._promising = promise * (self._uniform.sum() / promise.sum())
        # Of each trial its kernel, in how many parameters each candidate of that differs, its time.
        self._trials: dict[Candidate, tuple[str, NDArray[np.int8], float]] = {}

    def take(self, place: int) -> None:
        """The candidate at ``place`` is under way."""
        self.learn(self._candidates[place], None)

    def learn(self, candidate: Candidate, ms: float | None) -> None:
        """Its time; None if it failed, or isn't known yet. It need not be a feasible one."""
        name = candidate.kernel.name
        if candidate in self._trials:
            differing = self._trials[candidate][1]
        else:
            differing = (self._codes[name] != self._code(candidate)).sum(axis=1, dtype=np.int8)
        self._trials[candidate] = (name, differing, np.inf if ms is None else ms)
        if candidate in self._place:
            self._free[self._place[candidate]] = False

    def choose(self) -> int | None:
        """The place of what to try next; None if nothing is left."""
        (free,) = np.nonzero(self._free)
        if len(free) == 0:
            return None
        trials = sorted(self._trials.values(), key=lambda trial: trial[2])
        timed = sum(trial[2] < np.inf for trial in trials)
        good = min(int(np.ceil(_GOOD_SHARE * timed)), _MOST_GOOD)
        density = (self._promising + self._density(trials[:good]))[free]
        other = (self._uniform + self._density(trials[good:]))[free]
        drawn = self._lot.choice(len(free), size=_DRAWN, p=density / density.sum())
        best = drawn[np.argmax(density[drawn] / other[drawn])]
        return int(free[best])

    def _density(
        self, trials: Sequence[tuple[str, NDArray[np.int8], float]]
    ) -> NDArray[np.float64]:
        """Of each candidate the sum of the trials' kernels."""
        # What a kernel gives a choice that isn't the trial's, over what it adds for that.
        rest = 1.0 / (len(trials) + 1)
        found = np.zeros(len(self._candidates))
        for name, places in self._places.items():
            counts = np.array([len(values) for _, values in self._choices[name]])
            # By the number of parameters that differ.
            steps = np.arange(len(counts) + 1)
            kernel = rest**steps * (1 + rest) ** (len(counts) - steps) / np.prod(1 + counts * rest)
            for of, differing, _ in trials:
                if of == name:
                    found[places] += kernel[differing]
        return found

    def _code(self, candidate: Candidate) -> NDArray[np.int8]:
        """The number of each choice; -1 for one that there is no more."""
        config = candidate.config
        return np.array(
            [
                values.index(config[param]) if config[param] in values else -1
                for param, values in self._choices[candidate.kernel.name]
            ],
            dtype=np.int8,
        )

    # --- what Optuna asks of a sampler

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> Distributions:
        del study, trial
        return self.distributions

    def sample_relative(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        search_space: Mapping[str, optuna.distributions.BaseDistribution],
    ) -> dict[str, Any]:
        del study, trial, search_space
        place = self.choose()
        # Search asks only while there is something to choose from.
        assert place is not None
        return parameters(self._candidates[place])

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: optuna.distributions.BaseDistribution,
    ) -> Any:
        raise AssertionError(f"{param_name} was not chosen with the others")
