"""Serving: graphs, streams, threads, torch.compile, a second process, the store."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import autoflash
from autoflash.kernels.kernel import Access
from autoflash.problem import Bucket, Problem
from autoflash.runtime import dispatch
from autoflash.runtime.choose import Choice
from autoflash.settings import settings
from autoflash.store.store import Store
from autoflash.target import Target, current_target
from tests.gpu.support import assert_meets_rule, tensors

SHAPE = (2, 4, 196, 80)


def test_cuda_graph_replay_with_new_data() -> None:
    q, k, v = tensors(*[SHAPE] * 3, dtype=torch.float16)
    autoflash.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = autoflash.attention(q, k, v, causal=True)
    fresh = tensors(*[SHAPE] * 3, dtype=torch.float16, seed=5)
    for old, new in zip((q, k, v), fresh, strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(out, autoflash.attention(*fresh, causal=True))


def test_capture_of_an_unseen_problem_is_one_clear_error_and_the_stream_lives() -> None:
    q, k, v = tensors(*[(1, 1, 48, 104)] * 3, dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(autoflash.AutoFlashError, match="before the capture"):
            autoflash.attention(q, k, v)
        out = q + 1
    graph.replay()
    assert torch.equal(out, q + 1)
    autoflash.attention(q, k, v)


def test_what_is_loaded_stands_in_while_an_unseen_problem_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longer one's choice can't be loaded in the capture; that of the shorter one runs."""
    shorter = tensors(*[(1, 2, 128, 88)] * 3, dtype=torch.float16)
    longer = tensors(*[(1, 2, 700, 88)] * 3, dtype=torch.float16)
    autoflash.attention(*shorter, causal=True)
    loaded = set(dispatch._launchers)
    choose = dispatch.choose

    def another(problem: Problem, target: Target, access: Access) -> Choice:
        found = choose(problem, target, access)
        configs = found.kernel.space.configs(problem, target)
        used = {config for _, config, *_ in loaded}
        return dataclasses.replace(found, config=next(c for c in configs if c not in used))

    monkeypatch.setattr(dispatch, "choose", another)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = autoflash.attention(*longer, causal=True)
    assert set(dispatch._launchers) == loaded
    graph.replay()
    assert_meets_rule(out, *longer, causal=True)
    # Not remembered: the next call loads what was chosen.
    autoflash.attention(*longer, causal=True)
    assert len(dispatch._launchers) == len(loaded) + 1
    dispatch.forget()


def test_a_side_stream_is_waited_for() -> None:
    q, k, v = tensors(*[SHAPE] * 3, dtype=torch.float16)
    expected = autoflash.attention(q, k, v)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    for _ in range(100):
        late.zero_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            late.copy_(q)
            out = autoflash.attention(late, k, v)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, expected)


