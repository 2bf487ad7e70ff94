"""One module per template, same stem; the table of them all."""

import importlib
from collections.abc import Iterable

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.kernels.flash_bwd import FlashBwd
from autoflash.kernels.flash_bwd_split import FlashBwdSplit
from autoflash.kernels.flash_bwd_ws import FlashBwdWs
from autoflash.kernels.flash_fwd import FlashFwd
from autoflash.kernels.flash_fwd_fp8 import FlashFwdFp8
from autoflash.kernels.flash_fwd_fp8_ws import FlashFwdFp8Ws
from autoflash.kernels.flash_fwd_ws import FlashFwdWs
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.settings import kernels_module
from autoflash.target import Target

_OWN: tuple[Kernel, ...] = (
    FlashFwd(),
    FlashFwdWs(),
    FlashFwdFp8(),
    FlashFwdFp8Ws(),
    FlashBwd(),
    FlashBwdWs(),
    FlashBwdSplit(),
)


def kernels_to_test_with() -> Iterable[Kernel]:
    """The ``KERNELS`` of the module that AUTOFLASH_TEST_KERNELS names; none by default.

    A study's workers inherit the variable: what a test plants here, they find too. Raises
    InvalidInputError for a module that isn't there or declares none.
    """
    name = kernels_module()
    if not name:
        return ()
    try:
        return tuple(importlib.import_module(name).KERNELS)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"AUTOFLASH_TEST_KERNELS={name!r}: must be a module with KERNELS ({error}); "
            "unset it but for tests of the tuner"
        ) from error


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*_OWN, *kernels_to_test_with())}


def kernels_for(problem: Problem, target: Target) -> list[Kernel]:
    """The kernels that can compute ``problem`` on ``target``; UnsupportedError if none can."""
    reasons = []
    found = []
    for kernel in KERNELS.values():
        if (kernel.op, kernel.fp8) != (problem.op, problem.is_fp8):
            continue
        reason = kernel.serves(problem, target)
        if reason is None:
            found.append(kernel)
        else:
            reasons.append(f"{kernel.name}: {reason}")
    if not found:
        raise UnsupportedError(
            f"no kernel serves {problem.label()} on {target.name}: {'; '.join(reasons)}"
        )
    return found
