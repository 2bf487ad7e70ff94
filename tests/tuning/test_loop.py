"""The tuning loop over recorded trials: no GPU, no compiler, no clock but a made-up one."""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
import types
from concurrent.futures import Future

import pytest

from autoflash.codegen.render import render
from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.kernels import kernels_for
from autoflash.problem import Bucket
from autoflash.store.record import TrialStatus
from autoflash.target import named_target
from autoflash.tuning import finals, study
from autoflash.tuning import tune as loop
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.progress import Budget, Listener, StudyPlan, make_record
from autoflash.tuning.runner import RecordedRunner
from autoflash.tuning.search import Search, ranked
from autoflash.tuning.study import tune_one
from autoflash.tuning.tune import target_to_tune, tune

AMPLE = Budget(seconds=600, trials=None)
Status = TrialStatus


def run(lab, store, trials, *, budget=AMPLE, runner=None, listener=None, problem=None):
    runner = runner or lab.runner(trials)
    problem = problem or lab.problem
    return tune_one(problem, runner, store, budget, listener or Listener())


def keys(trials_or_candidates):
    return [one.config.to_json() for one in trials_or_candidates]


# --- the winner


@pytest.mark.parametrize("trials", [None, 24], ids=["by time", "by trials"])
def test_the_fastest_is_found_and_stored(lab, store, trials):
    recorded = lab.trials()
    budget = Budget(seconds=600, trials=trials)
    result = run(lab, store, recorded, budget=budget)
    record = result.record
    assert record.config == recorded[0].config
    assert record.measurement == recorded[0].measurement
    assert (record.kind, record.kernel, record.problem, record.target) == (
        "measured", "flash_fwd", lab.problem, lab.a100,
    )  # fmt: skip
    assert store.best(Bucket.of(lab.problem), lab.a100) == record
    assert (result.space, result.resumed, result.interrupted) == (24, 0, False)
    assert sorted(keys(result.trials)) == sorted(keys(recorded))
    assert 0 < result.seconds < 60


def test_a_larger_space_by_brute_force(lab, store):
    problem = dataclasses.replace(lab.problem, seqlen_q=128, seqlen_k=128, causal=False)
    recorded = lab.trials(problem=problem)
    assert len(recorded) == 84
    result = run(lab, store, recorded, problem=problem)
    assert result.record.config == recorded[0].config
    assert len(result.trials) == len(set(keys(result.trials))) == 84


def test_the_record_says_where_it_comes_from(lab, store):
    record = run(lab, store, lab.trials()).record
    source = render(lab.kernel, lab.problem, record.config)
    assert record.provenance.source_hash == source.kernel_hash
    assert record.provenance.origin == "test"
    found = dataclasses.asdict(record.provenance)
    assert {name: found[name] for name in lab.versions} == lab.versions


def test_the_winners_file_is_emitted(lab, store, kernel_folder):
    result = run(lab, store, lab.trials())
    source = render(lab.kernel, lab.problem, result.record.config)
    assert result.path == kernel_folder / f"{source.name}.py"
    assert result.path.read_text(encoding="utf-8") == source.text


@pytest.mark.parametrize("status", [s for s in Status if s not in (Status.ok, Status.predicted)])
def test_a_failure_never_wins(lab, store, status):
    recorded = lab.trials({0: status, 1: status})
    result = run(lab, store, recorded)
    assert result.record.config == recorded[2].config
    assert result.record.measurement.noisy is False


def test_a_wrong_result_never_wins_however_fast(lab, store):
    recorded = lab.trials({0: Status.wrong_result})
    assert recorded[0].measurement.median_ms == 1.0
    recorded[0] = dataclasses.replace(recorded[0], measurement=lab.measurement(0.001))
    assert run(lab, store, recorded).record.config == recorded[1].config


def test_noisy_never_beats_clean(lab, store):
    recorded = lab.trials(dict.fromkeys(range(23), Status.noisy))
    record = run(lab, store, recorded).record
    assert record.config == recorded[23].config
    assert record.measurement.noisy is False


def test_all_noisy_gives_a_noisy_record(lab, store):
    recorded = lab.trials(dict.fromkeys(range(24), Status.noisy))
    record = run(lab, store, recorded).record
    assert record.config == recorded[0].config
    assert record.measurement.noisy is True
    assert record.measurement.throttle == "2 other processes on the GPU"


def test_nothing_survives(lab, store, caplog):
    kinds = (Status.compile_error, Status.out_of_resources, Status.timeout, Status.crashed)
    recorded = lab.trials({i: kinds[i % 4] for i in range(24)})
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        result = run(lab, store, recorded)
    assert (result.record, result.path) == (None, None)
    assert store.records() == []
    assert len(store.trials(Bucket.of(lab.problem), lab.a100)) == 24
    (message,) = [r.getMessage() for r in caplog.records]
    assert message == f"{lab.problem.label()}: no candidate survived; nothing is stored"


# --- ties


