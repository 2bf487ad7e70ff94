"""Rendering is pure, the templates are strict and stay Python to the eye."""

import ast
import dataclasses
import getpass
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from autoflash.codegen.environment import environment
from autoflash.codegen.render import render
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS

KERNEL = KERNELS["flash_fwd"]
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1000, seqlen_k=2000, head_dim=128, head_dim_v=64,
    dtype="bfloat16", causal=True,
)  # fmt: skip
DEFAULT = KERNEL.default(PROBLEM, NAMED_TARGETS["h200"])
PROBLEMS = [
    PROBLEM,
    dataclasses.replace(PROBLEM, causal=False, dtype="float16"),
    dataclasses.replace(PROBLEM, head_dim=72, head_dim_v=40),
    dataclasses.replace(PROBLEM, head_dim=256, head_dim_v=256, seqlen_q=1, seqlen_k=100_000),
]
TEMPLATES = sorted(environment().list_templates(extensions=["jinja"]))
CONFIGS = {
    load: [c for c in KERNEL.space.all_configs() if c["LOAD"] == load]
    for load in ("pointer", "tma")
}
BOTH_LOADS = pytest.mark.parametrize("load", ["pointer", "tma"])


def with_load(load: str) -> Config:
    return Config(**{**DEFAULT, "LOAD": load})


def rendered(load: str, count: int = 40):
    """Sources of one variant, over problems and a spread of the space's configs."""
    configs = random.Random(0).sample(CONFIGS[load], count)
    return [render(KERNEL, p, c) for p in PROBLEMS for c in configs]


IN_ANOTHER_PROCESS = """
import json, sys
from autoflash.codegen.render import render
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
kernel = KERNELS["flash_fwd"]
sources = [render(kernel, Problem(**p), Config(**c)) for p, c in json.load(sys.stdin)]
json.dump([[s.name, s.kernel_hash, s.text] for s in sources], sys.stdout)
"""


def test_another_process_renders_the_same(tmp_path):
    pairs = [(p, with_load(load)) for p in PROBLEMS for load in ("pointer", "tma")]
    # The keys of the config come in another order there.
    asked = [(p.as_dict(), dict(reversed(list(c.items())))) for p, c in pairs]
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS], input=json.dumps(asked), cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "4711", "TZ": "Asia/Tokyo", "LC_ALL": "C"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    here = [render(KERNEL, p, c) for p, c in pairs]
    assert json.loads(done.stdout) == [[s.name, s.kernel_hash, s.text] for s in here]


@BOTH_LOADS
def test_the_text_says_nothing_of_this_machine_or_day(load):
    spelled = "".join(environment().loader.get_source(environment(), n)[0] for n in TEMPLATES)
    names = {socket.gethostname(), socket.gethostname().split(".")[0], getpass.getuser()}
    for source in rendered(load, 5):
        assert not re.search(r"\b20\d\d-\d\d-\d\d\b|\b\d\d?:\d\d\b", source.text)
        assert not re.search(r"(?<![\w.])/\w+/", source.text), "an absolute path"
        for name in names:
            # A host may be called "main".
            assert name in spelled or name not in source.text
        for folder in (Path.cwd(), Path.home(), Path(__file__).parents[2]):
            assert len(str(folder)) < 2 or f"{folder}/" not in source.text


@BOTH_LOADS
def test_the_header_has_three_lines_and_functions_stay_where_they_are(load):
    # Triton's cache key holds the line on which a function starts: another one compiles anew.
    places = set()
    for source in rendered(load):
        lines = source.text.split("\n")
        assert [line[:2] for line in lines[:3]] == ["# "] * 3
        assert lines[3].startswith('"""')
        tree = ast.parse(source.text)
        device = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list]
        places.add(tuple((f.name, f.decorator_list[0].lineno) for f in device))
    assert len(places) == 1
    names = [name for name, _ in places.pop()]
    assert names == ["softmax_step", "tile_coords", "load_rows", "attend", "flash_fwd"]


def test_the_first_line_is_the_slug_of_the_name():
    for source in rendered("tma", 5):
        slug = source.text.split("\n", 1)[0].removeprefix("# ")
        assert re.fullmatch(re.escape(slug) + "_[0-9a-f]{8}", source.name)
        assert re.fullmatch("[a-z0-9_]+", source.name)


def test_an_undefined_name_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="missing"):
        environment().from_string("{{ missing }}").render()
    with pytest.raises(jinja2.UndefinedError, match="missing"):
        environment().from_string("{% if missing %}x{% endif %}").render()


@pytest.mark.parametrize("left_out", ["slug", "version", "template", "tma", "constexprs", "flops"])
def test_a_template_without_one_of_its_names_is_an_error(left_out):
    names = ("slug", "version", "template", "constexprs", "options", "problem", "flops", "tma")
    template = environment().get_template(KERNEL.template)
    # Those that each function of a kernel has are looked up by its name.
    values = dict.fromkeys(names, "0") | {name: {KERNEL.name: "0"} for name in names[3:5]}
    assert template.render(values)
    with pytest.raises(jinja2.UndefinedError, match=left_out):
        template.render({name: values[name] for name in names if name != left_out})


