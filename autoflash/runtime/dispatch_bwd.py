"""Gradients from tensors to launches: dispatch.py's path for the backward.

A call is one dictionary look-up, the allocations, and a C call for each function that is wanted.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoflash.kernels.kernel import Access, Call
from autoflash.runtime.dispatch import launch, launcher_for, lock, plans_of_an_op, remember
from autoflash.runtime.inputs import (
    access_of,
    all_strides,
    check_gradients,
    check_tensors,
    has_contiguous_rows,
    output_like,
    problem_of,
)
from autoflash.runtime.missed import counted
from autoflash.target import current_target

if TYPE_CHECKING:
    from autoflash.runtime.launcher import Buffers

_plans: dict[tuple[Any, ...], "GradientPlan"] = plans_of_an_op()
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(slots=True)
class GradientPlan:
    """What a call with a known key needs: what to allocate (shape, strides) and what to launch.

    ``run`` is None when there is nothing to compute (every gradient is zero).
    """

    run: Any
    device: int
    dq: tuple[tuple[int, ...], tuple[int, ...]]
    dk: tuple[tuple[int, ...], tuple[int, ...]]
    dv: tuple[tuple[int, ...], tuple[int, ...]]
    scratch: "Buffers"


def attention_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, causal: bool, bshd: bool, repeatable: bool, need_dq: bool, need_dkv: bool,
) -> Gradients:  # fmt: skip
    """dq (if need_dq), dk and dv (if need_dkv) on the tensors' GPU and its current stream.

    They are the same bit for bit each time if ``repeatable``, or torch is asked for deterministic
    algorithms.

    Raises UnsupportedError where no kernel serves.
    """
    repeatable |= torch.are_deterministic_algorithms_enabled()
    qp, kp, vp, op, dp = (x.data_ptr() for x in (q, k, v, out, dout))
    lp, ep = lse.data_ptr(), 0 if dlse is None else dlse.data_ptr()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), dout.stride(),
        q.dtype, k.dtype, v.dtype, out.dtype, dout.dtype, out.shape, dout.shape,
        q.get_device(), k.get_device(), v.get_device(), out.get_device(), dout.get_device(),
        _flat(lse), None if dlse is None else _flat(dlse), (qp | kp | vp | op | dp | lp | ep) & 15,
        scale, causal, bshd, repeatable, need_dq, need_dkv,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        check_tensors(q, k, v, bshd)
        check_gradients(dout, dlse, q, v, out, lse, bshd)
        given = [x for x in (dout, q, k, v, out, lse, dlse) if x is not None]
        fit = [_fit(x) for x in given]
        if any(x is not y for x, y in zip(fit, given, strict=True)):
            # The copies' key is another; they are made again at each call.
            dout, q, k, v, out, lse = fit[:6]
            dlse = None if dlse is None else fit[6]
            return attention_bwd(
                dout, dlse, q, k, v, out, lse, scale, causal, bshd, repeatable, need_dq, need_dkv
            )
        with lock:
            plan = _plans.get(key) or _plan(
                key,
                dout,
                dlse,
                q,
                k,
                v,
                out,
                lse,
                scale,
                causal,
                bshd,
                repeatable,
                need_dq,
                need_dkv,
            )
    dtype, device = q.dtype, q.device
    dq = torch.empty_strided(*plan.dq, dtype=dtype, device=device) if need_dq else None
    dk = torch.empty_strided(*plan.dk, dtype=dtype, device=device) if need_dkv else None
    dv = torch.empty_strided(*plan.dv, dtype=dtype, device=device) if need_dkv else None
    if plan.run is None:
        return _zeroed(dq), _zeroed(dk), _zeroed(dv)
    # Held until the launches are enqueued; then the stream's order protects them.
    scratch = [torch.empty(shape, dtype=kind, device=device) for shape, kind in plan.scratch]
    addresses = (
        qp, kp, vp, op, lp, dp, ep, *(0 if x is None else x.data_ptr() for x in (dq, dk, dv)),
        *(x.data_ptr() for x in scratch),
    )  # fmt: skip
    launch(plan.run, plan.device, addresses)
    return dq, dk, dv


def _flat(x: Tensor) -> tuple[Any, ...]:
    """The part of a key that says how an LSE lies."""
    return (x.shape, x.stride(), x.dtype, x.get_device())


def _fit(x: Tensor) -> Tensor:
    """``x`` as the kernels read it: itself if it is. An LSE and its gradient are dense fp32, the
    others have contiguous rows."""
    if x.dim() == 3:
        return x.to(torch.float32).contiguous()
    return x if has_contiguous_rows(x) else x.contiguous()


def _zeroed(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.zero_()


def _plan(
    key: tuple[Any, ...], dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, scale: float, causal: bool, bshd: bool, repeatable: bool,
    need_dq: bool, need_dkv: bool,
) -> GradientPlan:  # fmt: skip
    problem = problem_of(q, k, v, causal=causal, bshd=bshd, op="bwd")
    # Strides alone are asked of them: allocating them here could double a large call's memory.
    dq, dk, dv = (output_like(x, x, device="meta") for x in (q, k, v))
    run, scratch, lasting = None, [], True
    wanted = ({"dq": dq} if need_dq else {}) | ({"dk": dk, "dv": dv} if need_dkv else {})
    empty = 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k)
    if wanted and not empty:
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
        access = access_of((*tensors.values(), dq, dk, dv), bshd)
        flat = [lse] if dlse is None else [lse, dlse]
        if any(x.data_ptr() % 16 for x in flat):
            access = Access(aligned=False, tma=False)
        access = dataclasses.replace(access, whole=need_dq and need_dkv, repeatable=repeatable)
        with torch.cuda.device(q.device):
            target = current_target(q.device)
            launcher, choice = launcher_for(problem, target, access, q.device.index)
            given = {"lse", *tensors, *wanted} | (set() if dlse is None else {"dlse"})
            strides = all_strides(bshd, **tensors, **wanted)
            call = Call(problem=problem, scale=scale, strides=strides, given=frozenset(given))
            run = counted(launcher.bind(call), choice, problem, target)
            lasting = not choice.passing
        scratch = launcher.scratch(problem)
    plan = GradientPlan(
        run=run,
        device=q.device.index,
        dq=(tuple(dq.shape), dq.stride()),
        dk=(tuple(dk.shape), dk.stride()),
        dv=(tuple(dv.shape), dv.stride()),
        scratch=scratch,
    )
    return remember(_plans, key, plan) if lasting else plan