@pytest.mark.parametrize(
    ("resources", "winner"),
    [
        # (shared bytes, registers) of the trials at 1.000, 1.004 and 1.006 ms; up to 1.005 ties.
        ([(4096, 128), (4096, 128), (4096, 128)], 0),
        ([(4096, 128), (2048, 255), (1024, 32)], 1),
        ([(4096, 128), (4096, 96), (4096, 32)], 1),
        ([(2048, 128), (4096, 32), (1024, 32)], 0),
    ],
)
def test_ties_go_to_the_one_that_needs_less(lab, store, resources, winner):
    recorded = lab.trials()
    for i, (ms, (shared, registers)) in enumerate(zip([1, 1.004, 1.006], resources, strict=True)):
        recorded[i] = lab.trial(
            lab.candidate(recorded[i]), ms, shared_bytes=shared, registers=registers
        )
    assert run(lab, store, recorded).record.config == recorded[winner].config


# --- finalists


class Interleaving(RecordedRunner):
    """Finals in which each is timed anew."""

    def __init__(self, *args):
        super().__init__(*args)
        self.finals = []
        self.answer = lambda place: Outcome(status=Status.ok)

    def interleave(self, problem, candidates, rounds):
        self.finals.append((problem, candidates, rounds))
        return [self.answer(place) for place in range(len(candidates))]


def test_the_five_fastest_clean_ones_are_timed_again(lab, store):
    recorded = lab.trials({1: Status.noisy, 3: Status.wrong_result})
    runner = lab.runner(recorded, Interleaving)
    run(lab, store, recorded, runner=runner)
    ((problem, candidates, rounds),) = runner.finals
    assert problem == lab.problem
    assert keys(candidates) == keys(recorded[i] for i in (0, 2, 4, 5, 6))
    assert rounds >= 5


def test_the_finals_decide(lab, store):
    recorded = lab.trials()
    runner = lab.runner(recorded, Interleaving)
    runner.answer = lambda place: Outcome(
        status=Status.ok, measurement=lab.measurement(2.0 - place / 10)
    )
    record = run(lab, store, recorded, runner=runner).record
    assert record.config == recorded[4].config
    assert record.measurement == lab.measurement(1.6)


def test_a_finalist_that_fails_is_out(lab, store):
    recorded = lab.trials()
    runner = lab.runner(recorded, Interleaving)
    runner.answer = lambda place: (
        Outcome(status=Status.crashed, reason="gone")
        if place == 0
        else Outcome(status=Status.ok, measurement=lab.measurement(1.0 + place))
    )
    assert run(lab, store, recorded, runner=runner).record.config == recorded[1].config


class Fragile(RecordedRunner):
    """Finals that die with all answers when one of ``bad`` takes part, after ``seconds``."""

    bad = frozenset()
    status = Status.crashed
    seconds = 0
    clock = None

    def __init__(self, *args):
        super().__init__(*args)
        self.finals = []

    def dies(self, candidates):
        return any(c.config in self.bad for c in candidates)

    def interleave(self, problem, candidates, rounds):
        self.finals.append(keys(candidates))
        if self.clock is not None:
            self.clock.now += self.seconds
        if self.dies(candidates):
            return [Outcome(status=self.status, reason="gone")] * len(candidates)
        return super().interleave(problem, candidates, rounds)


def fragile(lab, recorded, *bad, kind=Fragile, **fields):
    """A runner whose finals don't survive the trials at these places."""
    runner = lab.runner(recorded, kind)
    runner.bad = frozenset(recorded[place].config for place in bad)
    for name, value in fields.items():
        setattr(runner, name, value)
    return runner


def last_words(store, lab):
    """The newest trial of each config, by its JSON."""
    return {t.config.to_json(): t for t in store.trials(Bucket.of(lab.problem), lab.a100)}


@pytest.mark.parametrize("status", [Status.crashed, Status.timeout])
def test_who_kills_the_finals_is_out_and_they_are_held_again(lab, store, status, caplog):
    recorded = lab.trials()
    names = keys(recorded)
    runner = fragile(lab, recorded, 0, 3, status=status)
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        result = run(lab, store, None, runner=runner)
    assert runner.finals == [
        names[:5],
        *([name] for name in names[:5]),
        [names[1], names[2], *names[4:7]],
    ]
    assert (result.record.config, store.records()) == (recorded[1].config, [result.record])
    assert len(result.trials) == 24
    assert len(store.trials(Bucket.of(lab.problem), lab.a100)) == 26
    found = last_words(store, lab)
    assert {t.config.to_json(): t for t in result.trials} == found
    for place, name in enumerate(names):
        out = place in (0, 3)
        assert found[name].status is (status if out else Status.ok)
        assert found[name].reason == ("in the finals: gone" if out else "")
        assert found[name].measurement == (None if out else recorded[place].measurement)
        assert (found[name].shared_bytes, found[name].registers) == (4096, 128)
    assert [r.getMessage() for r in caplog.records] == [
        f"flash_fwd, {recorded[place].config.label()}: in the finals: gone" for place in (0, 3)
    ]


