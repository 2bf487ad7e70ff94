"""Search spaces change from version to version: a trial is keyed by its own config, source hash
and target, so that what still means the same is kept."""

import dataclasses
import logging
import sqlite3
from contextlib import closing

import pytest

from autoflash.kernels import kernels_for
from autoflash.kernels.flash_fwd import FlashFwd
from autoflash.kernels.flash_fwd_ws import FlashFwdWs
from autoflash.problem import Bucket
from autoflash.space import Constraint
from autoflash.store.store import Store
from autoflash.target import named_target
from autoflash.tuning.progress import Budget, Listener
from autoflash.tuning.runner import RecordedRunner
from autoflash.tuning.search import ranked
from autoflash.tuning.study import tune_one

AMPLE = Budget(seconds=600, trials=None)


@pytest.fixture
def declare(monkeypatch):
    """Gives flash_fwd other choices of a Param, as another version would."""
    original = FlashFwd.space

    def change(name, choices):
        params = tuple(
            dataclasses.replace(p, choices=choices) if p.name == name else p
            for p in original.params
        )
        monkeypatch.setattr(FlashFwd, "space", dataclasses.replace(original, params=params))

    return change


def forbid(monkeypatch, kernel, why_not, *, advice):
    """A Constraint more, as another version would have."""
    constraint = Constraint(name="new", why_not=why_not, advice=advice)
    space = dataclasses.replace(kernel.space, constraints=(*kernel.space.constraints, constraint))
    monkeypatch.setattr(kernel, "space", space)


def run(lab, store, recorded, budget=AMPLE):
    runner = lab.runner(recorded)
    return tune_one(lab.problem, runner, store, budget, Listener()), keys(runner.asked)


def keys(trials_or_candidates):
    return [one.config.to_json() for one in trials_or_candidates]


def rows(store, table):
    with closing(sqlite3.connect(store.path)) as raw:
        return raw.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()


def test_a_choice_more_adds_its_configs_alone(lab, store, declare):
    old = lab.trials()
    first, _ = run(lab, store, old)
    before = rows(store, "trials")
    declare("GROUP_HEADS", (1, 2, 8, 32))
    recorded = lab.trials()
    assert set(keys(old)) < set(keys(recorded))
    second, asked = run(lab, store, recorded)
    assert second.resumed == len(old) == 24
    assert second.trials[:24] == first.trials
    assert sorted(asked) == sorted(set(keys(recorded)) - set(keys(old)))
    assert all('"GROUP_HEADS":2' in key for key in asked)
    assert rows(store, "trials")[:24] == before
    assert store.best(Bucket.of(lab.problem), lab.a100) == second.record


def test_a_choice_less_hides_its_trials_and_no_others(lab, store, declare, caplog):
    recorded = lab.trials()
    assert recorded[0].config["num_stages"] != recorded[1].config["num_stages"]
    gone = recorded[0].config["num_stages"]
    first, _ = run(lab, store, recorded)
    before = rows(store, "trials"), rows(store, "records")

    declare("num_stages", tuple(n for n in (1, 2, 3, 4) if n != gone))
    kept = [trial for trial in first.trials if trial.config["num_stages"] != gone]
    assert 0 < len(kept) < 24
    again = Store(store.path)
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        second, asked = run(lab, again, recorded)
    assert (second.resumed, second.trials, asked) == (len(kept), kept, [])
    fastest = min(kept, key=lambda t: t.measurement.median_ms)
    assert second.record.config == fastest.config
    assert again.best(Bucket.of(lab.problem), lab.a100) == second.record
    (message,) = [r.getMessage() for r in caplog.records]
    assert f": num_stages={gone}" in message.replace("'", "")
    assert "must be one of" in message
    # Hidden, not lost.
    after = rows(store, "trials"), rows(store, "records")
    assert after == (before[0], [*before[1], after[1][-1]])

    declare("num_stages", (1, 2, 3, 4))
    third, asked = run(lab, Store(store.path), recorded)
    assert (third.resumed, third.trials, asked) == (24, first.trials, [])
    assert third.record.config == first.record.config == recorded[0].config


def test_a_choice_less_after_a_run_that_was_cut_short(lab, store, declare):
    recorded = lab.trials()
    first, _ = run(lab, store, recorded, Budget(seconds=600, trials=10))
    declare("num_stages", (1, 2, 3))
    kept = [key for key in keys(first.trials) if '"num_stages":4' not in key]
    second, asked = run(lab, store, recorded)
    assert keys(second.trials[: second.resumed]) == kept
    assert sorted(kept + asked) == sorted(keys(lab.candidates()))


def test_what_a_new_constraint_forbids_does_not_win(lab, store, monkeypatch):
    recorded = lab.trials()
    run(lab, store, recorded)
    best = recorded[0].config
    forbid(
        monkeypatch, FlashFwd, lambda config, *_: "hangs" if config == best else None, advice=False
    )
    result, asked = run(lab, store, recorded)
    assert (result.resumed, asked) == (23, [])
    assert result.record.config == recorded[1].config


def test_what_new_advice_is_against_still_counts(lab, store, monkeypatch):
    """It ran, and a record of it serves: it is only not worth trying."""
    recorded = lab.trials()
    run(lab, store, recorded)
    best = recorded[0].config
    forbid(
        monkeypatch, FlashFwd, lambda config, *_: "loses" if config == best else None, advice=True
    )
    result, asked = run(lab, store, recorded)
    assert (result.resumed, asked) == (24, [])
    assert result.record.config == best


@pytest.mark.parametrize("advice", [False, True])
def test_trials_of_a_kernel_that_has_no_config_left(lab, store, monkeypatch, advice):
    h200 = named_target("h200")

    def recorded():
        candidates = ranked(kernels_for(lab.problem, h200), lab.problem, h200)
        return [lab.trial(c, 2 + i / 100, target=h200) for i, c in enumerate(candidates)]

    trials = recorded()
    fused = [t for t in trials if t.kernel == "flash_fwd_ws"]
    plain = [t for t in trials if t.kernel == "flash_fwd"]
    store.add_trials([*fused[:3], *plain[:-2]])
    forbid(monkeypatch, FlashFwdWs, lambda *_: "never again", advice=advice)
    runner = RecordedRunner(h200, lab.versions, trials)
    result = tune_one(lab.problem, runner, store, AMPLE, Listener())
    assert sorted(keys(runner.asked)) == sorted(keys(plain[-2:]))
    assert result.resumed == len(plain) - 2 + (3 if advice else 0)
    assert result.record.kernel == (trials[0].kernel if advice else "flash_fwd")
