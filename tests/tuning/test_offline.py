"""Tuning for a GPU that isn't here, with Triton's real compilers: ranked, never timed."""

import dataclasses

import pytest

from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Bucket, Problem
from autoflash.runtime.choose import choose
from autoflash.settings import settings
from autoflash.space import Config
from autoflash.store.record import Measurement, TrialStatus
from autoflash.store.store import Store
from autoflash.target import named_target
from autoflash.tuning.job import Candidate, Outcome, study_message
from autoflash.tuning.offline import predict, tune_offline
from autoflash.tuning.progress import Budget, Listener, StudyPlan
from autoflash.tuning.resources import Resources
from autoflash.tuning.runner import RecordedRunner, live_runners
from autoflash.tuning.tune import tune
from autoflash.tuning.worker import compile_candidate

H100 = named_target("h100")
PROBLEM = Problem(
    batch=1, heads=2, kv_heads=2, seqlen_q=32, seqlen_k=32, head_dim=64, head_dim_v=64,
    dtype="float16",
)  # fmt: skip
AMPLE = Budget(seconds=600, trials=None)


class Counting(Listener):
    def __init__(self):
        self.events = []

    def started(self, problem, target, plan):
        self.events.append((problem, target, plan))

    def tried(self, trial, best_ms):
        self.events.append((trial, best_ms))

    def finished(self, result):
        self.events.append(result)


def best_of(trials):
    """The one of the shortest predicted time; of equals the first by its config."""
    return min(trials, key=lambda t: (t.predicted_ms, t.config.to_json()))


def test_end_to_end_with_the_real_compilers(monkeypatch):
    monkeypatch.setenv("AUTOFLASH_WORKERS", "2")
    listener = Counting()
    (result,) = tune(PROBLEM, target="h100", trials=3, budget_s=300, listener=listener)
    assert (result.problem, result.target, result.resumed) == (PROBLEM, H100, 0)
    assert len(result.trials) == 3
    assert {t.status for t in result.trials} == {TrialStatus.predicted}
    for trial in result.trials:
        assert trial.measurement is None
        assert trial.predicted_ms > 0
        assert 24 <= trial.registers <= 255
        assert 0 < trial.shared_bytes <= H100.shared_memory
        assert trial.spills == 0

    record = result.record
    best = best_of(result.trials)
    assert (record.kind, record.config) == ("predicted", best.config)
    ms = best.predicted_ms
    assert record.measurement == Measurement(
        median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=1, method="model", noisy=False
    )
    assert result.path.is_file()
    assert result.path.parent == settings().cache_dir

    store = Store(settings().db_path, read_only=True)
    assert store.records() == [record]
    assert store.best(Bucket.of(PROBLEM), H100) == record
    assert store.neighbours(Bucket.of(dataclasses.replace(PROBLEM, seqlen_k=64)), H100) == []
    assert sorted(t.config.to_json() for t in store.trials(Bucket.of(PROBLEM), H100)) == sorted(
        t.config.to_json() for t in result.trials
    )
    first, *tried, last = listener.events
    plan = StudyPlan(space=result.space, resumed=0, most=3, seconds=300)
    assert (first, last) == ((PROBLEM, H100, plan), result)
    assert [trial for trial, _ in tried] == result.trials

    choice = choose(PROBLEM, H100, ALIGNED)
    assert (choice.how, choice.layer, choice.config) == ("predicted", "user", record.config)
    assert choice.why == "ranked offline by the written model, never timed"


def test_a_real_binary_that_spills_is_dropped(lab):
    """128 registers for accumulators of 256 x (64 + 128) floats on 256 threads: 192 each."""
    fields = {"BLOCK_M": 256, "BLOCK_N": 128, "num_warps": 8, "num_stages": 1, "LOAD": "pointer"}
    fields |= {"GROUP_HEADS": 1, "DIAGONAL_FIRST": False, "maxnreg": 128}
    candidate = Candidate(kernel=lab.kernel, config=lab.kernel.space.parse(fields))
    problem = dataclasses.replace(PROBLEM, seqlen_q=256, seqlen_k=256)
    assert "registers" in lab.kernel.space.why_not(candidate.config, problem, H100)
    with live_runners(1, H100) as (runner,):
        outcome = runner.compile(problem, candidate).result(timeout=180)
        assert outcome.status is TrialStatus.ok
        assert outcome.resources.registers <= 128
        assert outcome.resources.spills > 0
        trial = predict(problem, runner, candidate, outcome)
    assert trial.status is TrialStatus.out_of_resources
    assert trial.reason == f"spills {outcome.resources.spills} bytes of registers per thread"
    assert trial.predicted_ms is None