def test_when_all_finalists_fail_the_next_fastest_follow(lab, store):
    recorded = lab.trials()
    result = run(lab, store, None, runner=fragile(lab, recorded, *range(7)))
    assert result.record.config == recorded[7].config
    assert sum(t.status is Status.crashed for t in result.trials) == 7


def test_nobody_survives_the_finals(lab, store, caplog):
    recorded = lab.trials()
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        result = run(lab, store, None, runner=fragile(lab, recorded, *range(24)))
    assert (result.record, result.path, store.records()) == (None, None, [])
    assert {t.status for t in last_words(store, lab).values()} == {Status.crashed}
    *_, message = [r.getMessage() for r in caplog.records]
    assert message == f"{lab.problem.label()}: no candidate survived; nothing is stored"


def test_who_fails_only_in_company_is_judged_by_the_time_alone(lab, store):
    class Unsociable(Fragile):
        def dies(self, candidates):
            return len(candidates) > 1

    recorded = lab.trials()
    runner = lab.runner(recorded, Unsociable)
    record = run(lab, store, None, runner=runner).record
    assert [len(asked) for asked in runner.finals] == [5, 1, 1, 1, 1, 1]
    assert (record.config, record.measurement) == (recorded[0].config, recorded[0].measurement)


def test_a_fault_that_waits_for_a_count_shows_alone(lab, store):
    """Alone, a candidate is launched in more rounds than in company."""

    class Patient(Fragile):
        left = 10

        def interleave(self, problem, candidates, rounds):
            self.left -= rounds
            died = self.left < 0 and self.dies(candidates)
            outcomes = RecordedRunner.interleave(self, problem, candidates, rounds)
            # A fresh worker counts anew.
            self.left = 10 if died else self.left
            return (
                [Outcome(status=Status.crashed, reason="gone")] * len(outcomes)
                if died
                else outcomes
            )

    recorded = lab.trials()
    runner = fragile(lab, recorded, 0, kind=Patient, left=5)
    assert run(lab, store, None, runner=runner).record.config == recorded[1].config


def test_a_single_finalist_that_fails_is_out(lab, store):
    recorded = lab.trials(dict.fromkeys(range(1, 24), Status.compile_error))
    runner = fragile(lab, recorded, 0)
    result = run(lab, store, None, runner=runner)
    assert (result.record, len(runner.finals)) == (None, 1)
    assert last_words(store, lab)[keys(recorded)[0]].status is Status.crashed


