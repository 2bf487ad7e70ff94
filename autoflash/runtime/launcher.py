"""Launcher: a compiled kernel on one device; BoundLauncher: with a call's sizes filled in."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from autoflash.codegen.render import Source, render
from autoflash.errors import OutOfResourcesError
from autoflash.kernels.kernel import (
    Access,
    Argument,
    Call,
    Counter,
    Descriptor,
    Kernel,
    Pointer,
)
from autoflash.problem import Problem
from autoflash.runtime import counters
from autoflash.runtime.compiler import compile_source
from autoflash.runtime.triton_launch import AddressOnly, make_encoder, make_launch
from autoflash.space import Config
from autoflash.target import Target

# Encoded descriptors that one BoundLauncher keeps per tensor; a training loop's allocator hands out
# the same few addresses again and again.
_MAX_ENCODED = 256
_ANY_ADDRESS = 1 << 20

TENSORS = ("q", "k", "v", "out", "lse")
Addresses = tuple[int, int, int, int, int]


class Launcher:
    """A loaded Source, compiled for one config and loaded on the current device.

    Raises CompileError, or OutOfResourcesError when the device can't hold it.
    """

    def __init__(
        self, kernel: Kernel, problem: Problem, config: Config, access: Access, target: Target
    ) -> None:
        self.kernel = kernel
        self.config = config
        self.target = target
        self.source: Source = render(kernel, problem, config)
        self.compiled = compile_source(self.source, kernel, problem, config, access, target)
        try:
            self.launch = make_launch(self.compiled)
        except TritonError as error:
            raise OutOfResourcesError(f"{self.source.name} on {target.name}: {error}") from error
        self.encode = make_encoder(self.compiled)
        self.constexprs = tuple(kernel.constexprs(problem, config).values())

    def bind(self, call: Call) -> "BoundLauncher":
        """Fill in everything but the addresses."""
        return BoundLauncher(self, call)


class BoundLauncher:
    """Call it with addresses: the arguments that don't change are made once."""

    def __init__(self, launcher: Launcher, call: Call) -> None:
        self.launcher = launcher
        self._launch = launcher.launch
        self._programs = launcher.kernel.grid(call.problem, launcher.config, launcher.target)
        self._dtype = getattr(torch, call.problem.dtype)
        self._template: list[Any] = []
        # (slot, index into the addresses), and the same with a memo: address -> encoded arguments.
        self._pointers: list[tuple[int, int]] = []
        self._descriptors: list[tuple[slice, int, Callable[[int], list[Any]]]] = []
        self._counter: int | None = None
        for argument in launcher.kernel.bind(call, launcher.config):
            self._add(argument)
        self._template += launcher.constexprs

    def __call__(self, stream: int, addresses: Addresses) -> None:
        """Launch on ``stream``, the current one, with the addresses of q, k, v, out and LSE; the
        LSE's may be 0."""
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
            self._pointers.append((start, TENSORS.index(argument.tensor)))
            self._template.append(None)
        elif isinstance(argument, Descriptor):
            encode = functools.partial(self._encode, argument, len(self._descriptors))
            size = len(encode(_ANY_ADDRESS))
            memo = functools.lru_cache(maxsize=_MAX_ENCODED)(encode)
            slots = slice(start, start + size)
            self._descriptors.append((slots, TENSORS.index(argument.tensor), memo))
            self._template += [None] * size
        elif isinstance(argument, Counter):
            self._counter = start
            self._template.append(None)
        else:
            self._template.append(argument)

    def _encode(self, descriptor: Descriptor, index: int, address: int) -> list[Any]:
        host = TensorDescriptor(
            AddressOnly(address, self._dtype),
            list(descriptor.shape),
            list(descriptor.strides),
            list(descriptor.block),
        )
        return self.launcher.encode(index, host)
