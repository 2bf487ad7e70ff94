"""kill -9 at any moment: what was committed stays and is never run again, and the study ends right.

The child says on a pipe what it is about to do. A pipe outlives its writer, so what was in flight
when it died is known; and a moment is drawn from one of its events on, however fast the machine.
"""

import multiprocessing
import os
import random
import select
import signal
import sqlite3
import time
from contextlib import closing

import pytest

from autoflash.problem import Bucket
from autoflash.store.record import TrialStatus
from autoflash.store.store import Store
from autoflash.tuning import study
from autoflash.tuning.progress import Budget, Listener
from autoflash.tuning.runner import RecordedRunner
from autoflash.tuning.study import tune_one

# A seed that a failure printed, to draw its moments again.
SEED: int | None = None
# By brute force, and with too little time for that: then TPE learns from what is resumed.
BUDGETS = (Budget(seconds=600, trials=None), Budget(seconds=80, trials=None))
# Where the moments lie, in turns: all but the trials are short, and none should be missed.
PHASES = ("creating", "trials", "finals", "starting", "trials", "after", "trials")
# Two are compiled ahead by the one worker of a RecordedRunner while a third is measured.
IN_FLIGHT = 3
PATIENCE_S = 120


class Telling(RecordedRunner):
    """Says what it is asked, before it answers."""

    def __init__(self, say, *args):
        super().__init__(*args)
        self.say = say

    def compile(self, problem, candidate):
        self.say("asked", candidate.config.to_json())
        return super().compile(problem, candidate)

    def measure(self, problem, candidate, give_up_ms):
        self.say("measured", candidate.config.to_json())
        return super().measure(problem, candidate, give_up_ms)

    def interleave(self, problem, candidates, rounds):
        self.say("finals")
        return [RecordedRunner.measure(self, problem, c, None) for c in candidates]


class TellingListener(Listener):
    def __init__(self, say):
        self.say = say

    def tried(self, trial, best_ms):
        self.say("tried", trial.config.to_json())

    def finished(self, result):
        self.say("finished")


def tune_and_tell(lab, recorded, path, budget, pipe):
    """What the child does, until it is killed."""

    def say(*words):
        os.write(pipe, " ".join((*words, "\n")).encode())

    say("creating")
    store = Store(path)
    say("starting")
    runner = Telling(say, lab.a100, lab.versions, recorded)
    tune_one(lab.problem, runner, store, budget, TellingListener(say))
    say("after")
    signal.pause()


class Child:
    """A study in a process of its own; forked, since its imports take seconds."""

    def __init__(self, *what):
        self._pipe, pipe = os.pipe()
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=tune_and_tell, args=(*what, pipe))
        self._process.start()
        os.close(pipe)
        self._text = ""

    @property
    def events(self):
        """(what, config) of all that it has said, in order."""
        *lines, _ = self._text.split("\n")
        return [(*line.split(), "")[:2] for line in lines]

    def listen(self, enough):
        """Wait until ``enough(events)``; False if the child said its last before."""
        while not enough(self.events):
            assert select.select([self._pipe], [], [], PATIENCE_S)[0], self.events
            part = os.read(self._pipe, 1 << 16)
            if not part:
                return False
            self._text += part.decode()
        return True

    def kill(self, seconds=0.0):
        """Kill it ``seconds`` from now, and hear what it had said."""
        self._process.join(timeout=seconds)
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL
        self.listen(lambda events: False)
        os.close(self._pipe)


def configs(events, what):
    return [config for said, config in events if said == what]


def integrity(path):
    with closing(sqlite3.connect(path)) as raw:
        return raw.execute("PRAGMA integrity_check").fetchone()[0]


@pytest.fixture(scope="module")
def recorded(lab, tmp_path_factory):
    """The fastest one that is right is the fourth; none failed by bad luck, to be tried again."""
    # What a fork would import each time is here once a store was created and a study was run.
    store = Store(tmp_path_factory.mktemp("first") / "store.sqlite")
    tune_one(lab.problem, lab.runner([]), store, BUDGETS[1], Listener())
    statuses = (TrialStatus.wrong_result, TrialStatus.compile_error, TrialStatus.out_of_resources)
    return lab.trials(dict(enumerate(statuses)))


@pytest.fixture(autouse=True)
def ranked_once(lab, monkeypatch):
    """To rank the same space anew for every process takes half of the time."""
    candidates = lab.candidates()
    monkeypatch.setattr(study, "ranked", lambda *what: list(candidates))


