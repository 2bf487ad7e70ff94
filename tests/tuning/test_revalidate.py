"""After an upgrade stored winners and runners-up are tried again, and nothing else; over recorded
trials."""

import contextlib
import dataclasses

import pytest

from autoflash.errors import UnsupportedError
from autoflash.kernels import KERNELS
from autoflash.problem import Bucket
from autoflash.store.record import TrialStatus
from autoflash.target import named_target
from autoflash.tuning import revalidate as module
from autoflash.tuning import tune as loop
from autoflash.tuning.progress import Budget, Listener, make_record
from autoflash.tuning.revalidate import revalidate, revalidate_on
from autoflash.tuning.runner import RecordedRunner
from autoflash.tuning.study import tune_one
from tests.test_cli import autoflash

AMPLE = Budget(seconds=600, trials=None)
STAMPS = ("2025-01-01T00:00:00+00:00", "2025-02-01T00:00:00+00:00")


@pytest.fixture
def tuned(lab, store, monkeypatch):
    """A store with a study of all 24 configs, made before the upgrade."""
    monkeypatch.setattr("autoflash.tuning.study.time_stamp", lambda: STAMPS[0])
    monkeypatch.setattr("autoflash.tuning.versions.time_stamp", lambda: STAMPS[0])
    tune_one(lab.problem, lab.runner(lab.trials()), store, AMPLE, Listener())
    monkeypatch.setattr("autoflash.tuning.study.time_stamp", lambda: STAMPS[1])
    monkeypatch.setattr("autoflash.tuning.versions.time_stamp", lambda: STAMPS[1])
    return store


@pytest.fixture
def upgraded(lab):
    """A runner after an upgrade of the driver: the config in the third place is the fastest now."""

    def make(statuses=None, kind=RecordedRunner):
        times = [3.0, 2.0, 1.0, *(4.0 + i for i in range(21))]
        trials = [
            lab.trial(c, ms, status=(statuses or {}).get(i, TrialStatus.ok))
            for i, (c, ms) in enumerate(zip(lab.by_speed(), times, strict=True))
        ]
        return kind(lab.a100, lab.versions | {"driver": "999"}, trials)

    return make


def again(store, runner, *, everything=False):
    return revalidate_on(runner, store, AMPLE, Listener(), everything)


def best(lab, store):
    return store.best(Bucket.of(lab.problem), lab.a100)


def test_winners_and_runners_up_are_tried_again_and_the_rest_is_not(lab, tuned, upgraded):
    runner, old = upgraded(), best(lab, tuned)
    (one,) = again(tuned, runner)
    default = KERNELS["flash_fwd"].defaults(lab.problem, lab.a100)[0]
    expected = {c.config for c in lab.by_speed()[:5]} | {default}
    assert {candidate.config for candidate in runner.asked} == expected
    assert len(runner.asked) == len(expected) < 24
    assert (one.served, one.fallen) == (old, [])
    new = best(lab, tuned)
    assert new == one.result.record
    assert (new.config, new.measurement.median_ms) == (lab.by_speed()[2].config, 1.0)
    assert (new.provenance.driver, new.provenance.created_at) == ("999", STAMPS[1])
    # Nothing that was stored is lost, and what was tried is kept.
    assert old in tuned.records()
    trials = tuned.trials(Bucket.of(lab.problem), lab.a100)
    assert len(trials) == 24 + len(expected)
    assert {t.provenance.driver for t in trials[24:]} == {"999"}
    # Once is enough.
    assert again(tuned, upgraded()) == []


def test_all_can_be_tried_again(lab, tuned):
    runner = lab.runner(lab.trials())
    assert again(tuned, runner) == []
    (one,) = again(tuned, runner, everything=True)
    assert one.result.record.config == lab.by_speed()[0].config


@pytest.mark.parametrize("name", ["triton", "torch", "cuda", "driver"])
def test_each_version_counts(lab, tuned, name):
    runner = lab.runner(lab.trials())
    runner.versions = runner.versions | {name: "1000"}
    assert len(again(tuned, runner)) == 1


def test_a_changed_template_counts(lab, store):
    trial = lab.trial(lab.by_speed()[0], 1.0)
    old = dataclasses.replace(trial.provenance, source_hash="of another template")
    record = make_record(trial, trial.measurement, "measured", STAMPS[0])
    store.add_record(dataclasses.replace(record, provenance=old))
    assert len(again(store, lab.runner(lab.trials()))) == 1
    assert again(store, lab.runner(lab.trials())) == []
    assert len(store.records()) == 2


