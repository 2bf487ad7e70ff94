"""One module per template, same stem; the table of them all."""

from autoflash.errors import UnsupportedError
from autoflash.kernels.flash_bwd import FlashBwd
from autoflash.kernels.flash_bwd_split import FlashBwdSplit
from autoflash.kernels.flash_bwd_ws import FlashBwdWs
from autoflash.kernels.flash_fwd import FlashFwd
from autoflash.kernels.flash_fwd_ws import FlashFwdWs
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.target import Target

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (FlashFwd(), FlashFwdWs(), FlashBwd(), FlashBwdWs(), FlashBwdSplit())
}


def kernels_for(problem: Problem, target: Target) -> list[Kernel]:
    """The kernels that can compute ``problem`` on ``target``; UnsupportedError if none can."""
    reasons = []
    found = []
    for kernel in KERNELS.values():
        if kernel.op != problem.op:
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