def hopper(head_dim, **changes):
    """A problem with its default config, changed, as a job for a worker."""
    kernel = KERNELS["flash_fwd_ws"]
    problem = Problem.parse({"batch": 4, "heads": 16, "seqlen": 4096, "head_dim": head_dim})
    config = Config(**{**kernel.default(problem, H100), **changes})
    candidate = Candidate(kernel=kernel, config=config)
    return problem, candidate


def compiled(problem, candidate):
    message = study_message(problem, H100) | candidate.to_message()
    return Outcome.from_message(compile_candidate(message))


def test_a_hopper_binary_that_spills_much_is_refused_before_it_is_timed():
    # 64 x (128 + 128) floats and the probabilities on 128 threads with 160 registers.
    problem, candidate = hopper(128, CONSUMERS=3, STAGING="query")
    assert "registers" in candidate.kernel.space.why_not(candidate.config, problem, H100)
    outcome = compiled(problem, candidate)
    assert outcome.status is TrialStatus.out_of_resources
    assert outcome.reason == f"spills {outcome.resources.spills} bytes of registers per thread"
    assert outcome.resources.spills > candidate.kernel.tolerable_spills


def test_a_hopper_binary_whose_products_wait_for_each_other_is_refused(monkeypatch):
    problem, candidate = hopper(64)
    assert compiled(problem, candidate).status is TrialStatus.ok
    code = "ptxas serializes the products: (C7512) so"
    monkeypatch.setattr("autoflash.tuning.worker.why_serialized", lambda *_: code)
    outcome = compiled(problem, candidate)
    assert (outcome.status, outcome.reason) == (TrialStatus.out_of_resources, code)


# --- with recorded compilations


def test_a_few_spills_of_a_hopper_binary_only_cost_it_rank(lab):
    problem, candidate = hopper(256)
    runner = RecordedRunner(H100, lab.versions, [])
    times = []
    for spills in (0, 8, 128, 136):
        resources = Resources(shared_bytes=197_000, registers=168, spills=spills)
        outcome = Outcome(status=TrialStatus.ok, resources=resources)
        times.append(predict(problem, runner, candidate, outcome).predicted_ms)
    *ranked, refused = times
    assert ranked == sorted(set(ranked))
    assert refused is None
    assert ranked[0] == candidate.kernel.estimate_ms(problem, candidate.config, H100, 1)


def test_a_prediction_is_the_models_time_for_the_real_resources(lab):
    runner = RecordedRunner(lab.a100, lab.versions, [])
    candidate = lab.candidates()[0]
    resources = Resources(shared_bytes=70_000, registers=168, spills=0)
    outcome = Outcome(status=TrialStatus.ok, resources=resources)
    trial = predict(lab.problem, runner, candidate, outcome)
    threads = 32 * candidate.config.integer("num_warps")
    blocks = resources.blocks_per_sm(threads, lab.a100)
    expected = lab.kernel.estimate_ms(lab.problem, candidate.config, lab.a100, blocks)
    assert (trial.status, trial.predicted_ms) == (TrialStatus.predicted, expected)
    assert (trial.shared_bytes, trial.registers, trial.spills) == (70_000, 168, 0)


@pytest.mark.parametrize("status", [TrialStatus.compile_error, TrialStatus.timeout])
def test_what_did_not_compile_is_dropped_with_its_reason(lab, status):
    runner = RecordedRunner(lab.a100, lab.versions, [])
    outcome = Outcome(status=status, reason="ptxas died")
    trial = predict(lab.problem, runner, lab.candidates()[0], outcome)
    assert (trial.status, trial.reason, trial.predicted_ms) == (status, "ptxas died", None)


def test_dropped_candidates_have_reasons_and_never_win(lab, store):
    statuses = {
        place: (TrialStatus.compile_error, TrialStatus.out_of_resources)[place % 2]
        for place in range(0, 24, 3)
    }
    recorded = lab.trials(statuses)
    spilling = [
        dataclasses.replace(t, spills=16) if i % 3 == 1 else t for i, t in enumerate(recorded)
    ]
    runner = lab.runner(spilling)
    result = tune_offline(lab.problem, runner, store, AMPLE, Listener())
    stored = {t.config: t for t in store.trials(Bucket.of(lab.problem), lab.a100)}
    assert len(stored) == 24
    for place, trial in enumerate(spilling):
        found = stored[trial.config]
        if place in statuses:
            assert (found.status, found.reason) == (trial.status, trial.reason)
            assert found.reason.startswith("made up: ")
        elif place % 3 == 1:
            assert found.status is TrialStatus.out_of_resources
            assert found.reason == "spills 16 bytes of registers per thread"
        else:
            assert found.status is TrialStatus.predicted
    survivors = [t for t in stored.values() if t.predicted_ms is not None]
    assert len(survivors) == 8
    assert result.record.measurement.median_ms == min(t.predicted_ms for t in survivors)