@pytest.fixture
def finals_clock(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(finals, "time", clock)
    return clock


def test_failing_finals_end_in_time(lab, store, finals_clock):
    """40 s a question, 90 s for all that follow the first: the last two are not asked any more."""
    recorded = lab.trials()
    runner = fragile(lab, recorded, 0, clock=finals_clock, seconds=40)
    result = run(lab, store, None, runner=runner)
    assert [len(asked) for asked in runner.finals] == [5, 1, 1, 1]
    assert result.record.config == recorded[1].config
    assert [t.config for t in result.trials if t.status is not Status.ok] == [recorded[0].config]


def test_who_was_not_cleared_in_time_is_neither_crowned_nor_blamed(lab, store, finals_clock):
    recorded = lab.trials()
    runner = fragile(lab, recorded, 0, 1, 2, clock=finals_clock, seconds=40)
    result = run(lab, store, None, runner=runner)
    assert (result.record, store.records()) == (None, [])
    assert sorted(t.status for t in result.trials) == [Status.crashed] * 3 + [Status.ok] * 21


def test_an_interruption_does_not_save_who_fell(lab, store):
    class Interrupted(Fragile):
        def interleave(self, problem, candidates, rounds):
            if len(self.finals) == 3:
                raise KeyboardInterrupt
            return super().interleave(problem, candidates, rounds)

    recorded = lab.trials()
    runner = fragile(lab, recorded, 0, kind=Interrupted)
    result = run(lab, store, None, runner=runner)
    assert result.interrupted is True
    assert result.record.config == recorded[1].config


def test_who_fell_is_tried_again_in_the_next_study(lab, store):
    recorded = lab.trials()
    run(lab, store, None, runner=fragile(lab, recorded, 0))
    runner = lab.runner(recorded)
    again = run(lab, store, None, runner=runner)
    assert (again.resumed, keys(runner.asked)) == (23, keys(recorded[:1]))
    assert again.record.config == recorded[0].config


def test_the_best_of_each_kernel_is_kept(lab, store):
    h200 = named_target("h200")
    candidates = ranked(kernels_for(lab.problem, h200), lab.problem, h200)
    names = ("flash_fwd", "flash_fwd_ws")
    kernels = {name: [c for c in candidates if c.kernel.name == name] for name in names}
    # The seven fastest are of one kernel: the other's best is a finalist all the same.
    recorded = [
        lab.trial(c, slowest + i / 100, target=h200)
        for slowest, name in ((1.0, "flash_fwd_ws"), (2.0, "flash_fwd"))
        for i, c in enumerate(kernels[name][:7])
    ]
    runner = Interleaving(h200, lab.versions, recorded)
    runner.answer = lambda place: Outcome(
        status=Status.ok, measurement=lab.measurement(1.5 - place / 10 if place < 5 else 3.0)
    )
    store.add_trials(recorded)
    result = run(lab, store, None, runner=runner, budget=Budget(seconds=600, trials=1))
    ((_, finalists, _),) = runner.finals
    assert keys(finalists) == keys([*recorded[:5], recorded[7]])
    fused, plain = recorded[4], recorded[7]
    assert (result.record.kernel, result.record.config) == ("flash_fwd_ws", fused.config)
    bucket = Bucket.of(lab.problem)
    assert store.best(bucket, h200) == result.record
    second = store.best(bucket, h200, frozenset({"flash_fwd"}))
    assert (second.config, second.measurement) == (plain.config, lab.measurement(3.0))
    assert second.provenance.created_at == result.record.provenance.created_at


def test_a_kernels_next_best_takes_the_place_of_one_that_fell(lab, store):
    h200 = named_target("h200")
    candidates = ranked(kernels_for(lab.problem, h200), lab.problem, h200)
    fused = [c for c in candidates if c.kernel.name == "flash_fwd_ws"][:6]
    plain = [c for c in candidates if c.kernel.name == "flash_fwd"][:2]
    recorded = [lab.trial(c, 1 + i / 100, target=h200) for i, c in enumerate([*fused, *plain])]
    runner = Fragile(h200, lab.versions, recorded)
    runner.bad = frozenset({plain[0].config})
    store.add_trials(recorded)
    run(lab, store, None, runner=runner, budget=Budget(seconds=600, trials=1))
    assert runner.finals[0] == keys([*fused[:5], plain[0]])
    assert runner.finals[-1] == keys([*fused[:5], plain[1]])
    found = {(r.kernel, r.config) for r in store.records()}
    assert found == {("flash_fwd_ws", fused[0].config), ("flash_fwd", plain[1].config)}


class SlowDefault(RecordedRunner):
    """The default compiles for longer than the budget lasts; another for longer still."""

    workers = 8
    default = None

    def compile(self, problem, candidate):
        done = super().compile(problem, candidate)
        if candidate.config == self.default:
            late = Future()
            threading.Timer(0.5, lambda: late.set_result(done.result())).start()
            return late
        if len(self.asked) == 3:
            return Future()
        return done


def test_a_default_is_waited_for(lab, store):
    default = lab.kernel.default(lab.problem, lab.a100)
    recorded = [
        lab.trial(c, 1.0 if c.config == default else 2.0 + i / 100)
        for i, c in enumerate(lab.candidates())
    ]
    runner = lab.runner(recorded, SlowDefault)
    runner.default = default
    begin = time.monotonic()
    result = run(lab, store, None, runner=runner, budget=Budget(seconds=0.3, trials=None))
    assert result.record.config == default
    assert len(result.trials) > 1
    assert 0.5 < time.monotonic() - begin < 10


# --- trials


def test_every_trial_is_stored_with_its_status_and_reason(lab, store):
    statuses = {
        0: Status.compile_error, 1: Status.out_of_resources, 2: Status.wrong_result,
        3: Status.timeout, 4: Status.crashed, 5: Status.noisy,
    }  # fmt: skip
    recorded = lab.trials(statuses)
    result = run(lab, store, recorded)
    rows = store.trials(Bucket.of(lab.problem), lab.a100)
    assert rows == result.trials
    stored = {t.config: t for t in rows}
    assert len(stored) == 24
    for place, trial in enumerate(recorded):
        found = stored[trial.config]
        status = statuses.get(place, Status.ok)
        assert found.status is status
        assert found.reason == ("" if status is Status.ok else f"made up: {status.value}")
        assert found.measurement == trial.measurement
        compiled = status not in (Status.compile_error, Status.out_of_resources)
        expected = (4096, 128, 0) if compiled else (None, None, None)
        assert (found.shared_bytes, found.registers, found.spills) == expected


def test_what_was_never_recorded_is_out_of_resources(lab, store):
    recorded = lab.trials()[3:]
    result = run(lab, store, recorded)
    assert result.record.config == recorded[0].config
    failed = [t for t in result.trials if t.status is not Status.ok]
    assert [(t.status, t.reason) for t in failed] == [
        (Status.out_of_resources, "never recorded")
    ] * 3


class Watchful(Listener):
    def __init__(self):
        self.events = []

    def started(self, problem, target, plan):
        self.events.append(("started", problem, target, plan))

    def tried(self, trial, best_ms):
        self.events.append(("tried", trial, best_ms))

    def finished(self, result):
        self.events.append(("finished", result))


def test_the_listener_hears_everything(lab, store):
    listener = Watchful()
    recorded = lab.trials({0: Status.wrong_result, 2: Status.compile_error})
    result = run(lab, store, recorded, listener=listener)
    first, *tried, last = listener.events
    plan = StudyPlan(space=24, resumed=0, most=24, seconds=600)
    assert first == ("started", lab.problem, lab.a100, plan)
    assert last == ("finished", result)
    assert [event[1] for event in tried] == result.trials
    times = [t.measurement.median_ms if t.status is Status.ok else None for t in result.trials]
    for place, (_, _, best) in enumerate(tried):
        so_far = [ms for ms in times[: place + 1] if ms is not None]
        assert best == min(so_far, default=None)


class Timed(RecordedRunner):
    """Notes what it is told to give up at."""

    def __init__(self, *args):
        super().__init__(*args)
        self.limits = []

    def measure(self, problem, candidate, give_up_ms):
        outcome = super().measure(problem, candidate, give_up_ms)
        self.limits.append((give_up_ms, outcome.measurement.median_ms))
        return outcome


def test_slow_candidates_are_given_up_at_1_3_times_the_best(lab, store):
    runner = lab.runner(lab.trials(), Timed)
    run(lab, store, None, runner=runner)
    best = None
    for limit, ms in runner.limits[:24]:
        assert limit == (None if best is None else pytest.approx(best * 1.3))
        best = ms if best is None else min(best, ms)


# --- budgets


@pytest.mark.parametrize("trials", [1, 2, 7, 23])
def test_no_more_trials_than_asked_for(lab, store, trials):
    runner, listener = lab.runner(lab.trials()), Watchful()
    budget = Budget(seconds=600, trials=trials)
    result = run(lab, store, None, runner=runner, budget=budget, listener=listener)
    assert len(result.trials) == len(runner.asked) == trials
    assert listener.events[0][-1] == StudyPlan(space=24, resumed=0, most=trials, seconds=600)
    fastest = min(result.trials, key=lambda t: t.measurement.median_ms)
    assert result.record.config == fastest.config


def test_the_defaults_of_the_kernel_are_tried_first(lab, store):
    runner = lab.runner(lab.trials())
    run(lab, store, None, runner=runner, budget=Budget(seconds=600, trials=1))
    assert [c.config for c in runner.asked] == [lab.kernel.default(lab.problem, lab.a100)]


class Slow(RecordedRunner):
    """Measuring takes ``clock.step`` seconds of a made-up clock."""

    clock = None

    def measure(self, problem, candidate, give_up_ms):
        self.clock.now += self.clock.step
        return super().measure(problem, candidate, give_up_ms)

    def interleave(self, problem, candidates, rounds):
        self.clock.finals = self.clock.now
        return super().interleave(problem, candidates, rounds)


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=100.0, step=1.0, finals=None)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(study, "time", clock)
    monkeypatch.setattr(Slow, "clock", clock)
    return clock


