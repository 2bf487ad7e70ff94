"""How samples are taken in turns, and what becomes of a GPU with too little memory; the timing
itself needs a GPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from autoflash.runtime import counters
from autoflash.store.record import TrialStatus
from autoflash.tuning import timing, worker
from autoflash.tuning.check import FullProblem
from autoflash.tuning.check_bwd import FullGradients
from autoflash.tuning.job import Outcome
from autoflash.tuning.timing import Timer


class Fixed:
    """Always the same time; says when it was asked, and for how many samples."""

    method = "events"

    def __init__(self, ms, log):
        self.ms = ms
        self.log = log

    def samples(self, count):
        self.log.append((self.ms, count))
        return [self.ms] * count


@pytest.fixture
def timer():
    timer = Timer.__new__(Timer)  # a flush buffer would need a GPU
    timer._busy_until = math.inf  # not cold
    return timer


def test_a_time_is_warmed_up_and_fills_its_budget(timer):
    log = []
    assert timer.time(Fixed(2.0, log), budget_ms=60.0) == [2.0] * 35
    # Two to learn how long it takes, ten for the clocks to settle, then what counts.
    assert log == [(2.0, 2), (2.0, 10), (2.0, 5), (2.0, 30)]
    assert len(timer.time(Fixed(0.001, []), budget_ms=60.0)) == 105
    assert len(timer.time(Fixed(100.0, []), budget_ms=60.0)) == 10


@pytest.mark.parametrize(("rest", "warm"), [(math.inf, 1.5), (0.9, 0.9), (0.4, 0.0)])
def test_a_rest_of_the_gpu_is_made_up_for(timer, monkeypatch, rest, warm):
    now = [1000.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])

    class Clocked(Fixed):
        def samples(self, count):
            now[0] += count * self.ms * 1e-3
            return super().samples(count)

    timer._busy_until = 1000.0 - rest
    log = []
    timer.time(Clocked(2.0, log), budget_ms=60.0)
    first, *settling, five, thirty = log
    assert (first, five, thirty) == ((2.0, 2), (2.0, 5), (2.0, 30))
    assert set(settling) == {(2.0, 10)}
    # Two samples belong to the rest, and the last of the settling is there without one.
    assert len(settling) == pytest.approx(warm / 0.020 + 1, abs=1)
    assert timer._busy_until == now[0]
    log.clear()
    timer.time(Clocked(2.0, log), budget_ms=60.0)
    assert log == [(2.0, 2), (2.0, 10), (2.0, 5), (2.0, 30)]


def test_a_slow_one_is_given_up_early(timer):
    assert timer.time(Fixed(2.0, []), give_up_ms=1.9) == [2.0] * 5
    assert len(timer.time(Fixed(2.0, []), give_up_ms=2.0)) == 35


def test_turns_have_changing_orders_and_repeat(timer):
    def run():
        log = []
        times = timer.interleave([Fixed(ms, log) for ms in (1.0, 2.0, 30.0)], rounds=4)
        return times, log

    times, log = run()
    assert run() == (times, log)
    assert [len(t) for t in times] == [4 * 30, 4 * 15, 4 * 3]
    # Two of each at first; then, in each turn, some for the clocks to settle and those that count.
    assert log[:3] == [(1.0, 2), (2.0, 2), (30.0, 2)]
    turns = [log[i : i + 6] for i in range(3, len(log), 6)]
    assert len(turns) == 4
    counts = {1.0: (20, 30), 2.0: (10, 15), 30.0: (1, 3)}
    for turn in turns:
        seen = {}
        for ms, count in turn:
            seen.setdefault(ms, []).append(count)
        assert {ms: tuple(each) for ms, each in seen.items()} == counts
    assert len({tuple(ms for ms, _ in turn[::2]) for turn in turns}) > 1


def test_a_timing_without_graphs_is_eager(timer, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: (_ for _ in ()).throw(RuntimeError("none")))
    timer._flush = None
    timed = timer.replayed(lambda: None)
    assert timed.method == "events"
    assert "timing without a CUDA graph: none" in caplog.text


def test_a_capture_for_timing_shares_the_streams_counter(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    own = SimpleNamespace(data_ptr=lambda: 7)
    monkeypatch.setattr(counters, "_zeroed", lambda: own)
    monkeypatch.setitem(counters._addresses, (0, 5, 0), 64)
    assert counters.counter(5) == (own, 7)
    with counters.one_after_the_other():
        assert counters.counter(5) == (None, 64)
    assert counters.counter(5) == (own, 7)


# --- sets of tensors


class Addresses:
    """A launcher whose launches are the addresses that they were given."""

    def __init__(self):
        self.seen = []

    def scratch(self, problem):
        return [((4, problem.seqlen_k), torch.float32)]

    def bind(self, call):
        return lambda stream, addresses: self.seen.append(tuple(addresses))


@pytest.mark.parametrize("kind", [FullProblem, FullGradients])
def test_each_copy_has_tensors_of_its_own(lab, kind, monkeypatch):
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    backward = kind is FullGradients
    launcher = Addresses()
    full = kind(lab.problem, "cpu", copies=3)
    for launch in full.launches(launcher):
        launch()
    assert len(launcher.seen) == 3
    given = [address for addresses in launcher.seen for address in addresses if address]
    assert len(set(given)) == len(given) == 3 * (10 if backward else 6)


# --- memory


@pytest.fixture
def bench(monkeypatch):
    """A Bench whose answers need as much memory as ``needs`` sets of tensors."""
    bench = worker.Bench()
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(bench._copies))
    bench.freed = freed
    bench.asked = []

    def measure(message):
        bench.asked.append(bench._copies)
        if bench._copies > bench.holds:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 20 GiB")
        return {"status": "ok"}

    bench._measure = bench._interleave = measure
    return bench


def test_with_enough_memory_nothing_is_tried_twice(bench):
    bench.holds = 3
    assert bench.measure({}) == {"status": "ok"}
    assert (bench.asked, bench.freed) == ([3], [])


def test_with_less_a_single_set_is_tried(bench):
    bench.holds = 2
    assert bench.measure({}) == {"status": "ok"}
    assert (bench.asked, bench.freed) == ([3, 1], [3])
    # The next candidate of the problem starts so.
    assert bench.measure({}) == {"status": "ok"}
    assert bench.asked == [3, 1, 1]


def test_with_too_little_it_is_an_outcome_and_the_allocator_is_left_empty(bench):
    bench.holds = 0
    expected = Outcome(
        status=TrialStatus.out_of_resources,
        reason="out of memory: CUDA out of memory. Tried to allocate 20 GiB",
    ).to_message()
    assert bench.measure({}) == expected
    assert (bench.asked, bench.freed) == ([3, 1], [3, 1])
    assert bench.interleave({"candidates": [{}, {}]}) == {"outcomes": [expected, expected]}
    assert bench.asked == [3, 1, 3, 1]
