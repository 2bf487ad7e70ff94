"""The sampler over feasible candidates: its densities by their definition, and what it chooses."""

import collections
import dataclasses
import math
import statistics

import numpy as np
import optuna
import pytest

from autoflash.kernels import kernels_for
from autoflash.problem import Problem
from autoflash.target import named_target
from autoflash.tuning.sampler import FeasibleSampler, parameters
from autoflash.tuning.search import ranked


@pytest.fixture(scope="module")
def candidates():
    """Some of two kernels."""
    problem = Problem.parse({"batch": 4, "heads": 8, "seqlen": 2048, "head_dim": 128})
    target = named_target("h200")
    found = ranked(kernels_for(problem, target), problem, target)
    by_kernel = collections.defaultdict(list)
    for candidate in found:
        by_kernel[candidate.kernel.name].append(candidate)
    assert len(by_kernel) == 2
    return [c for some in by_kernel.values() for c in some[::7][:60]]


def density(trials, x):
    """The sum over trials of products of categorical kernels."""
    rest = 1 / (len(trials) + 1)
    found = 0.0
    for trial in trials:
        if trial.kernel.name == x.kernel.name:
            found += math.prod(
                ((trial.config[p.name] == x.config[p.name]) + rest) / (1 + len(p.choices) * rest)
                for p in x.kernel.space.params
            )
    return found


def test_densities_are_those_of_the_definition(candidates):
    sampler = FeasibleSampler(candidates, seed=0)
    trials = candidates[::9]
    for i, trial in enumerate(trials):
        sampler.learn(trial, 1.0 + i)
    for some in (trials, trials[:1], []):
        known = [sampler._trials[trial] for trial in some]
        want = [density(some, x) for x in candidates]
        np.testing.assert_allclose(sampler._density(known), want, rtol=1e-12)


def test_the_ranking_is_the_prior(candidates):
    sampler = FeasibleSampler(candidates, seed=0)
    promising, uniform = sampler._promising, sampler._uniform
    assert (np.diff(promising) < 0).all()
    assert promising.sum() == pytest.approx(uniform.sum())
    assert uniform.sum() <= 1
    # Without trials most of what is drawn is near the top.
    assert statistics.median(sampler.choose() for _ in range(50)) < len(candidates) / 5


def test_what_is_chosen_is_free_and_repeats_with_the_seed(candidates):
    def order(seed):
        sampler = FeasibleSampler(candidates, seed)
        found = []
        while (place := sampler.choose()) is not None:
            sampler.take(place)
            sampler.learn(candidates[place], 1.0 + place % 7)
            found.append(place)
        return found

    first = order(0)
    assert sorted(first) == list(range(len(candidates)))
    assert order(0) == first
    assert order(1) != first


def test_it_goes_where_good_ones_are_and_leaves_where_all_fail(candidates):
    name, other = sorted({c.kernel.name for c in candidates})
    good, bad = ([c for c in candidates if c.kernel.name == n] for n in (other, name))
    sampler = FeasibleSampler(candidates, seed=0)
    for i, candidate in enumerate(good[:4]):
        sampler.learn(candidate, 1.0 + i / 10)
    for candidate in bad[:20]:
        sampler.learn(candidate, None)
    chosen = [candidates[sampler.choose()].kernel.name for _ in range(30)]
    assert chosen.count(other) > 25


def test_what_is_under_way_counts_as_bad(candidates):
    sampler = FeasibleSampler(candidates, seed=0)
    sampler.learn(candidates[0], 1.0)
    sampler.take(1)
    *_, ms = sampler._trials[candidates[1]]
    assert ms == math.inf
    sampler.learn(candidates[1], 0.5)
    assert sampler._trials[candidates[1]][2] == 0.5


def test_a_trial_that_is_not_feasible_now_teaches(candidates):
    sampler = FeasibleSampler(candidates[1:], seed=0)
    sampler.learn(candidates[0], 1.0)
    assert len(sampler._trials) == 1
    gone = dataclasses.replace(
        candidates[0], config=type(candidates[0].config)(**{**candidates[0].config, "STAGES": 99})
    )
    if gone.kernel.name == "flash_fwd_ws":
        sampler.learn(gone, 2.0)
        assert len(sampler._trials) == 2
    assert sampler.choose() is not None


def test_optuna_is_given_one_candidate_at_a_time(candidates):
    sampler = FeasibleSampler(candidates, seed=3)
    study = optuna.create_study(sampler=sampler)
    trial = study.ask()
    given = {"kernel": trial.suggest_categorical("kernel", sampler.distributions["kernel"].choices)}
    for name, distribution in sampler.distributions.items():
        if name.startswith(given["kernel"] + "."):
            given[name] = trial.suggest_categorical(name, distribution.choices)
    assert given in [parameters(c) for c in candidates]
