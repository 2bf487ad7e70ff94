"""What each Param of a kernel is worth: its default with one choice changed, beside the peers.

usage: compare_configs.py [--kernel flash_fwd_ws] [--head-dims 64,128,256] [--seqlens 4k]
                          [--causal both|yes|no] [--params LOAD,STAGES] [--peers fa3,sdpa_cudnn]
                          [--rounds 6] [--out FILE]

On the benchmark's shapes (16384 tokens, heads x head_dim = 2048). All of a problem are checked by
the accuracy rule and timed in turns in one process; a change that can't run is left out.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bench_attention import paper_problem, write_results

from autoflash.errors import AutoFlashError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Problem, parse_length
from autoflash.runtime.compiler import compile_config
from autoflash.runtime.launcher import Launcher
from autoflash.space import Config
from autoflash.target import Target, current_target
from autoflash.tuning.bench import implementation
from autoflash.tuning.check import make_inputs
from autoflash.tuning.worker import Bench

_PEERS = {"fwd": "fa3,sdpa_cudnn", "bwd": "sdpa_cudnn"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kernel", default="flash_fwd_ws", choices=list(KERNELS))
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqlens", default="4k")
    parser.add_argument("--causal", default="both", choices=("both", "yes", "no"))
    parser.add_argument("--params", help="those whose choices are tried; all by default")
    parser.add_argument("--peers", help="by default those that the op's kernels want to beat")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where the checkout has no git history")
    arguments = parser.parse_args()
    target, op = current_target(), KERNELS[arguments.kernel].op
    peers = (arguments.peers or _PEERS[op]).split(",")
    names = [param.name for param in KERNELS[arguments.kernel].space.params]
    tried = names if arguments.params is None else arguments.params.split(",")
    if unknown := sorted(set(tried) - set(names)):
        raise SystemExit(f"{arguments.kernel} has no {', '.join(unknown)}: it has {names}")
    plan = []
    for head_dim in map(int, arguments.head_dims.split(",")):
        for causal in {"both": (False, True), "yes": (True,), "no": (False,)}[arguments.causal]:
            for text in arguments.seqlens.split(","):
                seqlen = parse_length("seqlen", text)
                problem = paper_problem(op, "bfloat16", head_dim, seqlen, causal)
                plan.append((problem, changed(arguments.kernel, problem, target, tried)))
    compile_all(arguments.kernel, plan, target)
    rows = []
    for problem, configs in plan:
        rows += compare(arguments.kernel, problem, configs, target, peers, arguments.rounds)
        # Each time, so that a run that is stopped leaves what it measured.
        write_results(rows, f"{arguments.kernel}_params.json", arguments)


def changed(
    kernel: str, problem: Problem, target: Target, tried: list[str]
) -> list[tuple[str, Config]]:
    """The default, and the default with each other choice of each Param ``tried`` that can run."""
    space, default = KERNELS[kernel].space, KERNELS[kernel].default(problem, target)
    found = [("default", default)]
    for param in space.params:
        for choice in param.choices if param.name in tried else ():
            config = Config(**{**default, param.name: choice})
            runs = space.why_not(config, problem, target, advice=False) is None
            if choice != default[param.name] and runs:
                found.append((f"{param.name}={choice}", config))
    return found


def compile_all(
    kernel: str, plan: list[tuple[Problem, list[tuple[str, Config]]]], target: Target
) -> None:
    """Fill Triton's cache from many processes."""
    jobs = [(kernel, problem, config, target) for problem, configs in plan for _, config in configs]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))


def _compile(job: tuple[str, Problem, Config, Target]) -> None:
    kernel, problem, config, target = job
    try:
        compile_config(KERNELS[kernel], problem, config, ALIGNED, target)
    except AutoFlashError:
        return  # compare() meets it again, and says so


def compare(
    kernel: str, problem: Problem, configs: list[tuple[str, Config]], target: Target,
    peers: list[str], rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each config and peer that runs: ms, TFLOP/s, and what is wrong, if something."""
    prepared = Bench().prepare(problem)
    inputs = make_inputs(problem, "cuda")
    rows: list[dict[str, Any]] = []
    launches: list[Callable[[], object]] = []
    for name in peers:
        try:
            launch = implementation(name, problem, *inputs)
            launch()
        except (RuntimeError, ImportError, ValueError, AttributeError):
            continue
        launches.append(launch)
        rows.append({"problem": problem.label(), "name": name})
    for name, config in configs:
        row: dict[str, Any] = {"problem": problem.label(), "name": name, "config": dict(config)}
        try:
            launcher = Launcher(KERNELS[kernel], problem, config, ALIGNED, target)
        except AutoFlashError as error:
            print(f"{problem.label()}  {name}: {error}", flush=True)
            continue
        wrong = prepared.why_wrong(launcher)
        launches.append(prepared.full.launch(launcher))
        rows.append(row | ({"wrong": wrong} if wrong else {}))
    timed = [prepared.timer.eager(launch) for launch in launches]
    for row, times in zip(rows, prepared.timer.interleave(timed, rounds), strict=True):
        ms = statistics.median(times)
        row |= {"ms": round(ms, 5), "tflops": round(problem.tflops(ms), 1)}
    base = next(row["tflops"] for row in rows if row["name"] == "default")
    for row in sorted(rows, key=lambda row: row["ms"]):
        print(f"{problem.label()}  {row['tflops']:6.0f}  {row['tflops'] / base:.3f}  {row['name']}"
              f"{'  WRONG' if 'wrong' in row else ''}", flush=True)  # fmt: skip
    torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
