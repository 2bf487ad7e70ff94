"""fp8 attention from tensors to a launch: dispatch.py's path with descales."""

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

from autoflash.kernels.kernel import Call
from autoflash.runtime.dispatch import (
    Plan,
    launch,
    launcher_for,
    lock,
    plans_of_an_op,
    remember,
)
from autoflash.runtime.inputs import (
    access_of,
    all_strides,
    has_contiguous_rows,
    lse_shape,
    output_like,
)
from autoflash.runtime.inputs_fp8 import (
    Operands,
    check_operands,
    problem_of_fp8,
    v_as_called,
    v_rows,
)
from autoflash.runtime.missed import counted
from autoflash.runtime.scales import scale_strides
from autoflash.target import current_target

logger = logging.getLogger(__name__)

_plans: dict[tuple[Any, ...], Plan] = plans_of_an_op()


def attention_fwd_fp8(
    given: Operands, scale: float, causal: bool, bshd: bool, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out, and the LSE if it is wanted, on the tensors' GPU and its current stream.

    Raises UnsupportedError where no kernel serves.
    """
    q, k, v, *descales, out_dtype, v_layout = given
    qp, kp, vp = q.data_ptr(), k.data_ptr(), v.data_ptr()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), (qp | kp | vp) & 15,
        *map(_scale_key, descales), scale, causal, bshd, return_lse, out_dtype, v_layout,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        check_operands(given, bshd)
        if not all(map(has_contiguous_rows, (q, k, v))):
            q, k, v = (x if has_contiguous_rows(x) else x.contiguous() for x in (q, k, v))
            given = given._replace(q=q, k=k, v=v)
            return attention_fwd_fp8(given, scale, causal, bshd, return_lse)
        with lock:
            plan = _plans.get(key) or _plan(key, given, scale, causal, bshd, return_lse)
    out = torch.empty_strided(plan.out_shape, plan.out_strides, dtype=out_dtype, device=q.device)
    lse = q.new_empty(plan.lse_shape, dtype=torch.float32) if return_lse else None
    if plan.run is None:
        return out.zero_(), lse if lse is None else lse.fill_(-math.inf)
    outputs = (out.data_ptr(), 0 if lse is None else lse.data_ptr())
    scales = (0 if x is None else x.data_ptr() for x in descales)
    # Held until the launches are enqueued; then the stream's order protects them.
    scratch = [torch.empty(shape, dtype=kind, device=q.device) for shape, kind in plan.scratch]
    addresses = (qp, kp, vp, *outputs, *scales, *(x.data_ptr() for x in scratch))
    launch(plan.run, plan.device, addresses)
    return out, lse


@functools.lru_cache(maxsize=256)
def tell_once(reason: str) -> None:
    """Warn that torch stands in for a kernel, once for each ``reason``."""
    logger.warning("fp8 attention by torch, in fp32 and slowly: %s", reason)


def _scale_key(scale: Tensor | None) -> tuple[Any, ...] | None:
    if scale is None:
        return None
    return (scale.shape, scale.stride(), scale.dtype, scale.get_device())


def _plan(
    key: tuple[Any, ...], given: Operands, scale: float, causal: bool, bshd: bool, return_lse: bool
) -> Plan:
    q, k = given.q, given.k
    problem = problem_of_fp8(given, causal=causal, bshd=bshd)
    lasting = True
    out = output_like(q, v_rows(given, bshd), device="meta", dtype=given.out_dtype)
    run, scratch = None, []
    if problem.batch and problem.seqlen_q and problem.seqlen_k:
        v = v_as_called(given, bshd)
        with torch.cuda.device(q.device):
            target = current_target(q.device)
            access = access_of((q, k, v, out), bshd)
            launcher, choice = launcher_for(problem, target, access, q.device.index)
            strides: dict[str, tuple[int, ...]] = {**all_strides(bshd, q=q, k=k, v=v, out=out)}
            scales = {name: x for name, x in given.descales.items() if x is not None}
            strides |= {n: scale_strides(x, problem.kv_heads) for n, x in scales.items()}
            names = {*strides, "lse"} if return_lse else set(strides)
            call = Call(problem=problem, scale=scale, strides=strides, given=frozenset(names))
            run = counted(launcher.bind(call), choice, problem, target)
            scratch = launcher.scratch(problem)
            lasting = not choice.passing
    plan = Plan(
        run=run,
        device=q.device.index,
        out_shape=tuple(out.shape),
        out_strides=tuple(out.stride()),
        like_q=False,
        lse_shape=lse_shape(q, bshd),
        scratch=scratch,
    )
    return remember(_plans, key, plan) if lasting else plan
