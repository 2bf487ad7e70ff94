"""One function of a kernel on the Gluon machine, with the arguments that its declaration binds."""

from collections.abc import Callable

import torch
from torch import Tensor

from autoflash.codegen.render import render
from autoflash.kernels.kernel import Argument, Call, Counter, Descriptor, Kernel, Pointer
from autoflash.problem import Problem
from autoflash.runtime.inputs import strides_of
from autoflash.runtime.scales import scale_strides
from autoflash.space import Config
from autoflash.target import Target
from tests.kernels.machine import gluon_machine
from tests.kernels.machine.gluon_machine import Desc, Machine, device_code


def run_function(
    kernel: Kernel, name: str, problem: Problem, config: Config, tensors: dict[str, Tensor],
    target: Target, machine: Machine, change: Callable[[str], str] = str,
) -> None:  # fmt: skip
    """Runs the function ``name`` of the rendered file, its text changed by ``change``, on
    ``tensors``: those of the op and scratch, by the names of the declaration."""
    (function,) = (f for f in kernel.functions(problem, config) if f.name == name)
    strides: dict[str, tuple[int, ...]] = {
        n: strides_of(x, False) for n, x in tensors.items() if x.dim() == 4
    }
    for n, x in tensors.items():
        if n.endswith("_descale"):
            strides[n] = scale_strides(x, problem.kv_heads)
    call = Call(
        problem=problem, scale=problem.head_dim**-0.5, strides=strides, given=frozenset(tensors)
    )
    counters: list[Tensor] = []

    def value(argument: Argument) -> object:
        if isinstance(argument, Pointer):
            # A descale that isn't given has no address.
            memory = tensors.get(argument.tensor, torch.empty(0))
            return gluon_machine.Pointer(whole(memory))
        if isinstance(argument, Counter):
            counters.append(torch.zeros(2, dtype=torch.int32))
            return gluon_machine.Pointer(counters[-1])
        if isinstance(argument, Descriptor):
            x = tensors[argument.tensor]
            return Desc(x.as_strided(argument.shape, argument.strides), argument.block)
        return argument

    arguments = [value(argument) for argument in function.bind(call)]
    code = device_code(change(render(kernel, problem, config).text), machine)[name]
    programs = function.grid(problem, target)
    machine.run(code, [*arguments, *function.constexprs.values()], programs)
    # A counter is zero again for the next launch.
    assert not any(bool(counter.any()) for counter in counters)


def whole(x: Tensor) -> Tensor:
    """All memory from where ``x`` starts, in a row."""
    base = x if x._base is None else x._base
    return base.as_strided((base.numel() - x.storage_offset(),), (1,), x.storage_offset())


def stray_writes(x: Tensor) -> int:
    """How many elements around a view that surrounded() gave are no longer NaN."""
    base = x._base
    assert base is not None
    return int((~base.isnan()).sum() - (~x.isnan()).sum())