def test_the_models_first_ones_are_compiled(lab, store):
    runner = lab.runner(lab.trials())
    budget = Budget(seconds=600, trials=4)
    result = tune_offline(lab.problem, runner, store, budget, Listener())
    assert runner.asked == lab.candidates()[:4]
    assert (len(result.trials), result.space) == (4, 24)


def test_at_most_24_unless_told_otherwise(lab, store):
    problem = dataclasses.replace(lab.problem, seqlen_q=128, seqlen_k=128, causal=False)
    runner = lab.runner(lab.trials(problem=problem))
    result = tune_offline(problem, runner, store, AMPLE, Listener())
    assert len(runner.asked) == len(result.trials) == 24


def test_where_everything_spills_those_that_spill_least_are_ranked(lab, store):
    spilling = [dataclasses.replace(t, spills=16 * (i + 1)) for i, t in enumerate(lab.trials())]
    result = tune_offline(lab.problem, lab.runner(spilling), store, AMPLE, Listener())
    dropped, ranked = result.trials[:24], result.trials[24:]
    assert {t.status for t in dropped} == {TrialStatus.out_of_resources}
    assert [t.spills for t in ranked] == [16, 32, 48, 64]
    for trial in ranked:
        resources = Resources(shared_bytes=4096, registers=128, spills=trial.spills)
        blocks = resources.blocks_per_sm(32 * trial.config["num_warps"], lab.a100)
        clean = lab.kernel.estimate_ms(lab.problem, trial.config, lab.a100, blocks)
        assert trial.status is TrialStatus.predicted
        assert trial.reason == f"spills {trial.spills} bytes of registers per thread"
        assert trial.predicted_ms == pytest.approx(clean * (1 + 3e-4 * trial.spills), rel=1e-12)
    assert result.record.config == best_of(ranked).config


def test_when_few_survive_the_ranking_is_walked_further(lab, store):
    problem = dataclasses.replace(lab.problem, seqlen_q=128, seqlen_k=128, causal=False)
    ranking = {c.config: place for place, c in enumerate(lab.candidates(problem))}
    recorded = [
        dataclasses.replace(t, spills=0 if ranking[t.config] in (3, 30, 31, 32, 33) else 8)
        for t in lab.trials(problem=problem)
    ]
    runner = lab.runner(recorded)
    result = tune_offline(problem, runner, store, AMPLE, Listener())
    # Four survivors are enough: the 33rd place gives the fourth, up to two more are under way.
    assert 33 <= len(runner.asked) <= 35
    assert len([t for t in result.trials if t.predicted_ms is not None]) >= 4


def test_nothing_survives(lab, store):
    recorded = lab.trials(dict.fromkeys(range(24), TrialStatus.compile_error))
    result = tune_offline(lab.problem, lab.runner(recorded), store, AMPLE, Listener())
    assert (result.record, result.path, len(result.trials)) == (None, None, 24)
    assert store.records() == []


def test_an_interruption_keeps_what_was_ranked(lab, store):
    class Interrupted(RecordedRunner):
        def compile(self, problem, candidate):
            if len(self.asked) == 5:
                raise KeyboardInterrupt
            return super().compile(problem, candidate)

    runner = lab.runner(lab.trials(), Interrupted)
    result = tune_offline(lab.problem, runner, store, AMPLE, Listener())
    assert result.interrupted is True
    assert len(result.trials) == 4
    assert result.record.config == best_of(result.trials).config
    assert store.records() == [result.record]


def test_a_prediction_never_hides_a_measurement(lab, store):
    from autoflash.tuning.study import tune_one

    recorded = lab.trials()
    measured = tune_one(lab.problem, lab.runner(recorded), store, AMPLE, Listener()).record
    predicted = tune_offline(lab.problem, lab.runner(recorded), store, AMPLE, Listener()).record
    assert len(store.records()) == 2
    assert store.best(Bucket.of(lab.problem), lab.a100) == measured
    assert predicted.kind == "predicted"
    # Nor do its trials stand in for timed ones.
    runner = lab.runner(recorded)
    again = tune_one(lab.problem, runner, store, AMPLE, Listener())
    assert (again.resumed, runner.asked) == (24, [])


