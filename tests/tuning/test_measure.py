"""What is made of samples and of what the driver says; the timing itself needs a GPU."""

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from autoflash.errors import UnsupportedError
from autoflash.problem import Problem
from autoflash.store.record import Measurement
from autoflash.tuning.bench import PEERS, bench_problem, implementation
from autoflash.tuning.measure import GpuState, gpu_state, summarize, why_busy

PROBLEM = Problem(
    batch=1, heads=2, kv_heads=1, seqlen_q=16, seqlen_k=16, head_dim=64, head_dim_v=64,
    dtype="float16",
)  # fmt: skip
CLEAN = GpuState(sm_clock_mhz=1980, throttle="", noisy="")
CAPPED = GpuState(sm_clock_mhz=1500, throttle="power cap", noisy="")
BUSY = GpuState(sm_clock_mhz=1400, throttle="", noisy="1 other processes on the GPU")


def test_median_and_quantiles():
    times = [float(ms) for ms in (10, 1, 9, 2, 8, 3, 7, 4, 6, 5)]
    assert summarize(times, CLEAN, CLEAN) == Measurement(
        median_ms=5.5, p20_ms=3.0, p80_ms=9.0, repeats=10, method="events", noisy=False,
        sm_clock_mhz=1980, throttle="",
    )  # fmt: skip
    assert times[0] == 10.0


def test_one_sample():
    found = summarize([0.25], CLEAN, CLEAN)
    assert (found.median_ms, found.p20_ms, found.p80_ms, found.repeats) == (0.25, 0.25, 0.25, 1)


def test_an_outlier_moves_no_median():
    assert summarize([1.0] * 9 + [50.0], CLEAN, CLEAN).median_ms == 1.0


@pytest.mark.parametrize(
    ("before", "after", "noisy", "throttle", "clock"),
    [
        (CLEAN, CLEAN, False, "", 1980),
        (CLEAN, CAPPED, False, "power cap", 1500),
        (CAPPED, CLEAN, False, "power cap", 1980),
        (BUSY, CLEAN, True, "1 other processes on the GPU", 1980),
        (CLEAN, BUSY, True, "1 other processes on the GPU", 1400),
        (CAPPED, BUSY, True, "1 other processes on the GPU", 1400),
    ],
)
def test_the_state_decides_what_is_noisy(before, after, noisy, throttle, clock):
    found = summarize([1.0], before, after)
    assert (found.noisy, found.throttle, found.sm_clock_mhz) == (noisy, throttle, clock)


def nvml(mask, pids, ecc_errors=0, used=0):
    """What pynvml says of the one GPU there is."""

    def handle_of(uuid):
        assert uuid == b"GPU-1234"
        return "handle"

    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=2,
        NVML_VOLATILE_ECC=3,
        nvmlDeviceGetTotalEccErrors=lambda handle, *kinds: {(2, 3): ecc_errors}[kinds],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=used),
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetClockInfo=lambda handle, kind: {("handle", 1): 1980}[handle, kind],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: mask,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=p) for p in pids],
    )


@pytest.mark.parametrize(
    ("mask", "others", "throttle", "noisy"),
    [
        (0x0, [], "", ""),
        # Idle, and limits set by the user: no trouble.
        (0x1, [], "", ""),
        (0x4, [], "power cap", ""),
        (0x8, [], "hardware slowdown", "hardware slowdown"),
        (0x20, [], "thermal slowdown (software)", "thermal slowdown (software)"),
        (0x44, [], "thermal slowdown (hardware), power cap", "thermal slowdown (hardware)"),
        (0x80, [], "power brake", "power brake"),
        (0x4, [1, 2], "power cap", "2 other processes on the GPU"),
        (0x8, [1], "hardware slowdown", "hardware slowdown, 1 other processes on the GPU"),
    ],
)
def test_what_the_driver_says(monkeypatch, mask, others, throttle, noisy):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(mask, [os.getpid(), *others]))
    one_gpu(monkeypatch)
    expected = GpuState(sm_clock_mhz=1980, throttle=throttle, noisy=noisy, ecc_errors=0)
    assert gpu_state() == expected


