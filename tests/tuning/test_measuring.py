"""The GPU's part of a study, in a thread of its own."""

import threading
import time
from concurrent.futures import wait

import pytest

from autoflash.store.record import TrialStatus
from autoflash.tuning.job import Outcome
from autoflash.tuning.measuring import Measuring
from autoflash.tuning.resources import Resources
from autoflash.tuning.runner import RecordedRunner

RESOURCES = Resources(shared_bytes=1000, registers=100, spills=0)
COMPILED = Outcome(status=TrialStatus.ok, resources=RESOURCES)


class Gated(RecordedRunner):
    """Measures when it may."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gate = threading.Event()
        self.limits = []

    def measure(self, problem, candidate, give_up_ms):
        assert self.gate.wait(20)
        self.limits.append(give_up_ms)
        return super().measure(problem, candidate, give_up_ms)


@pytest.fixture
def runner(lab):
    return lab.runner([lab.trial(c, 1.0 + i) for i, c in enumerate(lab.candidates())], Gated)


def test_what_is_measured_comes_with_the_binarys_resources(lab, runner):
    candidate = lab.candidates()[3]
    with Measuring(runner, lab.problem) as gpu:
        assert (gpu.idle, gpu.candidates, gpu.take()) == (True, [], None)
        gpu.start(candidate, COMPILED, 2.5)
        assert (gpu.idle, gpu.candidates, gpu.take()) == (False, [candidate], None)
        time.sleep(0.05)
        runner.gate.set()
        wait(gpu.futures, 20)
        found, outcome = gpu.take()
        assert (gpu.idle, gpu.take()) == (True, None)
    assert found is candidate
    assert outcome.measurement.median_ms == 4.0
    assert outcome.resources == RESOURCES
    assert runner.limits == [2.5]
    assert 0.05 <= gpu.seconds < 20


def test_taking_may_wait(lab, runner):
    with Measuring(runner, lab.problem) as gpu:
        assert gpu.take(waiting=True) is None
        gpu.start(lab.candidates()[0], COMPILED, None)
        threading.Timer(0.05, runner.gate.set).start()
        assert gpu.take(waiting=True)[1].measurement.median_ms == 1.0


def test_an_exception_of_the_runner_comes_out(lab):
    def nothing(*unused):
        raise AssertionError("no worker")

    runner = lab.runner(lab.trials())
    runner.measure = nothing
    with Measuring(runner, lab.problem) as gpu:
        gpu.start(lab.candidates()[0], COMPILED, None)
        with pytest.raises(AssertionError, match="no worker"):
            gpu.take(waiting=True)


def test_an_exception_of_the_caller_does_not_wait(lab, runner):
    def interrupted():
        with Measuring(runner, lab.problem) as gpu:
            gpu.start(lab.candidates()[0], COMPILED, None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert runner.limits == []
    runner.gate.set()
