"""Counters of dynamic schedules: two int32 that each launch finds zero and leaves zero.

Launches that may overlap in time must not share one. Those of one stream can't overlap, so a stream
keeps its own. A CUDA graph may be replayed on any stream beside anything: each launch that is
captured gets one in the graph's own memory, which the graph zeroes at each replay.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

# cudaStreamPerThread: one handle, another stream in each thread.
_PER_THREAD_STREAM = 2

_lock = threading.Lock()
_local = threading.local()
_addresses: dict[tuple[int, int, int], int] = {}
_kept: list[Tensor] = []


def counter(stream: int) -> tuple[Tensor | None, int]:
    """(what the caller must hold until it has launched, address) of a counter for one launch on
    ``stream``, which is the current one of the current device."""
    if torch._C._cuda_isCurrentStreamCapturing() and not getattr(_local, "serial", False):
        # After the launch its memory may serve what the graph does later on this stream.
        own = _zeroed()
        return own, own.data_ptr()
    thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
    key = (torch._C._cuda_getDevice(), stream, thread)
    address = _addresses.get(key)
    if address is None:
        with _lock:
            address = _addresses.get(key) or _make(key)
    return None, address


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """What this thread captures meanwhile is replayed by itself, one launch after the other: they
    share the counter of the capturing stream, which must have launched before.

    No node zeroes it then, as in an eager call: for timing.
    """
    _local.serial = True
    try:
        yield
    finally:
        _local.serial = False


def _make(key: tuple[int, int, int]) -> int:
    """A counter that lives as long as the process."""
    # In a thread of its own: in this one the allocator may be told to use a pool that is audited or
    # given up later (warming up a CUDA graph does that).
    with ThreadPoolExecutor(1, thread_name_prefix="autoflash-counter") as thread:
        made = thread.submit(_zeroed_now, key[0]).result()
    _kept.append(made)
    _addresses[key] = made.data_ptr()
    return made.data_ptr()


def _zeroed_now(device: int) -> Tensor:
    """A counter that is zero when this returns: another stream may use it at once."""
    with torch.cuda.device(device):
        made = _zeroed()
        torch.cuda.current_stream().synchronize()
    return made


def _zeroed() -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device="cuda")
