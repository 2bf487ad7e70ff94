"""Runs planted kernels in Triton's interpreter, on what the tuner checks candidates with.

Usage: TRITON_INTERPRET=1 python -m tests.planted.interpret NAME... prints, as JSON, what the
accuracy rule has against each kernel on each case (null: nothing), then how many elements of a
further launch were written.
"""

import json
import math
import sys

import torch

from autoflash.codegen.render import render
from autoflash.codegen.source_cache import load_device
from autoflash.kernels.flash_fwd import FlashFwd
from autoflash.kernels.kernel import Call, Pointer
from autoflash.problem import Problem
from autoflash.runtime.inputs import all_strides
from autoflash.target import named_target
from autoflash.tuning.check import check_cases, compare
from tests.planted import KERNELS, PROBLEM, Planted

H200 = named_target("h200")


def launch(
    kernel: Planted, problem: Problem, tensors: dict[str, torch.Tensor], launches: torch.Tensor
) -> None:
    """What BoundFunction does with addresses, with tensors."""
    config = kernel.default(problem, H200)
    strides = all_strides(False, **{name: tensors[name] for name in ("q", "k", "v", "out")})
    scale = problem.head_dim**-0.5
    call = Call(problem=problem, scale=scale, strides=strides, given=frozenset(tensors))
    arguments = [
        tensors[argument.tensor] if isinstance(argument, Pointer) else argument
        for argument in FlashFwd.bind(kernel, call, config)
    ]
    function = getattr(load_device(render(kernel, problem, config)), kernel.name)
    grid = (kernel.grid(problem, config, H200),)
    function[grid](*arguments, launches, **kernel.constexprs(problem, config))


def poisoned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """All tensors of a call; the outputs are full of NaN."""
    lse = torch.full(q.shape[:3], math.nan)
    return {"q": q, "k": k, "v": v, "out": torch.full_like(q, math.nan), "lse": lse}


def main() -> None:
    torch.set_num_threads(1)
    cases = check_cases(PROBLEM, "cpu")
    kernels = {kernel.name: kernel for kernel in KERNELS}
    for name in sys.argv[1:]:
        launches = torch.zeros(1, dtype=torch.int32)
        reasons = []
        for case in cases:
            tensors = poisoned(case.q, case.k, case.v)
            launch(kernels[name], case.problem, tensors, launches)
            reasons.append(compare(case, tensors["out"], tensors["lse"]))
        counted = int(launches)
        launches.fill_(10)
        last = poisoned(cases[0].q, cases[0].k, cases[0].v)
        launch(kernels[name], cases[0].problem, last, launches)
        written = int((~last["out"].isnan()).sum())
        found = {"name": name, "reasons": reasons, "launches": counted, "written": written}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
