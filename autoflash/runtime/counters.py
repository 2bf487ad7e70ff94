"""Counters of dynamic schedules: two int32 that each launch finds zero and leaves zero.

Launches that may overlap in time must not share one. Those of one stream can't overlap, so a stream
keeps its own. A CUDA graph may be replayed on any stream beside anything: each launch that is
captured gets one of the graph's own memory, zeroed by the graph at each replay.
"""

import threading
from typing import Any

import torch
from torch import Tensor

# cudaStreamPerThread: one handle, another stream in each thread.
_PER_THREAD_STREAM = 2

_lock = threading.Lock()
_addresses: dict[tuple[int, int, int], int] = {}
_kept: list[Tensor] = []


def counter(stream: int) -> tuple[Tensor | None, int]:
    """(what the caller must hold until it has launched, address) of a counter for one launch on
    ``stream``, which is the current one of the current device."""
    if torch._C._cuda_isCurrentStreamCapturing():
        own = torch.zeros(2, dtype=torch.int32, device="cuda")
        return own, own.data_ptr()
    thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
    key = (torch._C._cuda_getDevice(), stream, thread)
    address = _addresses.get(key)
    if address is None:
        with _lock:
            address = _addresses.get(key) or _make(key)
    return None, address


def _make(key: tuple[int, int, int]) -> int:
    """A counter that lives as long as the process, zeroed before what is launched next."""
    made: list[Any] = []

    def make() -> None:
        try:
            with torch.cuda.device(key[0]):
                made.append(torch.zeros(2, dtype=torch.int32, device="cuda"))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            made.append(error)

    # In a thread of its own: in this one the allocator may be told to use a pool that is cleared
    # or audited later (warming up a CUDA graph does that).
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (found,) = made
    if isinstance(found, BaseException):
        raise found
    assert isinstance(found, Tensor)
    _kept.append(found)
    address = found.data_ptr()
    _addresses[key] = address
    return address