@pytest.fixture
def lot():
    seed = random.randrange(2**32) if SEED is None else SEED
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def lengths(lab, recorded, tmp_path):
    """How many seconds each phase takes (of the trials: one event of it) when nobody is killed."""
    child = Child(lab, recorded, tmp_path / "whole.sqlite", BUDGETS[0])
    begun = {}
    for phase in ("creating", "starting", "asked", "finals", "after"):
        assert child.listen(lambda events, phase=phase: phase in dict(events))
        begun[phase] = time.monotonic()
    child.kill()
    assert len(configs(child.events, "tried")) == len(recorded)
    return {
        "creating": begun["starting"] - begun["creating"],
        "starting": begun["asked"] - begun["starting"],
        "trials": (begun["finals"] - begun["asked"]) / len(recorded),
        "finals": begun["after"] - begun["finals"],
        "after": 0.0,
    }


def kill_somewhere(child, phase, lot, length):
    """Kill the child ``length`` after a random moment of ``phase``; a little later is as good."""
    if phase == "trials":
        place = lot.randrange(60)
        child.listen(lambda events: len(events) > 2 + place)
    else:
        child.listen(lambda events: phase in dict(events))
    child.kill(lot.uniform(0, length))


@pytest.mark.parametrize("moments", [15, pytest.param(100, marks=pytest.mark.full)])
def test_killed_at_any_moment_a_study_goes_on(lab, recorded, lot, lengths, tmp_path, moments):
    died = []
    for number in range(moments):
        path = tmp_path / f"{number}.sqlite"
        budget = BUDGETS[number % 3 == 2]
        child = Child(lab, recorded, path, budget)
        turn, place = divmod(number, len(PHASES))
        phase = PHASES[place]
        # The first time right when a phase begins, so that none is missed.
        kill_somewhere(child, phase, lot, lengths[phase] if turn else 0.0)
        died.append(child.events[-1][0])
        check_after_a_kill(lab, recorded, path, budget, child.events)
    print({event: died.count(event) for event in died})
    assert {"creating", "starting", "after"} <= set(died)
    assert set(died) & {"asked", "measured", "tried"}


def check_after_a_kill(lab, recorded, path, budget, events):
    bucket = Bucket.of(lab.problem)
    asked, told = configs(events, "asked"), configs(events, "tried")
    committed, records = [], []
    if path.exists():
        assert integrity(path) == "ok"
        store = Store(path, read_only=True)
        committed, records = store.trials(bucket, lab.a100), store.records()
    kept = [trial.config.to_json() for trial in committed]
    # All that the user was told of, and at most the one that it was about to tell.
    assert kept[: len(told)] == told
    assert len(kept) <= len(told) + 1
    assert set(kept) <= set(asked)
    assert len(set(asked) - set(kept)) <= IN_FLIGHT
    assert len(records) >= (("finished", "") in events)

    store, runner = Store(path), lab.runner(recorded)
    result = tune_one(lab.problem, runner, store, budget, Listener())
    again = [candidate.config.to_json() for candidate in runner.asked]
    assert result.resumed == len(committed)
    assert result.trials[: len(committed)] == committed
    # Those in flight are tried again, and no other.
    assert sorted(kept + again) == sorted(trial.config.to_json() for trial in recorded)
    assert store.trials(bucket, lab.a100) == result.trials
    assert result.record.config == recorded[3].config
    assert result.record.measurement == recorded[3].measurement
    assert store.best(bucket, lab.a100) == result.record
    assert len(store.records()) == len(records) + 1
    assert integrity(path) == "ok"
    beside = {other.name.removeprefix(path.name) for other in path.parent.glob(path.name + "*")}
    assert beside <= {"", ".lock", "-wal", "-shm"}


def test_killed_again_and_again_a_study_comes_to_its_end(lab, recorded, lot, tmp_path):
    path = tmp_path / "store.sqlite"
    asked, runs, alive = [], 0, True
    while alive:
        child = Child(lab, recorded, path, BUDGETS[0])
        words = lot.randrange(3, 20)
        child.listen(
            lambda events, words=words: len(events) >= words or events[-1:] == [("after", "")]
        )
        child.kill()
        asked += configs(child.events, "asked")
        alive = ("after", "") not in child.events
        runs += 1
    assert runs > 2
    assert set(asked) == {trial.config.to_json() for trial in recorded}
    assert len(asked) <= len(recorded) + IN_FLIGHT * (runs - 1)
    store = Store(path, read_only=True)
    trials = store.trials(Bucket.of(lab.problem), lab.a100)
    assert sorted(t.config.to_json() for t in trials) == sorted(set(asked))
    assert store.records()[0].config == recorded[3].config
    assert integrity(path) == "ok"
