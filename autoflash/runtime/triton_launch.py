"""The one place that knows how Triton launches a binary, across its versions.

``kernel[grid](...)`` specialises each argument and, for tensor descriptors, encodes a CUtensorMap
on every call: 29 to 39 us. The C launcher below it takes 3 us when the argument kinds are known and
the encoded descriptors are kept. Triton 3.6 builds one C launcher per signature, which takes flat
arguments; from 3.7 on there is a general one, which takes a tuple.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

_thread = threading.local()

# (programs, stream, arguments with the constexprs in their places)
Launch = Callable[[int, int, Sequence[Any]], None]
Encoder = Callable[[int, TensorDescriptor], list[Any]]


class AddressOnly:
    """Stands in for a tensor where only its address is asked for."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: Any) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


def make_launch(compiled: CompiledKernel) -> Launch:
    """A function that launches ``compiled`` on the device that is current now.

    Loads the binary there: raises Triton's OutOfResources when the device has less than it needs.
    """
    run = compiled.run
    raw = _raw_launcher(run)
    if raw is None:
        return _general_launch(compiled, run)
    function, metadata = compiled.function, compiled.packed_metadata
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    if hasattr(run, "kernel_signature"):
        annotations, signature = run.arg_annotations, run.kernel_signature

        def launch(programs: int, stream: int, arguments: Sequence[Any]) -> None:
            raw(programs, 1, 1, stream, function, cooperative, pdl, metadata, None, None, None,
                None, None, annotations, signature, arguments)  # fmt: skip
    else:

        def launch(programs: int, stream: int, arguments: Sequence[Any]) -> None:
            raw(programs, 1, 1, stream, function, cooperative, pdl, None, None,
                metadata, None, None, None, *arguments)  # fmt: skip

    return launch


def make_encoder(compiled: CompiledKernel) -> Encoder:
    """A function of (index, descriptor): the flat arguments that stand for the kernel's index-th
    tensor descriptor, or the descriptor itself where ``takes_encoded(compiled)`` is false."""
    if not takes_encoded(compiled):
        return lambda index, descriptor: [descriptor]
    from triton.backends.nvidia import driver

    metadata = compiled.metadata.tensordesc_meta
    encode = driver.make_tensordesc_arg
    extra = [None] * (len(inspect.signature(encode).parameters) - 2)

    def encoder(index: int, descriptor: TensorDescriptor) -> list[Any]:
        _bind_context()
        return list(encode(descriptor, metadata[index] if metadata else None, *extra))

    return encoder


def _bind_context() -> None:
    """Make the device's CUDA context current in this thread: encoding a descriptor fails without.

    A thread that has only been handed tensors has none; launching binds it, encoding doesn't.
    """
    if not getattr(_thread, "bound", False):
        torch.cuda.mem_get_info()
        _thread.bound = True


def takes_encoded(compiled: CompiledKernel) -> bool:
    """Whether ``make_launch`` wants descriptors encoded (else Triton encodes them at each call)."""
    return _raw_launcher(compiled.run) is not None


def _raw_launcher(run: Any) -> Any:
    """The C function below Triton's Python launcher; None if this Triton hides it, or if the
    kernel wants scratch memory, which the Python launcher allocates."""
    if type(run).__name__ != "CudaLauncher":
        return None  # AMD's launcher takes other arguments
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch = getattr(run, "launch", None)
    if inspect.isbuiltin(launch):
        return launch
    if inspect.isfunction(launch):
        inner = inspect.getclosurevars(launch).nonlocals.get("launcher")
        if inspect.isbuiltin(inner):
            return inner
    return None


def _general_launch(compiled: CompiledKernel, run: Any) -> Launch:
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, arguments: Sequence[Any]) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch
