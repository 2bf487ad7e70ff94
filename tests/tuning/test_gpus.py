"""Several GPUs of one host: their names, one queue, results in order, Ctrl-C and errors."""

import dataclasses
import threading

import pytest

from autoflash.errors import InvalidInputError, StoreError
from autoflash.store.record import TrialStatus
from autoflash.tuning.gpus import gpu_names
from autoflash.tuning.pool import Worker
from autoflash.tuning.progress import Budget, Listener, OneAtATime
from autoflash.tuning.runner import RecordedRunner
from autoflash.tuning.side_by_side import tune_on
from autoflash.tuning.study import tune_each

AMPLE = Budget(seconds=600, trials=None)


@pytest.mark.parametrize(
    ("visible", "wanted", "names"),
    [
        (None, None, [None]),
        (None, "all", ["0", "1", "2"]),
        (None, "2,0", ["2", "0"]),
        (None, [1], ["1"]),
        ("5,3,GPU-ab", "all", ["5", "3", "GPU-ab"]),
        ("5, 3,GPU-ab", "1,2", ["3", "GPU-ab"]),
    ],
)
def test_names(monkeypatch, visible, wanted, names):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert gpu_names(wanted) == names


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("3", "gpus='3': 3 is none of the 3 GPUs here"),
        ("0,0", "gpus='0,0': names a GPU twice"),
        ("some", "gpus='some': give 'all', or numbers such as 0,1"),
        ([-1], r"gpus=\[-1\]: give 'all', or numbers"),
        ([], r"gpus=\[\]: no GPU is visible"),
    ],
)
def test_bad_names(monkeypatch, wanted, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        gpu_names(wanted)


def test_a_worker_sees_its_gpu_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    seen = []
    monkeypatch.setattr(
        "subprocess.Popen", lambda *args, env, **more: seen.append(env["CUDA_VISIBLE_DEVICES"])
    )
    for gpu in ("3", None):
        worker = Worker(gpu=gpu)
        with pytest.raises(AssertionError):
            worker.ask({}, 1)  # there is no process
    assert seen == ["3", "5,3"]


@pytest.fixture
def problems(lab):
    return [dataclasses.replace(lab.problem, seqlen_k=2**i) for i in range(4, 10)]


@pytest.fixture
def recorded(lab, problems):
    return {p: lab.trials(problem=p) for p in problems}


class Meeting(RecordedRunner):
    """Two GPUs: neither goes on before both have measured something."""

    barrier = threading.Barrier(2)
    met = False

    def measure(self, problem, candidate, give_up_ms):
        if not self.met:
            self.met = True
            self.barrier.wait(timeout=60)
        return super().measure(problem, candidate, give_up_ms)


def test_two_gpus_share_one_queue(lab, store, problems, recorded):
    trials = [t for of_one in recorded.values() for t in of_one]
    runners = [lab.runner(trials, Meeting) for _ in range(2)]
    told = []

    class Watching(Listener):
        def finished(self, result):
            told.append(result.problem)

    results = tune_on(runners, problems, store, AMPLE, OneAtATime(Watching()))
    assert [r.problem for r in results] == problems
    assert [r.record.config for r in results] == [recorded[p][0].config for p in problems]
    assert sorted(told, key=problems.index) == problems
    assert all(runner.met for runner in runners)
    assert len(store.records()) == len(problems)


def test_an_error_on_one_gpu_ends_the_others_with_their_best(lab, store, problems, recorded):
    trials = [t for of_one in recorded.values() for t in of_one]
    failed = threading.Event()

    class Broken(RecordedRunner):
        def measure(self, problem, candidate, give_up_ms):
            failed.set()
            raise StoreError("the disk is full")

    class Waiting(RecordedRunner):
        def measure(self, problem, candidate, give_up_ms):
            assert failed.wait(timeout=60)
            return super().measure(problem, candidate, give_up_ms)

    runners = [lab.runner(trials, Broken), lab.runner(trials, Waiting)]
    with pytest.raises(StoreError, match="the disk is full"):
        tune_on(runners, problems, store, AMPLE, Listener())
    # The other one stored what it had, and took no further problem.
    assert len(store.records()) <= 1
    assert len(runners[1].asked) <= 24 + 2


def test_the_next_problem_compiles_during_the_finals(lab, store, problems, recorded):
    trials = [t for of_one in recorded.values() for t in of_one]
    events = []

    class Noting(RecordedRunner):
        def compile(self, problem, candidate):
            events.append(("compile", problem))
            return super().compile(problem, candidate)

        def interleave(self, problem, candidates, rounds):
            events.append(("finals", problem))
            return super().interleave(problem, candidates, rounds)

    runner = lab.runner(trials, Noting)
    first, second = problems[:2]
    todo = iter([first, second])
    found = list(tune_each(todo, runner, store, AMPLE, Listener(), threading.Event()))
    assert [r.problem for r in found] == [first, second]
    assert {t.status for r in found for t in r.trials} == {TrialStatus.ok}
    place = events.index(("finals", first))
    assert events.index(("compile", second)) < place
    assert events.count(("compile", first)) == events.count(("compile", second)) == 24
    assert all(0 < r.gpu_seconds <= r.seconds for r in found)
