"""Whether the GPU was fit to be timed, and what is made of samples. Runs in a worker only."""

import os
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from autoflash.store.record import Measurement

# NVML's reasons that make a time doubtful. A software power cap is the normal state of a large
# GPU under matrix load, and the idle clock that of one that rests.
_BAD_REASONS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
_NOTED_REASONS = {0x04: "power cap"}


# What NVML calls busy over its last sample, in percent.
_BUSY_PERCENT = 5


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """SM clock in MHz (None if NVML is silent), throttle reasons, why times are noisy if so, memory
    errors that ECC could not correct since the driver was loaded (None: not counted)."""

    sm_clock_mhz: int | None
    throttle: str
    noisy: str
    ecc_errors: int | None = None


def gpu_state(device: int = 0) -> GpuState:
    """What NVML says now of the GPU that torch calls ``device``; nothing known without NVML."""
    try:
        import pynvml

        handle = _handle(device)
        clock = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        mask = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # noqa: BLE001 - pynvml's NVMLError has no public base but Exception
        return GpuState(sm_clock_mhz=None, throttle="", noisy="")
    bad = [name for bit, name in _BAD_REASONS.items() if mask & bit]
    noted = [name for bit, name in _NOTED_REASONS.items() if mask & bit]
    others = _others({process.pid for process in running})
    reasons = bad + ([f"{others} other processes on the GPU"] if others else [])
    return GpuState(
        sm_clock_mhz=clock,
        throttle=", ".join(bad + noted),
        noisy=", ".join(reasons),
        ecc_errors=_ecc_errors(handle),
    )


def why_busy(parents_contexts: int, device: int = 0) -> str:
    """What others do on the GPU that torch calls ``device``, or ''; '' without NVML.

    To be asked while this process has no context on it, and its parent has ``parents_contexts``.
    """
    try:
        import pynvml

        handle = _handle(device)
        used = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except Exception:  # noqa: BLE001 - pynvml's NVMLError has no public base but Exception
        return ""
    # In a container NVML tells the host's pids, and ours are not among them.
    known = os.getppid() in pids
    others = len(pids) - (1 if known else min(parents_contexts, len(pids)))
    reasons = [f"{others} other processes on it"] if others else []
    reasons += [f"busy for {used} % of the time"] if used > _BUSY_PERCENT else []
    return ", ".join(reasons)


def _handle(device: int) -> Any:
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())


def _ecc_errors(handle: Any) -> int | None:
    import pynvml

    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    try:
        return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))
    except Exception:  # noqa: BLE001 - as above; GPUs without ECC say so here
        return None


def _others(pids: set[int]) -> int:
    """Processes with a context on the GPU that aren't ours: this worker and its idle parent."""
    ours = {os.getpid(), os.getppid()}
    # In a container NVML tells the host's pids, and ours are not among them.
    return len(pids - ours) if os.getpid() in pids else max(0, len(pids) - len(ours))


def summarize(
    times: list[float], before: GpuState, after: GpuState, method: str = "events"
) -> Measurement:
    """Median and quantiles of ``times`` with the state they were taken in."""
    ordered = sorted(times)
    noisy = before.noisy or after.noisy
    if None not in (before.ecc_errors, after.ecc_errors) and before.ecc_errors != after.ecc_errors:
        noisy = ", ".join([*([noisy] if noisy else []), "memory errors"])
    return Measurement(
        median_ms=statistics.median(ordered),
        p20_ms=ordered[len(ordered) // 5],
        p80_ms=ordered[min(len(ordered) - 1, len(ordered) * 4 // 5)],
        repeats=len(ordered),
        method=method,
        noisy=bool(noisy),
        sm_clock_mhz=after.sm_clock_mhz,
        throttle=noisy or after.throttle or before.throttle,
    )
