"""The written model of flash_fwd_fp8's time: flash_fwd's with fp8's sizes and rates.

Nothing of it has been fitted to measurements of this kernel: it orders candidates, no more.
"""

from autoflash.dtypes import FP8
from autoflash.kernels import flash_fwd_model
from autoflash.kernels.flash_fwd_fp8_space import accumulator_registers, shared_bytes
from autoflash.kernels.flash_fwd_model import blocks_that_fit
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

# Operations per score beside flash_fwd's: the rounding of P to e4m3, two at a time.
_CAST = 0.5
# Operations per 16-bit operand that is made of an fp8 one, and per fp8 one that must be transposed.
_CONVERT, _TRANSPOSE = 1.0, 2.0


def estimate_blocks_per_sm(problem: Problem, config: Config, target: Target) -> int:
    """Resident programs per SM, guessed before compiling."""
    registers = accumulator_registers(config, problem, target)
    return blocks_that_fit(config, target, registers, shared_bytes(config, problem, target))


def estimate_ms(problem: Problem, config: Config, target: Target, blocks_per_sm: int) -> float:
    """Milliseconds of ``config`` with ``blocks_per_sm`` programs resident on an SM."""
    rows, keys = config.integer("BLOCK_M"), config.integer("BLOCK_N")
    dim, dim_v = problem.head_dim, problem.head_dim_v
    if problem.dtype == FP8:
        more = _CAST * rows * keys
        # The matrix unit takes both operands with the dimension that it sums over as the inner one.
        more += _TRANSPOSE * keys * dim_v if problem.v_layout == "rows" else 0.0
    else:
        more = _CONVERT * keys * (dim + dim_v)
    # As flash_fwd's configs say it: by pointer, the diagonal first.
    plain = Config(**config, LOAD="pointer", DIAGONAL_FIRST=problem.causal)
    return flash_fwd_model.estimate_ms(problem, plain, target, blocks_per_sm, more)
