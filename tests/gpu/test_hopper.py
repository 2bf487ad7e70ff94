"""flash_fwd_ws where programs share something: counters, streams, CUDA graphs, packed heads."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.codegen.render import render
from autoflash.codegen.source_cache import emit
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED, Access
from autoflash.problem import Problem
from autoflash.runtime import dispatch
from autoflash.runtime.choose import Choice
from autoflash.runtime.launcher import Launcher
from autoflash.target import Target, current_target
from autoflash.tuning.check import make_case, make_inputs, run_poisoned, why_wrong
from tests.gpu.support import assert_accurate, hopper_config, tensors

KERNEL = KERNELS["flash_fwd_ws"]
# Causal, so that programs come by their tiles in another order each time; 512 tiles.
PROBLEM = Problem.parse(
    {"batch": 4, "heads": 16, "seqlen": 1024, "head_dim": 128, "causal": True}
)  # fmt: skip


@pytest.fixture(autouse=True)
def dynamic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """attention runs dynamic schedules of the kernel."""
    hopper_config(PROBLEM)

    def choose(problem: Problem, target: Target, access: Access) -> Choice:
        assert access.tma
        config = hopper_config(problem, SCHEDULE="dynamic")
        assert KERNEL.space.why_not(config, problem, target) is None
        return Choice(kernel=KERNEL, config=config, how="default", layer="test", why="")

    monkeypatch.setattr(dispatch, "choose", choose)
    dispatch.forget()
    yield
    dispatch.forget()


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(PROBLEM, "cuda", seed)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return autoflash.attention(q, k, v, causal=True)


def test_the_counter_is_left_as_it_was_found() -> None:
    q, k, v = inputs()
    expected = assert_accurate(q, k, v, causal=True)
    for _ in range(200):
        assert torch.equal(attend(q, k, v), expected)


def test_launches_that_queue_up_do_not_disturb_each_other() -> None:
    q, k, v = inputs()
    expected = attend(q, k, v)
    torch.cuda._sleep(50_000_000)
    found = [attend(q, k, v) for _ in range(50)]
    for out in found:
        assert torch.equal(out, expected)


def test_streams_run_side_by_side() -> None:
    data = [inputs(seed) for seed in range(3)]
    expected = [attend(*x) for x in data]
    streams = [torch.cuda.Stream() for _ in data]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[] for _ in data]
    for _ in range(30):
        for stream, x, outs in zip(streams, data, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(attend(*x))
    torch.cuda.synchronize()
    for outs, right in zip(found, expected, strict=True):
        assert all(torch.equal(out, right) for out in outs)


def captured(
    q: Tensor, k: Tensor, v: Tensor, count: int = 1
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    attend(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attend(q, k, v) for _ in range(count)]
    return graph, outs


def test_a_graph_replays_on_another_stream_while_eager_code_runs() -> None:
    q, k, v = inputs()
    others = inputs(1)
    expected, other = attend(q, k, v), attend(*others)
    graph, outs = captured(q, k, v, count=3)
    stream = torch.cuda.Stream()
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        eager = [attend(*others) for _ in range(5)]
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(out, other) for out in eager)
        assert all(torch.equal(out, expected) for out in outs)


def test_two_graphs_replay_side_by_side() -> None:
    data = [inputs(seed) for seed in range(2)]
    expected = [attend(*x) for x in data]
    graphs = [captured(*x, count=2) for x in data]
    streams = [torch.cuda.Stream() for _ in data]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for (_, outs), right in zip(graphs, expected, strict=True):
            assert all(torch.equal(out, right) for out in outs)


def test_compiled_graphs_of_torch() -> None:
    """Warming up, torch audits its pool: a counter that stays must not come from there."""
    q, k, v = inputs()
    expected = attend(q, k, v) + 1
    dispatch.forget()
    compiled = torch.compile(lambda *x: attend(*x) + 1, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        assert torch.equal(compiled(q, k, v).clone(), expected)


@pytest.mark.parametrize(("group", "packed"), [(8, 8), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("staging", ["own", "direct"])
def test_packed_heads(group: int, packed: int, rows: int, staging: str) -> None:
    problem = Problem(
        batch=2, heads=2 * group, kv_heads=2, seqlen_q=rows, seqlen_k=777, head_dim=128,
        head_dim_v=96, dtype="float16", causal=True,
    )  # fmt: skip
    config = hopper_config(problem, PACK_HEADS=packed, STAGING=staging)
    launcher = Launcher(KERNEL, problem, config, ALIGNED, current_target())
    case = make_case("packed", problem, *make_inputs(problem, "cuda"))
    assert why_wrong(launcher, case) is None


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_heads_behind_rows_in_memory(dim: int) -> None:
    """[B, S, H, D], and rows that lie in one buffer with others."""
    (buffer,) = tensors((6, 700, 3, 24, dim), dtype=torch.bfloat16)
    q, k, v = buffer.unbind(2)
    out = autoflash.attention(q, k[:, :, ::3], v[:, :, ::3], causal=True, layout="bshd")
    straight = assert_accurate(
        *(x.transpose(1, 2).contiguous() for x in (q, k[:, :, ::3], v[:, :, ::3])), causal=True
    )
    assert torch.equal(out.transpose(1, 2), straight)


@pytest.mark.parametrize("schedule", ["grid", "persistent", "dynamic"])
def test_schedules_agree_to_the_bit(schedule: str) -> None:
    q, k, v = inputs()
    configs = [hopper_config(PROBLEM, SCHEDULE=s) for s in (schedule, "grid")]
    launchers = [Launcher(KERNEL, PROBLEM, c, ALIGNED, current_target()) for c in configs]
    one, other = (run_poisoned(launcher, PROBLEM, q, k, v) for launcher in launchers)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    "changes",
    [{}, {"SCHEDULE": "dynamic"}, {"STAGING": "direct", "PACK_HEADS": 4}],
    ids=["persistent", "dynamic", "direct packed"],
)
def test_the_emitted_file_runs_by_itself(changes: dict[str, bool | int | str]) -> None:
    problem = Problem.parse(
        {"batch": 4, "heads": 16, "kv_heads": 4, "seqlen": 4096, "head_dim": 128}
    )  # fmt: skip
    path = emit(render(KERNEL, problem, hopper_config(problem, **changes)))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = re.search(r"largest error (\S+); \S+ ms; (\d+) TFLOP/s", done.stdout)
    assert told is not None
    assert float(told[1]) < 0.02