@pytest.mark.parametrize("status", ["wrong_result", "compile_error", "crashed"])
def test_a_winner_that_fails_now_is_told_of_and_serves_no_more(lab, tuned, upgraded, status):
    old = best(lab, tuned)
    (one,) = again(tuned, upgraded({0: TrialStatus(status)}))
    (fallen,) = one.fallen
    assert (fallen.config, fallen.status.value) == (old.config, status)
    assert best(lab, tuned).config == lab.by_speed()[2].config
    assert old in tuned.records()
    assert fallen in tuned.trials(Bucket.of(lab.problem), lab.a100)


def test_where_all_fail_nothing_is_stored_and_nothing_lost(lab, tuned, upgraded):
    before = tuned.records()
    (one,) = again(tuned, upgraded(dict.fromkeys(range(24), TrialStatus.wrong_result)))
    assert (one.result.record, len(one.fallen)) == (None, 1)
    assert tuned.records() == before


def test_a_busy_gpu_settles_nothing(lab, tuned, upgraded):
    old = best(lab, tuned)
    (one,) = again(tuned, upgraded(dict.fromkeys(range(24), TrialStatus.noisy)))
    assert one.result.record.measurement.noisy
    assert best(lab, tuned) == old
    assert len(again(tuned, upgraded())) == 1
    assert best(lab, tuned).provenance.driver == "999"


def test_records_of_others_are_tried_too(lab, tuned, upgraded):
    """Another host's word, of a config that was never tried here."""
    theirs = lab.by_speed()[20]
    trial = lab.trial(theirs, 0.5)
    record = make_record(trial, trial.measurement, "measured", STAMPS[0])
    other = dataclasses.replace(record.provenance, origin="elsewhere")
    tuned.add_record(dataclasses.replace(record, provenance=other))
    runner = upgraded()
    (one,) = again(tuned, runner)
    assert one.served.provenance.origin == "elsewhere"
    assert theirs.config in {candidate.config for candidate in runner.asked}
    # It is slower here; the newer driver's word stands.
    assert best(lab, tuned).config == lab.by_speed()[2].config


def test_what_is_predicted_or_of_another_gpu_is_left_alone(lab, store, upgraded):
    trial = lab.trial(lab.by_speed()[0], 1.0)
    record = make_record(trial, trial.measurement, "measured", STAMPS[0])
    model = dataclasses.replace(trial.measurement, method="model", repeats=0)
    store.add_records(
        [
            dataclasses.replace(record, target=named_target("h100")),
            dataclasses.replace(record, kind="predicted", measurement=model),
        ]
    )
    assert again(store, upgraded()) == []


def test_ctrl_c_keeps_what_was_found(lab, tuned, upgraded):
    class Interrupted(RecordedRunner):
        def measure(self, problem, candidate, give_up_ms):
            if len(self.asked) > 4:
                raise KeyboardInterrupt
            return super().measure(problem, candidate, give_up_ms)

    longer = dataclasses.replace(lab.problem, seqlen_k=64)
    tune_one(longer, lab.runner(lab.trials(problem=longer)), tuned, AMPLE, Listener())
    records = len(tuned.records())
    with pytest.raises(KeyboardInterrupt):
        again(tuned, upgraded(kind=Interrupted))
    assert len(tuned.records()) in (records, records + 1)


@pytest.fixture
def live(monkeypatch, upgraded):
    """A machine with the upgraded GPU."""

    def install(statuses=None):
        @contextlib.contextmanager
        def runners(workers):
            yield [upgraded(statuses)]

        monkeypatch.setattr(module, "live_runners", runners)
        monkeypatch.setattr(loop, "gpu_is_present", lambda: True)

    return install


def test_the_command(lab, tuned, live):
    live()
    done = autoflash("db", "revalidate", "--db", tuned.path, "--json")
    assert done.code == 0
    assert (done.json[0]["problem"], done.json[0]["fallen"]) == (lab.problem.as_dict(), [])
    again = autoflash("db", "revalidate", "--db", tuned.path)
    assert (again.code, "all records are of the present versions" in again.out) == (0, True)
    live({0: TrialStatus.wrong_result, 2: TrialStatus.wrong_result})
    failed = autoflash("db", "revalidate", "--all", "--db", tuned.path)
    assert failed.code == 1
    assert "a stored winner failed: flash_fwd" in failed.told


def test_without_a_gpu(tuned):
    with pytest.raises(UnsupportedError, match="no GPU is visible"):
        revalidate(store=tuned)