def test_no_more_seconds_than_asked_for(lab, store, clock):
    runner = lab.runner(lab.trials(), Slow)
    result = run(lab, store, None, runner=runner, budget=Budget(seconds=10, trials=None))
    # A second each; the last 15 % are for the finals.
    assert len(result.trials) == 9
    assert clock.finals == 109.0
    assert result.record.config == min(
        result.trials, key=lambda t: t.measurement.median_ms
    ).config  # fmt: skip


def test_the_first_candidate_is_waited_for(lab, store, clock):
    """A small budget may end while the first one is still on its way."""
    clock.step = 8.0
    # Two are compiled ahead, the default and the model's first, and measured in any order.
    default = lab.kernel.default(lab.problem, lab.a100)
    second = next(c for c in lab.candidates() if c.config != default)
    recorded = [
        lab.trial(second, 1.0) if c == second else lab.trial(c, 1.0, status=Status.crashed)
        for c in lab.candidates()
    ]
    runner = lab.runner(recorded, Slow)
    result = run(lab, store, None, runner=runner, budget=Budget(seconds=4, trials=None))
    assert keys(runner.asked) == [default.to_json(), second.config.to_json()]
    found = {t.config: t.status for t in result.trials}
    assert found == {default: Status.crashed, second.config: Status.ok}
    assert result.record.config == second.config


def test_nothing_is_waited_for_without_end(lab, store, clock):
    clock.step = 50.0
    recorded = [lab.trial(c, 1.0, status=Status.crashed) for c in lab.candidates()]
    runner = lab.runner(recorded, Slow)
    result = run(lab, store, None, runner=runner, budget=Budget(seconds=4, trials=None))
    assert (result.record, len(result.trials)) == (None, 1)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_budget_has_seconds(seconds):
    with pytest.raises(
        InvalidInputError, match=rf"^budget of {seconds} s: must be more than 0 and below"
    ):
        Budget(seconds=seconds, trials=None)


