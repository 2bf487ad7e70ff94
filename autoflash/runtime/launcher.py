"""Launcher: a compiled kernel on one device; BoundFunction: one of its functions with a call's
sizes filled in."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from autoflash.codegen.render import Source, render
from autoflash.errors import OutOfResourcesError
from autoflash.kernels.kernel import (
    TENSORS,
    Access,
    Argument,
    Call,
    Counter,
    Descriptor,
    Function,
    Kernel,
    Pointer,
)
from autoflash.problem import Problem
from autoflash.runtime import counters
from autoflash.runtime.compiler import binary_name, compile_function
from autoflash.runtime.triton_launch import (
    AddressOnly,
    Encoder,
    Launch,
    make_encoder,
    make_launch,
)
from autoflash.space import Config
from autoflash.target import Target

# Encoded descriptors that one BoundFunction keeps per tensor; a training loop's allocator hands out
# the same few addresses again and again.
_MAX_ENCODED = 256
_ANY_ADDRESS = 1 << 20

# Of the op's tensors (kernels.kernel.TENSORS), then of the scratch buffers; 0 for one not given.
Addresses = Sequence[int]
Bound = Callable[[int, Addresses], None]
# Shapes and dtypes of the scratch buffers, in the order of their addresses.
Buffers = list[tuple[tuple[int, ...], torch.dtype]]


class Launcher:
    """A loaded Source, its functions compiled for one config and loaded on the current device.

    Raises CompileError, or OutOfResourcesError when the device can't hold it.
    """

    def __init__(
        self, kernel: Kernel, problem: Problem, config: Config, access: Access, target: Target
    ) -> None:
        self.kernel = kernel
        self.config = config
        self.target = target
        self.source: Source = render(kernel, problem, config)
        scratch = (buffer.name for buffer in kernel.scratch(problem))
        self.tensors = (*TENSORS[kernel.op], *scratch)
        functions = kernel.functions(problem, config)
        self.loaded = tuple(Loaded.of(self.source, kernel, f, access, target) for f in functions)

    def scratch(self, problem: Problem) -> Buffers:
        """What is allocated for a call of ``problem``, behind the op's tensors."""
        buffers = self.kernel.scratch(problem)
        return [(buffer.shape, getattr(torch, buffer.dtype)) for buffer in buffers]

    def bind(self, call: Call) -> Bound:
        """Fill in everything but the addresses, of those functions whose results ``call`` wants.

        What comes back is called with the stream, the current one, and the addresses.
        """
        bound = [
            BoundFunction(loaded, call, self.tensors, self.target)
            for loaded in self.loaded
            if loaded.function.results & call.given
        ]
        return bound[0] if len(bound) == 1 else functools.partial(_launch_all, bound)


def _launch_all(bound: "Sequence[BoundFunction]", stream: int, addresses: Addresses) -> None:
    for launch in bound:
        launch(stream, addresses)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A compiled function on a device: its declaration, how it is launched and how its descriptors
    are encoded."""

    function: Function
    launch: Launch
    encode: Encoder

    @classmethod
    def of(
        cls, source: Source, kernel: Kernel, function: Function, access: Access, target: Target
    ) -> "Loaded":
        """Raises CompileError or OutOfResourcesError."""
        compiled = compile_function(source, kernel, function, access, target)
        try:
            launch = make_launch(compiled)
        except TritonError as error:
            name = binary_name(source, function)
            raise OutOfResourcesError(f"{name} on {target.name}: {error}") from error
        return cls(function=function, launch=launch, encode=make_encoder(compiled))


class BoundFunction:
    """Call it with addresses: the arguments that don't change are made once."""

    def __init__(self, loaded: Loaded, call: Call, tensors: Sequence[str], target: Target) -> None:
        self._launch = loaded.launch
        self._encoder = loaded.encode
        self._tensors = tensors
        self._programs = loaded.function.grid(call.problem, target)
        self._dtype = call.problem.dtype
        self._template: list[Any] = []
        # (slot, index into the addresses), and the same with a memo: address -> encoded arguments.
        self._pointers: list[tuple[int, int]] = []
        self._descriptors: list[tuple[slice, int, Callable[[int], list[Any]]]] = []
        self._counter: int | None = None
        for argument in loaded.function.bind(call):
            self._add(argument)
        self._template += loaded.function.constexprs.values()

    def __call__(self, stream: int, addresses: Addresses) -> None:
        """Launch on ``stream``, the current one."""
        arguments = self._template.copy()
        for slot, index in self._pointers:
            arguments[slot] = addresses[index]
        for slots, index, encoded in self._descriptors:
            arguments[slots] = encoded(addresses[index])
        if self._counter is not None:
            # Kept until the launch is enqueued; then the stream's order protects it.
            _held, arguments[self._counter] = counters.counter(stream)
        self._launch(self._programs, stream, arguments)

    def _add(self, argument: Argument) -> None:
        start = len(self._template)
        if isinstance(argument, Pointer):
            self._pointers.append((start, self._tensors.index(argument.tensor)))
            self._template.append(None)
        elif isinstance(argument, Descriptor):
            encode = functools.partial(self._encode, argument, len(self._descriptors))
            size = len(encode(_ANY_ADDRESS))
            memo = functools.lru_cache(maxsize=_MAX_ENCODED)(encode)
            slots = slice(start, start + size)
            self._descriptors.append((slots, self._tensors.index(argument.tensor), memo))
            self._template += [None] * size
        elif isinstance(argument, Counter):
            self._counter = start
            self._template.append(None)
        else:
            self._template.append(argument)

    def _encode(self, descriptor: Descriptor, index: int, address: int) -> list[Any]:
        host = TensorDescriptor(
            AddressOnly(address, getattr(torch, descriptor.dtype or self._dtype)),
            list(descriptor.shape),
            list(descriptor.strides),
            list(descriptor.block),
        )
        return self._encoder(index, host)
