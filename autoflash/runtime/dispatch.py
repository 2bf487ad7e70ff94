"""From tensors to a launch. The hot path is one dictionary look-up and one C call; everything else
happens once per key, in ``_plan``.

The key holds all that a kernel may assume: device, dtypes, shapes, strides, 16-byte alignment,
scale and flags. A variant chosen for aligned rows is never reused for a view.
"""

import logging
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from autoflash.errors import AutoFlashError, CompileError
from autoflash.kernels.kernel import Access, Call
from autoflash.problem import FP8_FIELDS, Problem
from autoflash.runtime.choose import Choice, choose, default_choices, tune_command
from autoflash.runtime.inputs import (
    access_of,
    all_strides,
    check_tensors,
    has_contiguous_rows,
    lse_shape,
    output_like,
    problem_of,
)
from autoflash.runtime.missed import counted
from autoflash.settings import settings
from autoflash.target import Target, current_target

if TYPE_CHECKING:
    from autoflash.runtime.launcher import Addresses, Bound, Buffers, Launcher

logger = logging.getLogger(__name__)

# Plans are small, but a server with free-form lengths would make them without end.
_MAX_PLANS = 16384

T = TypeVar("T")

_plans: dict[tuple[Any, ...], "Plan"] = {}
# Of every op: what forget() empties.
_all_plans: list[dict[tuple[Any, ...], Any]] = [_plans]
_launchers: dict[tuple[Any, ...], "Launcher"] = {}
_logged: set[tuple[Any, ...]] = set()
# One thread at a time: first misses import modules and compile.
lock = threading.RLock()


@dataclass(slots=True)
class Plan:
    """What a call with a known key needs: where to allocate and what to launch.

    ``run`` launches the kernel, or is None when there is nothing to compute (out = 0, LSE = -inf).
    """

    run: Any
    device: int
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    like_q: bool
    lse_shape: tuple[int, ...]
    scratch: "Buffers" = field(default_factory=list)


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bshd: bool, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out, and the LSE if it is wanted, on the tensors' GPU and its current stream."""
    qp, kp, vp = q.data_ptr(), k.data_ptr(), v.data_ptr()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), (qp | kp | vp) & 15,
        scale, causal, bshd, return_lse,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        check_tensors(q, k, v, bshd)
        if not all(map(has_contiguous_rows, (q, k, v))):
            # Rows must be contiguous; the last dimension's stride is in the key.
            q, k, v = (x if has_contiguous_rows(x) else x.contiguous() for x in (q, k, v))
            return attention_fwd(q, k, v, scale, causal, bshd, return_lse)
        with lock:
            plan = _plans.get(key) or _plan(key, q, k, v, scale, causal, bshd, return_lse)
    if plan.like_q:
        out = torch.empty_like(q)
    else:
        out = torch.empty_strided(plan.out_shape, plan.out_strides, dtype=q.dtype, device=q.device)
    lse = q.new_empty(plan.lse_shape, dtype=torch.float32) if return_lse else None
    if plan.run is None:
        return out.zero_(), lse if lse is None else lse.fill_(-math.inf)
    addresses = (qp, kp, vp, out.data_ptr(), 0 if lse is None else lse.data_ptr())
    launch(plan.run, plan.device, addresses)
    return out, lse