@pytest.mark.parametrize("trials", [0, -3])
def test_a_budget_has_trials(trials):
    with pytest.raises(InvalidInputError) as caught:
        Budget(seconds=1, trials=trials)
    assert str(caught.value) == f"budget of {trials} trials: must be at least 1"


# --- running again


def test_running_again_repeats_nothing(lab, store):
    statuses = {1: Status.compile_error, 2: Status.wrong_result, 3: Status.out_of_resources}
    recorded = lab.trials(statuses)
    first = run(lab, store, recorded, budget=Budget(seconds=600, trials=10))
    runner, listener = lab.runner(recorded), Watchful()
    second = run(lab, store, recorded, runner=runner, listener=listener)
    assert second.resumed == 10
    plan = StudyPlan(space=24, resumed=10, most=14, seconds=600)
    assert listener.events[0] == ("started", lab.problem, lab.a100, plan)
    assert set(keys(runner.asked)).isdisjoint(keys(first.trials))
    assert len(runner.asked) == len(set(keys(runner.asked))) == 14
    assert second.trials[:10] == first.trials
    assert second.record.config == recorded[0].config
    third_runner = lab.runner(recorded)
    third = run(lab, store, recorded, runner=third_runner)
    assert third_runner.asked == []
    assert (third.resumed, third.record.config) == (24, recorded[0].config)
    assert len(store.trials(Bucket.of(lab.problem), lab.a100)) == 24


def test_the_trials_of_the_budget_are_new_ones(lab, store):
    recorded = lab.trials()
    for expected in (5, 10, 15):
        runner = lab.runner(recorded)
        result = run(lab, store, recorded, runner=runner, budget=Budget(seconds=600, trials=5))
        assert (len(runner.asked), len(result.trials)) == (5, expected)


@pytest.mark.parametrize("status", [Status.timeout, Status.crashed, Status.noisy])
def test_the_unlucky_are_tried_again(lab, store, status):
    unlucky = lab.trials(dict.fromkeys(range(6), status))
    run(lab, store, unlucky)
    recorded = lab.trials()
    runner = lab.runner(recorded)
    result = run(lab, store, recorded, runner=runner)
    assert sorted(keys(runner.asked)) == sorted(keys(recorded[:6]))
    assert result.resumed == 18
    assert result.record.config == recorded[0].config


def stale(lab, kind):
    """Trials of an earlier run that say nothing of this one."""
    trials = lab.trials()
    if kind == "another triton":
        change = {"triton": "3.5.0"}
    elif kind == "another source":
        change = {"source_hash": "0" * 16}
    else:
        other = dataclasses.replace(lab.problem, seqlen_k=15)
        assert Bucket.of(other) == Bucket.of(lab.problem)
        return [dataclasses.replace(t, problem=other) for t in trials]
    return [
        dataclasses.replace(t, provenance=dataclasses.replace(t.provenance, **change))
        for t in trials
    ]


@pytest.mark.parametrize(
    "kind", ["another triton", "another source", "another problem of the bucket"]
)
def test_trials_that_no_longer_count(lab, store, kind):
    store.add_trials(stale(lab, kind))
    recorded = lab.trials()
    runner = lab.runner(recorded)
    result = run(lab, store, recorded, runner=runner)
    assert result.resumed == 0
    assert len(runner.asked) == 24


def test_trials_of_another_target_do_not_count(lab, store):
    store.add_trials(dataclasses.replace(t, target=named_target("l40s")) for t in lab.trials())
    assert run(lab, store, lab.trials()).resumed == 0


# --- advice from the store


def test_what_the_store_knows_is_tried_first(lab, store):
    slow = list(reversed(lab.candidates()))[:4]
    longer = dataclasses.replace(lab.problem, seqlen_k=64)
    measurement = lab.measurement(1.0)
    own = lab.trial(slow[0], 1.0)
    near = lab.trial(slow[1], 1.0, problem=longer)
    sibling = lab.trial(slow[2], 1.0, target=dataclasses.replace(lab.a100, name="NVIDIA A100X"))
    elsewhere = lab.trial(slow[3], 1.0, target=named_target("h100"))
    for trial in (elsewhere, sibling, near, own):
        store.add_record(make_record(trial, measurement, "measured", trial.provenance.created_at))
    runner = lab.runner(lab.trials())
    run(lab, store, None, runner=runner, budget=Budget(seconds=600, trials=4))
    default = lab.kernel.default(lab.problem, lab.a100)
    assert [c.config for c in runner.asked] == [*(c.config for c in slow[:3]), default]
    told = {t.config: t.came_from for t in store.trials(Bucket.of(lab.problem), lab.a100)}
    near_label = Bucket.of(longer).label()
    assert told == {
        slow[0].config: "record",
        slow[1].config: f"neighbour {near_label}",
        slow[2].config: "sibling NVIDIA A100X",
        default: "default",
    }


# --- Ctrl-C