def one_gpu(monkeypatch):
    properties = SimpleNamespace(uuid="1234")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)


def test_a_memory_error_makes_a_time_noisy():
    before, after = (dataclasses.replace(CLEAN, ecc_errors=n) for n in (1, 2))
    assert summarize([1.0], before, before).noisy is False
    found = summarize([1.0], before, after)
    assert (found.noisy, found.throttle) == (True, "memory errors")
    found = summarize([1.0], before, dataclasses.replace(BUSY, ecc_errors=2))
    assert found.throttle == "1 other processes on the GPU, memory errors"
    # A GPU that doesn't count them.
    assert summarize([1.0], CLEAN, dataclasses.replace(CLEAN, ecc_errors=2)).noisy is False


def test_a_gpu_without_ecc(monkeypatch):
    driver = nvml(0, [os.getpid()])
    del driver.nvmlDeviceGetTotalEccErrors
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    one_gpu(monkeypatch)
    assert gpu_state() == CLEAN


@pytest.mark.parametrize(
    ("pids", "contexts", "used", "reason"),
    [
        ([], 0, 0, ""),
        ([], 0, 5, ""),
        ([os.getppid()], 0, 0, ""),
        ([os.getppid(), 1], 0, 80, "1 other processes on it, busy for 80 % of the time"),
        # Another container's names for processes: the parent's own context is among them.
        ([7], 1, 0, ""),
        ([7], 0, 0, "1 other processes on it"),
        ([7, 8], 1, 0, "1 other processes on it"),
        ([], 1, 0, ""),
        ([], 0, 6, "busy for 6 % of the time"),
    ],
)
def test_why_a_gpu_is_busy(monkeypatch, pids, contexts, used, reason):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(0, pids, used=used))
    one_gpu(monkeypatch)
    assert why_busy(contexts) == reason


def test_without_nvml_nothing_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_state() == GpuState(sm_clock_mhz=None, throttle="", noisy="")
    assert why_busy(1) == ""


def test_bench_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"^no GPU is visible to torch: "):
        bench_problem(PROBLEM)


@pytest.mark.parametrize(("op", "name"), [("fwd", "fa4"), ("bwd", "fa3")])
def test_an_unknown_implementation(op, name):
    q = torch.zeros(1, 2, 16, 64)
    problem = dataclasses.replace(PROBLEM, op=op)
    with pytest.raises(ValueError, match=f"^unknown implementation '{name}' of {op}: known are "):
        implementation(name, problem, q, q, q)
    assert PEERS[op][0] == "autoflash"


def test_autoflash_is_an_implementation():
    from autoflash.reference import attention_forward
    from autoflash.tuning.check import make_inputs

    q, k, v = make_inputs(PROBLEM, "cpu")
    expected, _ = attention_forward(q, k, v, causal=False, scale=0.125)
    assert torch.equal(implementation("autoflash", PROBLEM, q, k, v)(), expected)


@pytest.mark.parametrize("name", ["autoflash", "autoflash_deterministic"])
def test_a_backward_runs_again_and_again(name):
    from autoflash.reference import exact_gradients
    from autoflash.tuning.check import make_inputs

    problem = dataclasses.replace(PROBLEM, op="bwd", causal=True)
    q, k, v = make_inputs(problem, "cpu")
    torch.manual_seed(0)
    launch = implementation(name, problem, q, k, v)
    torch.manual_seed(0)
    dout = torch.randn_like(q)
    exact = exact_gradients(dout, None, q, k, v, causal=True, scale=0.125)
    for _ in range(2):
        for grad, expected in zip(launch(), exact, strict=True):
            assert grad.requires_grad is False
            torch.testing.assert_close(grad.double(), expected, rtol=1e-2, atol=1e-2)
