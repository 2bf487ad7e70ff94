"""Search: every feasible candidate once, the advised ones first, and learning on the way."""

import collections
import copy
import dataclasses
import random

import pytest

from autoflash.kernels import kernels_for
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.store.record import TrialStatus
from autoflash.target import named_target
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.resources import Resources
from autoflash.tuning.search import Search, ranked, spread

H100 = named_target("h100")


def label(candidate):
    return f"{candidate.kernel.name} {candidate.config.to_json()}"


def drain(search, ms=lambda number, candidate: 1.0 + number % 7):
    """Ask and tell until the search ends; what was handed out, in order."""
    asked = []
    while (candidate := search.ask()) is not None:
        asked.append(candidate)
        search.tell(candidate, ms(len(asked), candidate))
        assert len(asked) <= 1000
    return asked


# --- ranking


def test_ranked_is_every_feasible_config_by_the_models_time(lab):
    candidates = lab.candidates()
    feasible = lab.kernel.space.configs(lab.problem, lab.a100)
    assert len(candidates) == len(feasible) == 24
    assert {c.config for c in candidates} == set(feasible)

    def model(candidate):
        config = candidate.config
        blocks = lab.kernel.estimate_blocks_per_sm(lab.problem, config, lab.a100)
        return lab.kernel.estimate_ms(lab.problem, config, lab.a100, blocks)

    times = [model(c) for c in candidates]
    assert times == sorted(times)
    assert candidates == lab.candidates()


def test_ranked_does_not_depend_on_the_order_of_the_space(lab, monkeypatch):
    expected = lab.candidates()
    configs = lab.kernel.space.configs(lab.problem, lab.a100)
    random.Random(1).shuffle(configs)
    shuffled = dataclasses.replace(lab.kernel.space)
    object.__setattr__(shuffled, "configs", lambda problem, target: configs)
    monkeypatch.setattr(type(lab.kernel), "space", shuffled)
    assert lab.candidates() == expected


def choices(candidates):
    return {(c.kernel.name, *item) for c in candidates for item in c.config.items()}


