"""Noisy candidates have their turn again: later, and not for ever."""

import pytest

from autoflash.store.record import TrialStatus
from autoflash.tuning.job import Outcome
from autoflash.tuning.progress import Budget, Listener
from autoflash.tuning.retries import Retries
from autoflash.tuning.runner import RecordedRunner
from autoflash.tuning.study import tune_one

Status = TrialStatus


@pytest.fixture
def outcome(lab):
    def make(ms=1.0, status=Status.noisy):
        noisy = status is Status.noisy
        return Outcome(status=status, measurement=lab.measurement(ms, noisy=noisy))

    return make


def test_a_noisy_one_comes_back_after_eight_others(lab, outcome):
    first, *others = lab.candidates()
    retries = Retries(hopeless=1.3)
    retries.note(first, outcome())
    for other in others[:7]:
        retries.note(other, outcome(status=Status.ok))
        assert retries.due(None, nothing_else=False) is None
    retries.note(others[7], outcome(status=Status.ok))
    assert retries.due(1.0, nothing_else=False) == (first, outcome())
    assert retries.due(1.0, nothing_else=True) is None


def test_at_once_if_there_is_nothing_else(lab, outcome):
    first, second, third, *_ = lab.candidates()
    retries = Retries(hopeless=1.3)
    for candidate, ms in ((first, 1.0), (second, 2.0), (third, 1.3)):
        retries.note(candidate, outcome(ms))
    assert retries.due(1.0, nothing_else=True) == (first, outcome())
    # The second is hopeless, by its noisy time already.
    assert retries.due(1.0, nothing_else=True) == (third, outcome(1.3))
    assert retries.due(1.0, nothing_else=True) is None


def test_twice_and_no_more(lab, outcome):
    candidate = lab.candidates()[0]
    retries = Retries(hopeless=1.3)
    for _ in range(3):
        retries.note(candidate, outcome())
    found = [retries.due(None, nothing_else=True) for _ in range(3)]
    assert found == [(candidate, outcome()), (candidate, outcome()), None]


class Disturbed(RecordedRunner):
    """The first ten measurements fall into a time when the GPU is busy: too fast, if anything."""

    measured = 0
    lab = None

    def measure(self, problem, candidate, give_up_ms):
        self.measured += 1
        found = super().measure(problem, candidate, give_up_ms)
        if self.measured > 10:
            return found
        noisy = self.lab.measurement(found.measurement.median_ms / 2, noisy=True)
        return Outcome(status=Status.noisy, reason="busy", measurement=noisy)


def test_a_study_times_them_again_and_the_clean_word_stands(lab, store, monkeypatch):
    monkeypatch.setattr(Disturbed, "lab", lab)
    recorded = lab.trials()
    runner = lab.runner(recorded, Disturbed)
    budget = Budget(seconds=600, trials=None)
    result = tune_one(lab.problem, runner, store, budget, Listener())
    assert result.record.config == recorded[0].config
    assert result.record.measurement == recorded[0].measurement
    last = {trial.config: trial for trial in result.trials}
    assert len(last) == 24
    assert {trial.status for trial in last.values()} == {Status.ok}
    assert len([t for t in result.trials if t.status is Status.noisy]) == 10
    # 24, the noisy ones again, five finalists.
    assert runner.measured == 24 + 10 + 5
    # What was timed again is what was compiled before: nothing is compiled twice.
    assert len(runner.asked) == 24
