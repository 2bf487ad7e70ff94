"""Replayed searches: what they count, and that each way of searching hands out what it should."""

import random

import pytest

from autoflash.store.record import TrialStatus
from autoflash.tuning.replay import (
    Space,
    at_random,
    best_so_far,
    by_search,
    in_order,
    trials_to_reach,
)
from autoflash.tuning.search import ranked


@pytest.fixture
def space(lab):
    """24 configs: the third fastest failed, the fastest takes 1 ms."""
    return Space(trials=lab.trials({2: TrialStatus.wrong_result}))


def test_times_and_the_best(lab, space):
    times = space.times
    assert len(times) == 24
    by_speed = lab.by_speed()
    assert [times[c] for c in by_speed[:4]] == [1.0, 1.01, None, 1.01**3]
    assert space.best_ms == 1.0


def test_an_order_is_walked_and_counted(lab, space):
    slowest_first = list(reversed(lab.by_speed()))
    shares = best_so_far(space, *in_order(slowest_first), count=24)
    assert shares[0] == pytest.approx(1 / 1.01**23)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    # The failed one, second before the last but one, changes nothing.
    assert shares[21] == shares[20]
    assert trials_to_reach(shares, 1.0) == 24
    assert trials_to_reach(shares, 0.98) == 23
    assert trials_to_reach(shares[:5], 0.98) is None


def test_it_ends_with_the_count_or_the_space(lab, space):
    candidates = lab.by_speed()
    assert len(best_so_far(space, *in_order(candidates), count=5)) == 5
    assert len(best_so_far(space, *in_order(candidates[:3]), count=5)) == 3


def test_random_orders_differ_by_seed_and_leave_nothing_out(space):
    def order(seed):
        ask, _ = at_random(space, seed)
        return [ask() for _ in range(24)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert set(order(1)) == set(space.times)


def test_the_search_starts_with_the_advice_and_finds_everything(lab, space):
    slow = lab.by_speed()[-1]
    ask, tell = by_search(space, [slow], seed=0)
    first = ask()
    assert first == slow
    tell(first, space.times[first])
    found = {first}
    while (candidate := ask()) is not None:
        tell(candidate, space.times[candidate])
        found.add(candidate)
    assert found == set(space.times)


def test_a_search_hears_of_a_candidate_when_others_have_been_asked_for(space):
    """With three under way, the fourth is asked for after the first was told."""
    events = []
    order = sorted(space.times, key=lambda c: c.config.to_json())
    random.Random(0).shuffle(order)
    left = iter(order)

    def ask():
        events.append("ask")
        return next(left, None)

    best_so_far(space, ask, lambda candidate, ms: events.append("tell"), count=4, depth=3)
    assert events[:6] == ["ask", "ask", "ask", "tell", "ask", "tell"]


def test_rankings_hold_every_candidate_once(lab, space):
    assert space.ranking() == ranked([lab.kernel], lab.problem, lab.a100)
    compiled = space.compiled_ranking()
    assert len(compiled) == 24
    assert set(compiled) == set(space.times)