class Interrupted(RecordedRunner):
    """Ctrl-C comes while the sixth candidate is timed."""

    measured = 0

    def measure(self, problem, candidate, give_up_ms):
        self.measured += 1
        if self.measured == 6:
            raise KeyboardInterrupt
        return super().measure(problem, candidate, give_up_ms)


def test_an_interrupted_study_keeps_its_best_and_goes_on(lab, store):
    recorded = lab.trials()
    listener = Watchful()
    result = run(lab, store, None, runner=lab.runner(recorded, Interrupted), listener=listener)
    assert result.interrupted is True
    assert len(result.trials) == 5
    fastest = min(result.trials, key=lambda t: t.measurement.median_ms)
    assert result.record.config == fastest.config
    assert store.best(Bucket.of(lab.problem), lab.a100) == result.record
    assert listener.events[-1] == ("finished", result)

    runner = lab.runner(recorded)
    again = run(lab, store, recorded, runner=runner)
    assert (again.resumed, again.interrupted) == (5, False)
    assert collections.Counter(keys(runner.asked) + keys(result.trials)) == collections.Counter(
        keys(recorded)
    )
    assert again.record.config == recorded[0].config
    assert store.best(Bucket.of(lab.problem), lab.a100) == again.record


def test_an_interruption_in_the_finals_keeps_the_first_times(lab, store):
    class Late(RecordedRunner):
        def interleave(self, problem, candidates, rounds):
            raise KeyboardInterrupt

    recorded = lab.trials()
    result = run(lab, store, None, runner=lab.runner(recorded, Late))
    assert result.interrupted is True
    assert result.record.config == recorded[0].config
    assert store.records() == [result.record]


def test_an_interruption_before_anything_was_timed(lab, store):
    class Early(RecordedRunner):
        def compile(self, problem, candidate):
            raise KeyboardInterrupt

    result = run(lab, store, None, runner=lab.runner(lab.trials(), Early))
    assert (result.interrupted, result.record, result.trials) == (True, None, [])
    assert store.records() == []


# --- tune()


class Live:
    """Stands in for live_runners: recorded ones."""

    def __init__(self, *runners):
        self.runners = runners
        self.made_with = []

    def __call__(self, workers, target, gpus):
        self.made_with.append((workers, target, gpus))
        return self

    def __enter__(self):
        return self.runners

    def __exit__(self, *unused):
        self.made_with.append("closed")


class Describing(contextlib.nullcontext):
    """Stands in for a worker that is asked for its GPU."""

    def __init__(self, target):
        super().__init__(self)
        self.target = target

    def ask(self, message, limit_s):
        assert message == {"do": "describe", "parents_contexts": 0}
        return {"target": dataclasses.asdict(self.target), "versions": {}, "busy": ""}


@pytest.fixture
def present(lab, monkeypatch):
    """A machine with an A100 whose trials are recorded."""

    def refuse():
        raise AssertionError("CUDA was initialised in the user's process")

    monkeypatch.setattr("torch.cuda._lazy_init", refuse)

    def install(trials, kind=RecordedRunner):
        live = Live(lab.runner(trials, kind))
        monkeypatch.setattr(loop, "live_runners", live)
        monkeypatch.setattr(loop, "gpu_is_present", lambda: True)
        monkeypatch.setattr(loop, "Worker", lambda: Describing(lab.a100))
        monkeypatch.setenv("AUTOFLASH_WORKERS", "3")
        return live

    return install


@pytest.mark.parametrize("target", [None, "a100"])
def test_tune_on_the_gpu_that_is_present(lab, store, present, target):
    longer = dataclasses.replace(lab.problem, seqlen_k=64)
    trials, others = lab.trials(), lab.trials(problem=longer)
    live = present([*trials, *others])
    results = tune([lab.problem, longer], target=target, budget_s=600, store=store)
    assert [r.problem for r in results] == [lab.problem, longer]
    assert [r.record.config for r in results] == [trials[0].config, others[0].config]
    assert {r.record.kind for r in results} == {"measured"}
    assert live.made_with == [(3, None, [None]), "closed"]


def test_tune_for_another_gpu_than_the_one_that_is_present(lab, store, present):
    live = present(lab.trials())
    (result,) = tune(lab.problem, target="h100", trials=1, store=store)
    assert live.made_with == [(3, named_target("h100"), [None]), "closed"]
    assert result.record.kind == "predicted"


def test_tune_takes_one_problem_and_the_users_store(lab, present):
    from autoflash.settings import settings
    from autoflash.store.store import Store

    trials = lab.trials()
    present(trials)
    (result,) = tune(lab.problem, trials=24)
    assert result.record.config == trials[0].config
    found = Store(settings().db_path, read_only=True).records()
    assert found == [result.record]


def test_tune_forgets_the_plans_that_were_made_before(lab, store, present, monkeypatch):
    from autoflash.runtime import dispatch

    present(lab.trials())
    monkeypatch.setitem(dispatch._plans, ("old",), object())
    tune(lab.problem, trials=1, store=store)
    assert dispatch._plans == {}