def test_threads_share_a_cold_dispatcher() -> None:
    dispatch.forget()
    inputs = [tensors(*[(1, 2, 100 + i, 64)] * 3, dtype=torch.bfloat16) for i in range(8)]
    found: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        found[index] = autoflash.attention(*inputs[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for index, tensor in found.items():
        assert torch.equal(tensor, autoflash.attention(*inputs[index]))
    assert len(found) == 8


@pytest.mark.parametrize("length", [196, 257])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_opcheck_and_compile_agree_with_eager(length: int, return_lse: bool, strided: bool) -> None:
    if strided:
        packed = tensors(*[(2, length, 4, 80)] * 3, dtype=torch.float16)
        q, k, v = (x.transpose(1, 2) for x in packed)
    else:
        q, k, v = tensors(*[(2, 4, length, 80)] * 3, dtype=torch.float16)
    op = torch.ops.autoflash.attention_fwd.default
    results = torch.library.opcheck(op, (q, k, v, 0.1, True, False, return_lse))
    assert set(results.values()) == {"SUCCESS"}

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = autoflash.attention(q * 2, k, v, causal=True, return_lse=return_lse)
        return found[0] + 1 if return_lse else found + 1

    eager = model(q, k, v)
    compiled = torch.compile(model, fullgraph=True)(q, k, v)
    assert compiled.stride() == eager.stride()
    assert torch.equal(compiled, eager)


def test_the_fast_path_equals_the_op() -> None:
    q, k, v = tensors(*[SHAPE] * 3, dtype=torch.float16)
    through_op, _ = torch.ops.autoflash.attention_fwd(q, k, v, 80**-0.5, True, False, False)
    assert torch.equal(autoflash.attention(q, k, v, causal=True), through_op)
    negative = autoflash.attention(-q, k, v, scale=-(80**-0.5), causal=True)
    assert torch.equal(negative, through_op)
    batched = torch.compile(lambda x: autoflash.attention(x, k, v, causal=True), fullgraph=True)
    assert torch.equal(batched(q), through_op)


CHILD = """
import json, sys, torch, autoflash
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
import triton
compiled = []
original = triton.compile
def counting(*args, **kwargs):
    compiled.append(1)
    return original(*args, **kwargs)
triton.compile = counting
out = autoflash.attention(q, k, v, causal=True)
again = autoflash.attention(q, k, v, causal=True)
e = autoflash.explain(q, k, v, causal=True)
bits = out.view(torch.int16).long()
print(json.dumps({"how": e.how, "config": e.config, "compiles": len(compiled),
    "optuna": "optuna" in sys.modules, "sum": int((bits * torch.arange(bits.numel(),
    device="cuda").view_as(bits)).sum()), "same": torch.equal(out, again)}))
"""


def child_output() -> dict[str, object]:
    result = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=os.environ.copy(),
        check=False, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_tune_store_and_serve_in_a_second_process() -> None:
    problem = Problem.parse({"batch": 2, "heads": 4, "seqlen": 512, "head_dim": 64, "causal": True})
    (result,) = autoflash.tune(problem, budget_s=20, trials=12)
    record = result.record
    assert record is not None
    assert record.kind == "measured"
    assert record.target.identity == current_target().identity
    assert Path(str(result.path)).exists()
    assert {t.status.value for t in result.trials} <= {"ok", "out_of_resources", "noisy"}
    assert settings().db_path.exists()

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = autoflash.attention(q, k, v, causal=True)
    explained = autoflash.explain(q, k, v, causal=True)
    assert explained.how == "tuned"
    assert explained.config == dict(record.config)
    bits = out.view(torch.int16).long()
    order = torch.arange(bits.numel(), device="cuda").view_as(bits)

    other = child_output()
    assert other["how"] == "tuned"
    assert other["config"] == dict(record.config)
    assert other["compiles"] == 1
    assert other["optuna"] is False
    assert other["same"] is True
    assert other["sum"] == int((bits * order).sum())

    (again,) = autoflash.tune(problem, budget_s=20, trials=4)
    assert again.resumed >= len([t for t in result.trials if t.status.value == "ok"])
    # A noisy trial (other tests share the GPU) is timed again; no other is.
    old = {t.config for t in result.trials if t.status.value != "noisy"}
    assert not old & {t.config for t in again.trials[again.resumed :]}


def test_lock_mode_refuses_what_was_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    dispatch.forget()
    q, k, v = tensors(*[(1, 1, 3000, 56)] * 3, dtype=torch.float16)
    with pytest.raises(autoflash.MissingRecordError, match="d56"):
        autoflash.attention(q, k, v)


def test_a_broken_store_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(os.urandom(5000))
    monkeypatch.setenv("AUTOFLASH_DB", str(broken))
    dispatch.forget()
    q, k, v = tensors(*[SHAPE] * 3, dtype=torch.float16)
    with caplog.at_level("WARNING"):
        out = autoflash.attention(q, k, v)
        autoflash.attention(q[:1], k[:1], v[:1])
    assert bool(torch.isfinite(out).all())
    assert len([r for r in caplog.records if "without the user records" in r.message]) == 1
    assert broken.stat().st_size == 5000


def test_store_records_are_found_by_bucket() -> None:
    problem = Problem.parse({"batch": 1, "heads": 2, "seqlen": 128, "head_dim": 64})
    autoflash.tune(problem, budget_s=15, trials=3)
    store = Store(settings().db_path, read_only=True)
    record = store.best(Bucket.of(problem), current_target())
    assert record is not None
    assert record.problem == problem
    assert record.measurement.median_ms > 0
