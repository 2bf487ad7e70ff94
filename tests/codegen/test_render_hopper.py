"""flash_fwd_ws's emitted files: pure, tidy, one device code per variant."""

import ast
import dataclasses
import json
import os
import random
import re
import subprocess
import sys

import pytest

from autoflash.codegen.render import render
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.target import NAMED_TARGETS

KERNEL = KERNELS["flash_fwd_ws"]
H100 = NAMED_TARGETS["h100"]
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=2000, seqlen_k=2000, head_dim=128, head_dim_v=128,
    dtype="bfloat16", causal=True,
)  # fmt: skip
PROBLEMS = [
    PROBLEM,
    dataclasses.replace(PROBLEM, causal=False, dtype="float16", head_dim=64, head_dim_v=64),
    dataclasses.replace(PROBLEM, head_dim=72, head_dim_v=40),
    dataclasses.replace(PROBLEM, head_dim=256, head_dim_v=256, batch=8),
]


def pairs(count: int = 30):
    lot = random.Random(0)
    found = [(p, c) for p in PROBLEMS for c in KERNEL.space.configs(p, H100)]
    return lot.sample(found, count)


def variant_of(problem, config):
    return (config["STAGING"] == "direct", config["SCHEDULE"] == "dynamic")


IN_ANOTHER_PROCESS = """
import json, sys
from autoflash.codegen.render import render
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
kernel = KERNELS["flash_fwd_ws"]
sources = [render(kernel, Problem(**p), Config(**c)) for p, c in json.load(sys.stdin)]
json.dump([[s.name, s.kernel_hash, s.text] for s in sources], sys.stdout)
"""


def test_another_process_renders_the_same(tmp_path):
    asked = [(p.as_dict(), dict(reversed(list(c.items())))) for p, c in pairs(6)]
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS], input=json.dumps(asked), cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "4711"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    here = [render(KERNEL, p, c) for p, c in pairs(6)]
    assert json.loads(done.stdout) == [[s.name, s.kernel_hash, s.text] for s in here]


def test_there_is_one_device_code_per_variant_with_its_functions_in_one_place():
    codes, places = {}, {}
    for problem, config in pairs(200):
        source = render(KERNEL, problem, config)
        tree = ast.parse(source.text)
        device = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list]
        variant = variant_of(problem, config)
        codes.setdefault(variant, set()).add(source.kernel_hash)
        lines = tuple((f.name, f.decorator_list[0].lineno) for f in device)
        places.setdefault(variant, set()).add(lines)
        assert lines[-1][0] == KERNEL.name
        assert {ast.unparse(d) for f in device for d in f.decorator_list} == {"gluon.jit"}
    assert len(codes) == 4
    assert [len(found) for found in codes.values()] == [1] * 4
    assert len(set.union(*codes.values())) == 4
    assert [len(found) for found in places.values()] == [1] * 4


def test_the_emitted_file_is_complete_and_imports_torch_triton_and_math_only():
    for source in (render(KERNEL, *pair) for pair in pairs(12)):
        lines = source.text.split("\n")
        assert [line[:2] for line in lines[:3]] == ["# "] * 3
        assert lines[3].startswith('"""')
        assert source.text.endswith("main()\n")
        assert not re.search(r"\n\n\n\n|\t|\{%|\{\{|%\}", source.text)
        roots = set()
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                roots.add(node.module.split(".")[0])
        assert roots == {"torch", "triton", "math"}


def test_each_config_has_a_name_and_a_footer_of_its_own():
    sources = {(p, c): render(KERNEL, p, c) for p, c in pairs(200)}
    assert len({s.name for s in sources.values()}) == len({s.text for s in sources.values()}) == 200
    for (problem, config), source in sources.items():
        _, found, text = source.text.partition("\nCONSTEXPRS = ")
        footer = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(found + text).body
            if isinstance(node, ast.Assign)
        }
        assert footer == {
            "CONSTEXPRS": KERNEL.constexprs(problem, config),
            "OPTIONS": KERNEL.options(config),
            "PROBLEM": KERNEL.example(problem).as_dict(),
            "SCHEDULE": config["SCHEDULE"],
            "GROUP_MB": config["GROUP_MB"],
            "FLOPS": KERNEL.example(problem).flops,
        }


@pytest.mark.parametrize("changes", [{"batch": 7}, {"seqlen_q": 31, "seqlen_k": 77}, {"heads": 4}])
def test_sizes_that_are_arguments_do_not_change_the_text(changes):
    config = KERNEL.default(PROBLEM, H100)
    other = dataclasses.replace(PROBLEM, kv_heads=1, heads=4) if "heads" in changes else PROBLEM
    assert render(KERNEL, dataclasses.replace(other, **changes), config) == render(
        KERNEL, PROBLEM, config
    )