def launch(run: "Bound", device: int, addresses: "Addresses") -> None:
    """Launch ``run`` on ``device`` and the stream that is current there."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    if torch._C._cuda_getDevice() == device:
        run(stream, addresses)
    else:
        with torch.cuda.device(device):
            run(stream, addresses)


def forget() -> None:
    """Drop every plan, so that the next call looks the records up again (after a tune)."""
    with lock:
        for plans in _all_plans:
            plans.clear()
        _logged.clear()


def remember(plans: dict[tuple[Any, ...], T], key: tuple[Any, ...], plan: T) -> T:
    """Keep ``plan``; a table that is full starts anew."""
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def _plan(
    key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bshd: bool,
    return_lse: bool,
) -> Plan:  # fmt: skip
    problem = problem_of(q, k, v, causal=causal, bshd=bshd)
    lasting = True
    # Strides alone are asked of it: allocating it here could double a large call's memory.
    out = output_like(q, v, device="meta")
    run = None
    with torch.cuda.device(q.device):
        if problem.batch and problem.seqlen_q and problem.seqlen_k:
            target = current_target(q.device)
            launcher, choice = launcher_for(
                problem, target, access_of((q, k, v, out), bshd), q.device.index
            )
            strides = all_strides(bshd, q=q, k=k, v=v, out=out)
            given = frozenset(strides) | ({"lse"} if return_lse else frozenset())
            call = Call(problem=problem, scale=scale, strides=strides, given=given)
            run = counted(launcher.bind(call), choice, problem, target)
            lasting = not choice.passing
    plan = Plan(
        run=run,
        device=q.device.index,
        out_shape=tuple(out.shape),
        out_strides=tuple(out.stride()),
        like_q=torch.empty_like(q, device="meta").stride() == out.stride() and out.shape == q.shape,
        lse_shape=lse_shape(q, bshd),
    )
    return remember(_plans, key, plan) if lasting else plan


def plans_of_an_op() -> dict[tuple[Any, ...], Any]:
    """A new table of plans, which ``forget`` empties too."""
    _all_plans.append({})
    return _all_plans[-1]


def launcher_for(
    problem: Problem, target: Target, access: Access, device: int
) -> "tuple[Launcher, Choice]":
    """The best launcher that builds, and the choice that it is of; raises like ``choose``, and
    CompileError if none does."""
    choice = choose(problem, target, access)
    _log_once(choice, problem, target)
    try:
        return _launcher(choice, problem, target, access, device), choice
    except _NotLoadedError:
        return _loaded(problem, target, access, device)
    except CompileError as error:
        if settings().mode == "lock":
            raise
        # A config that doesn't build (a record of another Triton, say) must not stop a model.
        logger.warning("%s does not build, trying the defaults: %s", choice.config, error)
        failure = error
    why = f"the first choice does not build: {failure}"
    for default in default_choices(problem, target, access, why, first=choice.kernel):
        try:
            return _launcher(default, problem, target, access, device), default
        except CompileError as error:
            failure = error
    raise failure


def _launcher(
    choice: Choice, problem: Problem, target: Target, access: Access, device: int
) -> "Launcher":
    from autoflash.runtime.launcher import Launcher

    key = (choice.kernel.name, choice.config, *_shared(problem, access, device))
    launcher = _launchers.get(key)
    if launcher is None:
        if torch.cuda.is_current_stream_capturing():
            raise _NotLoadedError
        launcher = Launcher(choice.kernel, problem, choice.config, access, target)
        _launchers[key] = launcher
    return launcher


class _NotLoadedError(Exception):
    """A CUDA graph is captured, during which nothing can be loaded."""


def _shared(problem: Problem, access: Access, device: int) -> tuple[Any, ...]:
    """What problems must have in common to be run by one launcher."""
    static = (problem.dtype, problem.head_dim, problem.head_dim_v, problem.causal)
    fp8 = tuple(getattr(problem, name) for name in FP8_FIELDS)
    return (*static, *fp8), access.aligned, device


def _loaded(
    problem: Problem, target: Target, access: Access, device: int
) -> "tuple[Launcher, Choice]":
    """The fastest by the written model of what other problems have loaded, for this call alone."""
    able: list[tuple[float, int, Launcher]] = []
    for (_, config, *shared), launcher in _launchers.items():
        kernel = launcher.kernel
        if tuple(shared) != _shared(problem, access, device) or kernel.op != problem.op:
            continue
        fits = (
            settings().mode != "lock"
            and kernel.serves(problem, target) is None
            and kernel.space.why_not(config, problem, target, advice=False) is None
            and kernel.adapt(config, access) == config
        )
        if fits:
            blocks = kernel.estimate_blocks_per_sm(problem, config, target)
            able.append((kernel.estimate_ms(problem, config, target, blocks), len(able), launcher))
    if not able:
        raise AutoFlashError(
            f"{problem.label()} was never run before this CUDA graph capture, and its "
            "kernel can't be loaded while capturing: call it once before the capture"
        )
    *_, launcher = min(able, key=lambda item: item[:2])
    why = "loaded already, while a CUDA graph is captured; call the problem once before the capture"
    logger.warning("%s: %s is %s", problem.label(), launcher.kernel.name, why)
    passing = Choice(
        kernel=launcher.kernel,
        config=launcher.config,
        how="default",
        layer="kernel",
        why=why,
        passing=True,
    )
    return launcher, passing


def _log_once(choice: Choice, problem: Problem, target: Target) -> None:
    key = (choice.kernel.name, choice.config, choice.how, problem.dtype, problem.head_dim)
    if key in _logged:
        return
    _logged.add(key)
    hint = f"; to tune it: {tune_command(problem)}" if choice.tunable else ""
    logger.info(
        "%s on %s: %s, %s (%s)%s",
        problem.label(), target.name, choice.kernel.name, choice.how, choice.why, hint,
    )  # fmt: skip