def test_tune_raises_an_interruption_after_storing_the_best(lab, store, present):
    live = present(lab.trials(), Interrupted)
    listener = Watchful()
    longer = dataclasses.replace(lab.problem, seqlen_k=64)
    with pytest.raises(KeyboardInterrupt):
        tune([lab.problem, longer], budget_s=600, store=store, listener=listener)
    (record,) = store.records()
    assert record.problem == lab.problem
    ((_, result),) = [event for event in listener.events if event[0] == "finished"]
    assert (result.record, result.interrupted) == (record, True)
    assert live.made_with[-1] == "closed"


@pytest.mark.parametrize("field", ["batch", "seqlen_q", "seqlen_k"])
def test_tune_refuses_a_problem_without_work(lab, store, present, field):
    live = present(lab.trials())
    empty = dataclasses.replace(lab.problem, **{field: 0})
    with pytest.raises(InvalidInputError, match="there is nothing to compute, nor to tune"):
        tune([lab.problem, empty], store=store)
    assert live.made_with == []


def test_tune_refuses_what_no_kernel_serves_before_any_trial(lab, store, present):
    present(lab.trials())
    single = dataclasses.replace(lab.problem, dtype="float32")
    with pytest.raises(UnsupportedError, match=r"float32 .* NVIDIA A100-SXM4-80GB: flash_fwd: "):
        tune([lab.problem, single], store=store)
    assert store.trials(Bucket.of(lab.problem), lab.a100) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 0}, "budget of 0 s: must be more than 0"),
        ({"trials": 0}, "budget of 0 trials: must be at least 1"),
        ({"target": "v100"}, "unknown target 'v100': known are a100, "),
    ],
)
def test_tune_refuses_bad_options(lab, store, present, options, message):
    live = present(lab.trials())
    with pytest.raises(InvalidInputError) as caught:
        tune(lab.problem, store=store, **options)
    assert str(caught.value).startswith(message)
    assert live.made_with == []


def test_tune_without_a_gpu_wants_a_target(lab, store, monkeypatch):
    monkeypatch.setattr(loop, "gpu_is_present", lambda: False)
    with pytest.raises(UnsupportedError, match=r"^no GPU is visible to torch: name a target"):
        tune(lab.problem, store=store)


def test_the_target_that_would_be_tuned(lab, present, monkeypatch):
    here = dataclasses.replace(lab.a100, memory_gib=40)
    assert target_to_tune("h100") == named_target("h100")
    present([])
    monkeypatch.setattr(loop, "Worker", lambda: Describing(here))
    # What is here is asked what it is, even if it is named.
    for target in (None, "a100", lab.a100):
        assert target_to_tune(target) == here
    assert target_to_tune("h100") == named_target("h100")
    with pytest.raises(InvalidInputError, match="unknown target 'v100'"):
        target_to_tune("v100")


def test_no_target_would_be_tuned_without_a_gpu():
    with pytest.raises(UnsupportedError, match=r"^no GPU is visible to torch: name a target"):
        target_to_tune(None)


def test_the_recorded_runner_replays(lab):
    recorded = lab.trials({0: Status.compile_error, 1: Status.wrong_result})
    runner = lab.runner(recorded)
    failed = runner.compile(lab.problem, lab.candidate(recorded[0])).result()
    assert (failed.status, failed.reason) == (Status.compile_error, "made up: compile_error")
    wrong = lab.candidate(recorded[1])
    compiled = runner.compile(lab.problem, wrong).result()
    assert (compiled.status, compiled.resources.registers) == (Status.ok, 128)
    assert runner.measure(lab.problem, wrong, None).status is Status.wrong_result
    unknown = Candidate(kernel=lab.kernel, config=recorded[0].config)
    other = dataclasses.replace(lab.problem, batch=2)
    assert runner.compile(other, unknown).result().reason == "never recorded"


def test_wrong_results_alone_give_no_record(lab, store):
    recorded = lab.trials(dict.fromkeys(range(24), TrialStatus.wrong_result))
    assert tune_one(lab.problem, lab.runner(recorded), store, AMPLE, Listener()).record is None


def test_wrong_results_are_told_as_failures(lab, store, monkeypatch):
    told = []
    tell = Search.tell
    monkeypatch.setattr(
        Search, "tell", lambda self, c, ms, o: (told.append(ms), tell(self, c, ms))[1]
    )
    recorded = lab.trials(dict.fromkeys(range(24), TrialStatus.wrong_result))
    tune_one(lab.problem, lab.runner(recorded), store, AMPLE, Listener())
    assert told == [None] * 24


def test_an_interruption_before_the_search(lab, store, monkeypatch):
    def interrupt(*unused, **unused_too):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "neighbours", interrupt)
    result = tune_one(lab.problem, lab.runner(lab.trials()), store, AMPLE, Listener())
    assert (result.interrupted, result.record) == (True, None)
