"""Timing on the GPU, and whether the GPU was fit to be timed. Runs in a worker only."""

import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoflash.store.record import Measurement

_FLUSH_BYTES = 256 << 20
_ROUND_MS = 15.0

# NVML's reasons that make a time doubtful. A software power cap is the normal state of a large
# GPU under matrix load, and the idle clock that of one that rests.
_BAD_REASONS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
_NOTED_REASONS = {0x04: "power cap"}


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """SM clock in MHz (None if NVML is silent), throttle reasons, why times are noisy if so."""

    sm_clock_mhz: int | None
    throttle: str
    noisy: str


def gpu_state(device: int = 0) -> GpuState:
    """What NVML says now of the GPU that torch calls ``device``; nothing known without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        clock = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        mask = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # noqa: BLE001 - pynvml's NVMLError has no public base but Exception
        return GpuState(sm_clock_mhz=None, throttle="", noisy="")
    bad = [name for bit, name in _BAD_REASONS.items() if mask & bit]
    noted = [name for bit, name in _NOTED_REASONS.items() if mask & bit]
    others = _others({process.pid for process in running})
    reasons = bad + ([f"{others} other processes on the GPU"] if others else [])
    return GpuState(sm_clock_mhz=clock, throttle=", ".join(bad + noted), noisy=", ".join(reasons))


def _others(pids: set[int]) -> int:
    """Processes with a context on the GPU that aren't ours: this worker and its idle parent."""
    ours = {os.getpid(), os.getppid()}
    # In a container NVML tells the host's pids, and ours are not among them.
    return len(pids - ours) if os.getpid() in pids else max(0, len(pids) - len(ours))


class Timer:
    """Times launches with CUDA events; the L2 cache is flushed before each."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def samples(self, launch: Callable[[], object], count: int) -> list[float]:
        """Milliseconds of ``count`` launches."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        stops = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for start, stop in zip(starts, stops, strict=True):
            self._flush.zero_()
            start.record()
            launch()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)]

    def time(
        self,
        launch: Callable[[], object],
        *,
        budget_ms: float = 60.0,
        give_up_ms: float | None = None,
    ) -> list[float]:
        """Warmed-up samples for about ``budget_ms``, at least 5.

        Stops at 5 when their median is already above ``give_up_ms``.
        """
        first = self.samples(launch, 2)[-1]
        times = self.samples(launch, 5)
        if give_up_ms is not None and statistics.median(times) > give_up_ms:
            return times
        more = int(min(100, max(5, budget_ms / max(first, 0.05))))
        return times + self.samples(launch, more)

    def interleave(self, launches: list[Callable[[], object]], rounds: int) -> list[list[float]]:
        """Samples of each launch, taken in ``rounds`` turns so that drift hits all alike.

        Each turn has another order (the same in every run): under a power cap a launch is faster
        after one that draws less, so that none may always have the same neighbour.
        """
        times: list[list[float]] = [[] for _ in launches]
        for launch in launches:
            self.samples(launch, 2)
        lot = random.Random(0)
        for _ in range(rounds):
            for index in lot.sample(range(len(launches)), len(launches)):
                count = 5
                if times[index]:
                    count = int(min(30, max(3, _ROUND_MS / max(times[index][-1], 0.01))))
                times[index] += self.samples(launches[index], count)
        return times


def summarize(times: list[float], before: GpuState, after: GpuState) -> Measurement:
    """Median and quantiles of ``times`` with the state they were taken in."""
    ordered = sorted(times)
    noisy = before.noisy or after.noisy
    return Measurement(
        median_ms=statistics.median(ordered),
        p20_ms=ordered[len(ordered) // 5],
        p80_ms=ordered[min(len(ordered) - 1, len(ordered) * 4 // 5)],
        repeats=len(ordered),
        method="events",
        noisy=bool(noisy),
        sm_clock_mhz=after.sm_clock_mhz,
        throttle=noisy or after.throttle or before.throttle,
    )