def test_what_is_spread_starts_with_the_first_and_shows_more_choices():
    problem = Problem.parse({"batch": 4, "heads": 32, "seqlen": 4096, "head_dim": 64})
    candidates = ranked(kernels_for(problem, H100), problem, H100)
    found = spread(candidates, 16)
    assert found[:4] == candidates[:4]
    assert len({label(c) for c in found}) == 16
    assert len(choices(found)) > len(choices(candidates[:16]))
    near = candidates[: len(candidates) // 20]
    assert choices(found) == choices(near)
    assert spread(candidates, 16) == found


def test_what_is_spread_is_no_more_than_there_is(lab):
    candidates = lab.candidates()
    assert spread(candidates, 3) == candidates[:3]
    assert {label(c) for c in spread(candidates, 16)} == set(map(label, candidates[:16]))
    assert {label(c) for c in spread(candidates, 100)} == set(map(label, candidates))
    assert spread([], 16) == []


# --- exhausting the space


@pytest.mark.parametrize("brute_force", [False, True])
@pytest.mark.parametrize("failing", [0, 2, 1], ids=["all good", "every second fails", "all fail"])
def test_every_candidate_comes_exactly_once(lab, brute_force, failing):
    candidates = lab.candidates()
    search = Search(candidates, brute_force=brute_force)
    assert search.size == 24

    def ms(number, candidate):
        return None if failing and number % failing == 0 else 1.0 + number % 5

    asked = drain(search, ms)
    assert collections.Counter(map(label, asked)) == collections.Counter(map(label, candidates))
    assert search.ask() is None


@pytest.mark.parametrize("brute_force", [False, True])
def test_all_may_be_asked_before_any_is_told(lab, brute_force):
    candidates = lab.candidates()
    search = Search(candidates, brute_force=brute_force)
    asked = [search.ask() for _ in candidates]
    assert sorted(map(label, asked)) == sorted(map(label, candidates))
    assert search.ask() is None
    for number, candidate in enumerate(reversed(asked)):
        search.tell(candidate, float(number + 1) if number % 3 else None)
    assert search.ask() is None


def test_brute_force_walks_the_ranking(lab):
    candidates = lab.candidates()
    assert drain(Search(candidates, brute_force=True)) == candidates


def test_the_ranking_comes_before_tpe(lab):
    candidates = lab.candidates()
    search = Search(candidates)
    assert [search.ask() for _ in range(16)] == candidates[:16]


def test_infeasible_is_never_handed_out(lab):
    # A third of what the space allows, so that TPE proposes much that may not be tried.
    few = lab.candidates()[::3]
    asked = drain(Search(few))
    assert sorted(map(label, asked)) == sorted(map(label, few))


def test_nothing_to_search():
    search = Search([])
    assert search.size == 0
    assert search.ask() is None


# --- advice


@pytest.mark.parametrize("brute_force", [False, True])
def test_advice_comes_first(lab, brute_force):
    candidates = lab.candidates()
    advice = [candidates[-1], candidates[20], candidates[-1]]
    asked = drain(Search(candidates, brute_force=brute_force, first=advice))
    assert asked[:3] == [candidates[-1], candidates[0], candidates[20]]
    assert len(asked) == len(set(map(label, asked))) == 24


def test_infeasible_advice_is_dropped(lab):
    candidates = lab.candidates()
    tma = Config(**{**candidates[0].config, "LOAD": "tma"})
    assert lab.kernel.space.why_not(tma, lab.problem, lab.a100) is not None
    search = Search(candidates, first=[Candidate(kernel=lab.kernel, config=tma)])
    assert search.ask() == candidates[0]


# --- replay


@pytest.mark.parametrize("brute_force", [False, True])
def test_replayed_candidates_are_not_asked(lab, brute_force):
    candidates = lab.candidates()
    search = Search(candidates, brute_force=brute_force, first=candidates[5:8])
    replayed = candidates[0:20:2]
    for number, candidate in enumerate(replayed):
        search.tell(candidate, 2.0 if number % 2 else None)
    asked = drain(search)
    expected = [c for c in candidates if c not in replayed]
    assert sorted(map(label, asked)) == sorted(map(label, expected))


def test_replaying_all_ends_the_search(lab):
    candidates = lab.candidates()
    search = Search(candidates)
    for candidate in candidates:
        search.tell(candidate, 1.0)
    assert search.ask() is None


# --- learning


def slowness(candidate):
    """A time that only some of the params decide; its best is far down in the ranking."""
    config = candidate.config
    ms = 1.0 + abs(config.integer("BLOCK_M") - 64) / 64 + abs(config.integer("BLOCK_N") - 32) / 32
    ms += 0.5 * abs(config.integer("num_stages") - 4) + (config["LOAD"] == "tma")
    return ms + (config["maxnreg"] != 0) + 0.1 * (config["GROUP_HEADS"] != 8)


def test_tpe_finds_what_the_ranking_hides(lab):
    problem = dataclasses.replace(
        lab.problem, batch=4, heads=8, kv_heads=8, seqlen_q=4096, seqlen_k=4096
    )
    candidates = ranked([lab.kernel], problem, H100)
    best = min(map(slowness, candidates))
    assert len(candidates) > 500
    # 16 from the ranking, then TPE: a tenth of the space in all.
    assert min(map(slowness, candidates[: len(candidates) // 10])) > best + 0.4
    search = Search(candidates)
    found = []
    for _ in range(len(candidates) // 10):
        candidate = search.ask()
        found.append(slowness(candidate))
        search.tell(candidate, found[-1])
    assert min(found) <= best + 0.1


def test_a_search_is_repeatable(lab):
    def run(seed):
        return list(map(label, drain(Search(lab.candidates(), seed=seed))))

    assert run(0) == run(0)


def test_replayed_infeasible_ones_do_not_count(lab):
    candidates = lab.candidates()
    search = Search(candidates)
    for c in candidates[:3]:
        search.tell(Candidate(kernel=lab.kernel, config=Config(**{**c.config, "LOAD": "tma"})), 1.0)
    asked = []
    while (c := search.ask()) is not None:
        asked.append(c)
        search.tell(c, 1.0)
    assert len(asked) == 24


# --- those whose binary is there already


def launches(lab):
    """Candidates that share binaries: num_stages stands for what changes no code."""
    params = [
        dataclasses.replace(p, compiled=p.name != "num_stages") for p in lab.kernel.space.params
    ]
    space = dataclasses.replace(lab.kernel.space, params=tuple(params))
    kernel = copy.copy(lab.kernel)
    kernel.space = space
    return [dataclasses.replace(c, kernel=kernel) for c in lab.candidates()]


def ran(registers=100):
    resources = Resources(shared_bytes=1000, registers=registers, spills=0)
    return Outcome(status=TrialStatus.ok, resources=resources)


def binary(candidate):
    return {k: v for k, v in candidate.config.items() if k != "num_stages"}


@pytest.mark.parametrize("brute_force", [False, True])
def test_what_shares_a_binary_with_the_fastest_comes_first(lab, brute_force):
    candidates = launches(lab)
    search = Search(candidates, brute_force=brute_force)
    assert search.ask_compiled() is None
    groups = collections.Counter(str(binary(c)) for c in candidates)
    assert max(groups.values()) > 1
    slow, fast = [search.ask(), search.ask()]
    while binary(slow) == binary(fast):
        fast = search.ask()
    search.tell(slow, 2.0, ran(90))
    search.tell(fast, 1.0, ran(80))
    found = []
    while (handed := search.ask_compiled()) is not None:
        candidate, compiled = handed
        assert candidate.came_from == "compiled"
        found.append((binary(candidate) == binary(fast), compiled.resources.registers))
        assert binary(candidate) in (binary(slow), binary(fast))
        search.tell(candidate, 3.0, compiled)
    wanted = groups[str(binary(fast))] - 1
    assert found[:wanted] == [(True, 80)] * wanted
    assert found[wanted:] == [(False, 90)] * (groups[str(binary(slow))] - 1)
    # None comes a second time.
    assert len({label(c) for c in drain(search)} | {label(slow), label(fast)}) + len(found) >= 24


def test_what_failed_or_was_replayed_has_no_binary(lab):
    candidates = launches(lab)
    search = Search(candidates)
    search.tell(search.ask(), None, ran())
    search.tell(search.ask(), 1.0)
    assert search.ask_compiled() is None
