"""AutoFlash beside its peers on one problem, interleaved in one process."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.api import attention
from autoflash.dtypes import FP8
from autoflash.errors import UnsupportedError
from autoflash.fp8 import dequantize, values_by_row
from autoflash.problem import Problem
from autoflash.runtime.inputs_fp8 import Operands
from autoflash.target import current_target
from autoflash.tuning.check import make_inputs
from autoflash.tuning.check_fp8 import make_operands
from autoflash.tuning.timing import Timer

Launch = Callable[[], object]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# By op, or for fp8; AutoFlash first.
PEERS = {
    "fwd": ("autoflash", "sdpa_fa2", "sdpa_cudnn", "flex", "fa3"),
    "bwd": ("autoflash", "autoflash_deterministic", "sdpa_fa2", "sdpa_cudnn", "flex"),
    # All but the first two on 16 bits.
    "fp8": (
        "autoflash",
        "fa3_fp8",
        "autoflash_16_bits",
        "sdpa_fa2",
        "sdpa_cudnn",
        "flex",
        "fa3",
    ),
}
_DEFAULT = {
    "fwd": ("autoflash", "sdpa_fa2", "sdpa_cudnn"),
    "bwd": ("autoflash", "autoflash_deterministic", "sdpa_fa2", "sdpa_cudnn"),
    "fp8": ("autoflash", "autoflash_16_bits", "sdpa_cudnn"),
}


def bench_problem(
    problem: Problem, names: Sequence[str] | None = None, *, rounds: int = 7
) -> dict[str, Any]:
    """Median ms of each implementation that runs here: {"gpu", "ms", "failed"}.

    Raises UnsupportedError without a GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("no GPU is visible to torch: there is nothing to time")
    inputs = inputs_of(problem)
    launches: dict[str, Launch] = {}
    failed: dict[str, str] = {}
    for name in _DEFAULT[kind_of(problem)] if names is None else names:
        try:
            launch = implementation(name, problem, *inputs)
            launch()
            torch.cuda.synchronize()
            launches[name] = launch
        except (RuntimeError, ImportError, ValueError, AttributeError) as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    timer = Timer()
    times = timer.interleave([timer.eager(launch) for launch in launches.values()], rounds)
    ms = {name: statistics.median(t) for name, t in zip(launches, times, strict=True)}
    return {"gpu": current_target().name, "ms": ms, "failed": failed}


def kind_of(problem: Problem) -> str:
    """Which of PEERS ``problem`` has: those of its op, or of fp8."""
    return "fp8" if problem.is_fp8 else problem.op


def inputs_of(
    problem: Problem, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor, Operands | None]:
    """q, k and v and, where ``problem`` is fp8, the operands of which they are what
    16 bits hold: what a peer without fp8 computes."""
    if not problem.is_fp8:
        return *make_inputs(problem, device), None
    given = make_operands(problem, device)
    v = values_by_row(given.v, given.v_layout, problem.seqlen_k)
    pairs = ((given.q, given.q_descale), (given.k, given.k_descale), (v, given.v_descale))
    q, k, v = (dequantize(x, scale, torch.float32).to(given.out_dtype) for x, scale in pairs)
    return q, k, v, given


def implementation(
    name: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor, given: Operands | None = None
) -> Launch:
    """A closure that computes ``problem`` by the implementation called ``name``.

    Inputs are bhsd, as ``inputs_of`` makes them; what a peer wants otherwise is converted before,
    not while timing. Of a backward, the forward has run before.
    """
    peers = PEERS[kind_of(problem)]
    if name not in peers:
        known = ", ".join(peers)
        raise ValueError(f"unknown implementation {name!r} of {problem.op}: known are {known}")
    if name == "fa3":
        return _fa3(problem, q, k, v)
    if name == "fa3_fp8":
        return _fa3_fp8(problem, given)
    if name == "autoflash" and given is not None:
        return _fp8(problem, given)
    attend = _attend(name, problem)
    if problem.op == "fwd":
        return lambda: attend(q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _fp8(problem: Problem, given: Operands) -> Launch:
    q, k, v, *_ = given
    options: dict[str, Any] = {**given.descales, "v_layout": given.v_layout}
    options |= {"causal": problem.causal, "out_dtype": given.out_dtype}
    return lambda: attention(q, k, v, **options)


def _attend(name: str, problem: Problem) -> Attend:
    if name in ("sdpa_fa2", "sdpa_cudnn"):
        return _sdpa(name, problem)
    if name == "flex":
        return _flex(problem)
    same = name == "autoflash_deterministic"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, causal=problem.causal, deterministic=same)
        assert isinstance(out, Tensor)
        return out

    return attend


def _sdpa(name: str, problem: Problem) -> Attend:
    fa2 = name == "sdpa_fa2"
    backend = SDPBackend.FLASH_ATTENTION if fa2 else SDPBackend.CUDNN_ATTENTION
    grouped = problem.group > 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=grouped
            )

    return attend


def _flex(problem: Problem) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if problem.causal:
        offset = problem.seqlen_k - problem.seqlen_q
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + offset, None, None, problem.seqlen_q, problem.seqlen_k,
            device="cuda",
        )  # fmt: skip
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=problem.group > 1)


def _fa3_fp8(problem: Problem, given: Operands | None) -> Launch:
    """FlashAttention-3's own fp8: v by rows, a descale for each batch and key/value head."""
    assert given is not None
    if problem.dtype != FP8 or problem.scales == "block":
        raise ValueError("FlashAttention-3 takes q, k and v in fp8, with scales per tensor or head")
    v = values_by_row(given.v, given.v_layout, problem.seqlen_k)
    heads = (problem.batch, problem.kv_heads)
    descales = {
        name: None if x is None else x.expand(heads).contiguous()
        for name, x in given.descales.items()
    }
    return _fa3(problem, given.q, given.k, v, **descales)


def _fa3(problem: Problem, q: Tensor, k: Tensor, v: Tensor, **descales: Tensor | None) -> Launch:
    import fa3_fwd_interface  # type: ignore[import-not-found]

    qt, kt, vt = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    scale = problem.head_dim**-0.5
    return lambda: fa3_fwd_interface._flash_attn_forward(
        qt, kt, vt, causal=problem.causal, softmax_scale=scale, **descales
    )
