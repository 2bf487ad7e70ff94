"""Serving by a lock file on a GPU: the same bits whatever the store says, and errors before any
launch."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED
from autoflash.locking import freeze, lock_text
from autoflash.problem import Problem
from autoflash.runtime import dispatch, locked
from autoflash.runtime.choose import choose
from autoflash.settings import settings
from autoflash.store.layers import Layers
from autoflash.store.record import Measurement, Provenance, TuningRecord
from autoflash.store.store import Store
from autoflash.store.untrusted import write_text
from autoflash.target import current_target
from tests.gpu.support import tensors

SHAPE = (2, 4, 1000, 64)
PROBLEM = Problem.parse(
    {"batch": 2, "heads": 4, "seqlen": 1000, "head_dim": 64, "dtype": "fp16", "causal": True}
)
BOTH = [PROBLEM, dataclasses.replace(PROBLEM, op="bwd")]


@pytest.fixture
def serve_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Locks what serves problems now, and serves from that."""
    path = tmp_path / "autoflash.lock"

    def serve(*problems: Problem) -> Path:
        entries = freeze(problems, current_target(), Layers().lookup, "missing").entries
        write_text(path, lock_text(entries)[0])
        monkeypatch.setenv("AUTOFLASH_LOCK", str(path))
        locked._read.cache_clear()
        dispatch.forget()
        return path

    yield serve
    monkeypatch.undo()
    dispatch.forget()


def run(inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = autoflash.attention(*leaves, causal=True, deterministic=True)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def store_others() -> None:
    """Records that would change what serves: of each kernel a config other than its default."""
    target = current_target()
    found = []
    for problem in BOTH:
        served = choose(problem, target, ALIGNED).config
        for kernel in KERNELS.values():
            of_its_kind = kernel.op == problem.op and not kernel.fp8
            if not of_its_kind or kernel.serves(problem, target) is not None:
                continue
            configs = kernel.space.configs(problem, target)
            config = next(c for c in configs if c not in (served, kernel.default(problem, target)))
            time = {"median_ms": 0.001, "p20_ms": 0.001, "p80_ms": 0.001}
            found.append(
                TuningRecord(
                    problem=problem,
                    target=target,
                    kernel=kernel.name,
                    config=config,
                    measurement=Measurement(**time, repeats=9, method="events", noisy=False),
                    provenance=Provenance(created_at="2025-03-01T12:30:00+00:00"),
                    kind="measured",
                )
            )
    Store(settings().db_path).add_records(found)


def test_the_same_bits_whatever_the_store_says(serve_locked: Callable[..., Path]) -> None:
    inputs = tensors(*[SHAPE] * 3, dtype=torch.float16)
    before = run(inputs)
    path = serve_locked(*BOTH)
    store_others()
    for op in ("fwd", "bwd"):
        told = autoflash.explain(*inputs, causal=True, op=op, deterministic=True)
        assert (told.how, told.layer) == ("locked", "lock")
        assert str(path) in told.why
    for found, expected in zip(run(inputs), before, strict=True):
        assert torch.equal(found, expected)


def test_unaligned_tensors_and_parts_of_the_gradients_are_locked_too(
    serve_locked: Callable[..., Path],
) -> None:
    wide = tensors(*[(2, 4, 1000, 65)] * 3, dtype=torch.float16)
    q, k, v = (x[..., 1:] for x in wide)
    expected = autoflash.attention(q, k, v, causal=True)
    serve_locked(*BOTH)
    assert torch.equal(autoflash.attention(q, k, v, causal=True), expected)
    leaf = q.detach().requires_grad_()
    (grad,) = torch.autograd.grad(autoflash.attention(leaf, k, v, causal=True).sum(), leaf)
    assert bool(torch.isfinite(grad).all())


def test_what_is_not_locked_raises_and_the_gpu_lives(serve_locked: Callable[..., Path]) -> None:
    path = serve_locked(PROBLEM)
    inputs = tensors(*[SHAPE] * 3, dtype=torch.float16)
    with pytest.raises(autoflash.MissingRecordError, match="autoflash lock --add") as caught:
        autoflash.attention(*inputs)
    assert str(path) in str(caught.value)
    leaves = [x.requires_grad_() for x in inputs]
    out = autoflash.attention(*leaves, causal=True)
    with pytest.raises(autoflash.MissingRecordError, match="bwd float16"):
        out.sum().backward()
    assert bool(torch.isfinite(out).all())


def test_compiled_models_and_graphs_are_served_by_the_lock(
    serve_locked: Callable[..., Path],
) -> None:
    serve_locked(*BOTH)
    inputs = tensors(*[SHAPE] * 3, dtype=torch.float16)
    torch._dynamo.reset()
    compiled = torch.compile(autoflash.attention, fullgraph=True)
    eager = autoflash.attention(*inputs, causal=True)
    assert torch.equal(compiled(*inputs, causal=True), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = autoflash.attention(*inputs, causal=True)
    graph.replay()
    assert torch.equal(out, eager)
    other = tensors(*[(1, 1, 77, 40)] * 3, dtype=torch.float16)
    with pytest.raises(autoflash.MissingRecordError, match="d40"):
        torch.compile(autoflash.attention)(*other)
    torch._dynamo.reset()