def test_all_templates_are_found():
    assert {"flash_fwd.py.jinja", "header.jinja", "shared/softmax.py.jinja"} <= set(TEMPLATES)
    assert {k.template for k in KERNELS.values()} <= set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_its_blocks_is_python(name):
    text, _, _ = environment().loader.get_source(environment(), name)
    # Lists of arguments that several functions share.
    text = re.sub(r"\{% set \w+ %\}.*?\{% endset %\}\n", "", text, flags=re.DOTALL)
    lines = [line for line in text.split("\n") if not re.fullmatch(r"\s*\{%.*%\}\s*", line)]
    # Inside a line, an argument that not every variant has.
    python = re.sub(r"\{% if \w+ %\}([\w, ]*)\{% endif %\}", r"\1", "\n".join(lines))
    assert "{%" not in python, "a block that doesn't have its line for itself"
    count = itertools.count()

    def stand_in(match):
        # An expression that begins with a string is one or another: this one will do.
        return match[1] or f"expression_{next(count)}"

    tree = ast.parse(re.sub(r"\{\{\s*(?:\"([^\"]*)\")?.*?\}\}", stand_in, python))
    # One side of an {% else %} may not hide a function of the other.
    names = [f.name for f in tree.body if isinstance(f, ast.FunctionDef)]
    assert len(names) == len(set(names))


@BOTH_LOADS
def test_the_emitted_file_imports_torch_triton_and_math_only(load):
    for source in rendered(load, 3):
        roots = set()
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                roots.add(node.module.split(".")[0])
        assert roots == {"torch", "triton", "math"}


@BOTH_LOADS
def test_the_text_is_tidy(load):
    for source in rendered(load, 3):
        assert source.text.endswith("main()\n")
        assert not re.search(r"[ \t]\n|\n\n\n\n|\t|\{%|\{\{|%\}", source.text)


def test_the_kernel_hash_is_one_per_variant():
    # Dims, dtype, mask, tiles and launch options are arguments of the same device code.
    hashes = {load: {s.kernel_hash for s in rendered(load)} for load in ("pointer", "tma")}
    assert len(hashes["pointer"]) == len(hashes["tma"]) == 1
    assert hashes["pointer"] != hashes["tma"]
    assert all(re.fullmatch("[0-9a-f]{16}", h) for found in hashes.values() for h in found)


def test_the_kernel_hash_follows_the_device_code(monkeypatch):
    before = render(KERNEL, PROBLEM, DEFAULT)
    loader = environment().loader

    def patched(old, new):
        texts = {n: loader.get_source(environment(), n)[0] for n in TEMPLATES}
        changed = {n: t.replace(old, new) for n, t in texts.items()}
        assert changed != texts
        copy = environment().overlay(loader=jinja2.DictLoader(changed))
        monkeypatch.setattr("autoflash.codegen.render.environment", lambda folder: copy)
        return render(KERNEL, PROBLEM, DEFAULT)

    helper = patched("l_i = l_i * alpha + tl.sum(p, 1)", "l_i = tl.sum(p, 1) + l_i * alpha")
    assert helper.kernel_hash != before.kernel_hash
    footer = patched("largest error", "greatest error")
    header = patched("Run this file by itself", "Run it by itself")
    assert footer.kernel_hash == header.kernel_hash == before.kernel_hash
    assert len({before.name, helper.name, footer.name, header.name}) == 4


@BOTH_LOADS
def test_each_config_has_a_name_and_a_footer_of_its_own(load):
    configs = random.Random(1).sample(CONFIGS[load], 200)
    sources = [render(KERNEL, PROBLEM, c) for c in configs]
    assert len({s.name for s in sources}) == len({s.text for s in sources}) == 200
    for config, source in zip(configs, sources, strict=True):
        footer = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(source.text).body
            if isinstance(node, ast.Assign)
        }
        assert footer["CONSTEXPRS"] == KERNEL.constexprs(PROBLEM, config)
        assert footer["OPTIONS"] == KERNEL.options(config)
        assert footer["PROBLEM"] == KERNEL.example(PROBLEM).as_dict()
        assert footer["FLOPS"] == KERNEL.example(PROBLEM).flops


def test_sizes_that_are_arguments_do_not_change_the_text():
    other = dataclasses.replace(PROBLEM, batch=7, heads=9, kv_heads=3, seqlen_q=31, seqlen_k=77)
    assert render(KERNEL, other, DEFAULT) == render(KERNEL, PROBLEM, DEFAULT)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_params_that_are_not_compiled_leave_the_binary_as_it_is(kernel):
    target = NAMED_TARGETS["h200"]
    fields = {"op": kernel.op, "batch": 4, "heads": 32, "seqlen": 8192, "head_dim": 64}
    dtype = "fp8" if kernel.fp8 else "bf16"
    problem = Problem.parse({**fields, "dtype": dtype, "causal": True})
    by_binary = {}
    configs = kernel.space.configs(problem, target)
    for config in random.Random(0).sample(configs, min(200, len(configs))):
        by_binary.setdefault(kernel.space.compiled(config), []).append(config)

    def binary(config):
        functions = kernel.functions(problem, config)
        code = render(kernel, problem, config).kernel_hash
        return [code] + [[f.name, f.signature, f.constexprs, f.options] for f in functions]

    shared = [configs for configs in by_binary.values() if len(configs) > 1]
    assert bool(shared) == any(not param.compiled for param in kernel.space.params)
    for first, *others in shared:
        assert all(binary(other) == binary(first) for other in others)