def test_what_was_dropped_for_its_spills_is_timed_on_the_gpu(lab, store):
    """Nor does an offline tune that comes after it spoil the time."""
    from autoflash.tuning.study import tune_one

    recorded = [dataclasses.replace(t, spills=16) for t in lab.trials()]
    dropped = tune_offline(lab.problem, lab.runner(recorded), store, AMPLE, Listener()).trials
    assert {t.status for t in dropped[:24]} == {TrialStatus.out_of_resources}
    runner = lab.runner(recorded)
    result = tune_one(lab.problem, runner, store, AMPLE, Listener())
    assert (result.resumed, len(runner.asked)) == (0, 24)
    assert result.record.config == recorded[0].config
    tune_offline(lab.problem, lab.runner(recorded), store, AMPLE, Listener())
    runner = lab.runner(recorded)
    again = tune_one(lab.problem, runner, store, AMPLE, Listener())
    assert (again.resumed, runner.asked) == (24, [])
    assert again.record.config == recorded[0].config


@pytest.mark.parametrize("spilled", [0, 8])
def test_running_again_compiles_and_stores_nothing_twice(lab, store, spilled):
    failures = {0: TrialStatus.compile_error, 1: TrialStatus.out_of_resources}
    recorded = [
        dataclasses.replace(t, spills=spilled * (i + 1)) for i, t in enumerate(lab.trials(failures))
    ]
    budget = Budget(seconds=600, trials=10)
    first = tune_offline(lab.problem, lab.runner(recorded), store, budget, Listener())
    stored = store.trials(Bucket.of(lab.problem), lab.a100)
    assert (first.resumed, len(stored)) == (0, 14 if spilled else 10)

    runner, listener = lab.runner(recorded), Counting()
    second = tune_offline(lab.problem, runner, store, budget, listener)
    assert (second.resumed, runner.asked) == (10, [])
    plan = StudyPlan(space=24, resumed=10, most=0, seconds=600)
    assert listener.events == [(lab.problem, lab.a100, plan), second]
    assert store.trials(Bucket.of(lab.problem), lab.a100) == stored
    assert second.record.config == first.record.config
    assert second.record.measurement == first.record.measurement

    # With a larger budget only those that are new.
    runner = lab.runner(recorded)
    third = tune_offline(lab.problem, runner, store, AMPLE, Listener())
    assert third.resumed == 10
    assert runner.asked == lab.candidates()[10:]
    whole = tune_offline(lab.problem, lab.runner(recorded), Store(store.path.with_name("other")),
                         AMPLE, Listener())  # fmt: skip
    assert third.record.config == whole.record.config
    assert third.record.measurement == whole.record.measurement


@pytest.mark.parametrize("status", [TrialStatus.timeout, TrialStatus.crashed, "unknown binary"])
def test_what_says_nothing_of_a_binary_is_compiled_again(lab, store, status):
    recorded = lab.trials()
    if status == "unknown binary":
        foreign = {"status": TrialStatus.predicted, "measurement": None, "predicted_ms": 1e-9}
        store.add_trials(dataclasses.replace(t, registers=None, **foreign) for t in recorded)
    else:
        store.add_trials(lab.trials(dict.fromkeys(range(24), status)))
    runner = lab.runner(recorded)
    result = tune_offline(lab.problem, runner, store, AMPLE, Listener())
    assert (result.resumed, len(runner.asked)) == (0, 24)


def test_killed_while_it_ranks_it_goes_on(lab, store):
    class Killed(RecordedRunner):
        def compile(self, problem, candidate):
            if len(self.asked) == 7:
                raise SystemExit
            return super().compile(problem, candidate)

    with pytest.raises(SystemExit):
        tune_offline(lab.problem, lab.runner(lab.trials(), Killed), store, AMPLE, Listener())
    kept = [t.config for t in store.trials(Bucket.of(lab.problem), lab.a100)]
    assert 5 <= len(kept) <= 7
    runner = lab.runner(lab.trials())
    result = tune_offline(lab.problem, runner, store, AMPLE, Listener())
    assert result.resumed == len(kept)
    assert {c.config for c in runner.asked}.isdisjoint(kept)
    assert len(runner.asked) == 24 - len(kept)
    assert result.record.config == best_of(result.trials).config


def test_a_newer_model_predicts_anew_what_was_compiled(lab, store, monkeypatch):
    tune_offline(lab.problem, lab.runner(lab.trials()), store, AMPLE, Listener())
    old = store.trials(Bucket.of(lab.problem), lab.a100)
    estimate = type(lab.kernel).estimate_ms
    monkeypatch.setattr(type(lab.kernel), "estimate_ms", lambda *a: 2 * estimate(*a))
    runner = lab.runner(lab.trials())
    result = tune_offline(lab.problem, runner, store, AMPLE, Listener())
    assert (result.resumed, runner.asked) == (24, [])
    new = store.trials(Bucket.of(lab.problem), lab.a100)[len(old) :]
    assert {t.config: t.predicted_ms for t in new} == {
        t.config: pytest.approx(2 * t.predicted_ms) for t in old
    }
    assert result.record.measurement.median_ms == min(t.predicted_ms for t in new)
