"""flash_fwd_fp8_ws's declaration against its template, and its space, defaults and model."""

import ast
import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.codegen.render import render
from autoflash.dtypes import FP8
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.flash_fwd_fp8_ws_space import (
    registers_needed,
    shared_parts,
)
from autoflash.kernels.hopper_tiles import consumer_registers, group_heads, tile_count
from autoflash.kernels.kernel import ALIGNED, TENSORS, Access, Call, Counter, Descriptor, Pointer
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS

KERNEL = KERNELS["flash_fwd_fp8_ws"]
SPACE = KERNEL.space
A100, H100, H200, B200 = (NAMED_TARGETS[name] for name in ("a100", "h100", "h200", "b200"))
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1000, seqlen_k=2000, head_dim=128, head_dim_v=64,
    dtype=FP8, causal=True, scales="block", v_layout="permuted",
)  # fmt: skip
ROWS = dataclasses.replace(PROBLEM, v_layout="rows", out_dtype="float16")
CONFIG = Config(
    CONSUMERS=3, BLOCK_N=128, STAGES=3, Q_IN_REGISTERS=False, SCHEDULE="dynamic", GROUP_MB=8,
    PV_PART=64, STAGING="own", PING_PONG="none", LOADER_REGISTERS=24, EXP2_BY_FMA=0,
)  # fmt: skip
VARIANTS = list(
    itertools.product((PROBLEM, ROWS), ("own", "direct"), ("grid", "persistent", "dynamic"))
)
EACH_VARIANT = pytest.mark.parametrize(("problem", "staging", "schedule"), VARIANTS)
DESCALES = ("q_descale", "k_descale", "v_descale")


def config_of(**changes) -> Config:
    return Config(**{**CONFIG, **changes})


@st.composite
def problems(draw):
    """Problems that the kernel serves on sm_90."""
    kv_heads = draw(st.integers(1, 16))
    head_dim = draw(st.integers(1, 16)) * 16
    layout = draw(st.sampled_from(["rows", "permuted"]))
    step = 16 if layout == "rows" else 8
    return Problem(
        batch=draw(st.integers(1, 64)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        seqlen_k=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        head_dim=head_dim,
        head_dim_v=draw(st.just(head_dim) | st.integers(1, 256 // step).map(lambda n: step * n)),
        dtype=FP8,
        out_dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        scales=draw(st.sampled_from(["tensor", "head", "block"])),
        v_layout=layout,
        causal=draw(st.booleans()),
    )


# -- drift between the template and the declaration ------------------------------------------------


@EACH_VARIANT
def test_the_template_takes_what_is_declared(problem, staging, schedule):
    config = config_of(STAGING=staging, SCHEDULE=schedule)
    tree = ast.parse(render(KERNEL, problem, config).text)
    written = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    functions = KERNEL.functions(problem, config)
    assert len(functions) == (2 if problem.v_layout == "rows" else 1)
    for function in functions:
        arguments = written[function.name].args.args
        plain = [a.arg for a in arguments if a.annotation is None]
        constexprs = [a.arg for a in arguments if a.annotation is not None]
        assert [a.arg for a in arguments] == plain + constexprs
        assert list(function.signature) == plain
        assert list(function.constexprs) == constexprs
        assert set(function.divisible) <= set(plain)
        assert function.language == "gluon"
    names, params = set(functions[-1].constexprs), {param.name for param in SPACE.params}
    assert params - names == {"SCHEDULE", "GROUP_MB"}
    assert names - params == {
        "BLOCK_D", "BLOCK_DV", "HEAD_DIM_V", "CAUSAL", "BLOCK_SCALES", "CONSUMER_REGISTERS",
    }  # fmt: skip


@pytest.mark.parametrize("param", SPACE.params, ids=lambda p: p.name)
def test_every_choice_makes_another_launch(param):
    problem = dataclasses.replace(PROBLEM, heads=256, kv_heads=32, seqlen_k=4096, head_dim_v=128)
    strides = dict.fromkeys(("q", "k", "v", "out"), (1 << 20, 1 << 12, 16))
    call = Call(problem=problem, scale=1.0, strides=strides, given=frozenset(TENSORS["fwd"]))

    def launch(value):
        (f,) = KERNEL.functions(problem, config_of(**{param.name: value}))
        return str((f.signature, f.constexprs, f.bind(call), f.grid(problem, H100)))

    assert len({launch(value) for value in param.choices}) == len(param.choices)
    assert param.doc


# -- bind ------------------------------------------------------------------------------------------

STRIDES = {
    "q": (80, 72, 64), "k": (56, 48, 40), "v": (32, 24, 16), "out": (104, 96, 88),
    "q_descale": (1, 2, 3, 4), "k_descale": (5, 6, 0, 7), "v_descale": (8, 9, 0, 10),
}  # fmt: skip


def bound(problem: Problem, given: frozenset[str] = frozenset(TENSORS["fwd"]), **changes):
    call = Call(problem=problem, scale=0.5, strides=STRIDES, given=given)
    *_, function = KERNEL.functions(problem, config_of(**changes))
    arguments = function.bind(call)
    assert len(arguments) == len(function.signature)
    return dict(zip(function.signature, arguments, strict=True)), function.signature


@EACH_VARIANT
def test_bind_puts_each_value_where_its_name_is(problem, staging, schedule):
    values, kinds = bound(problem, STAGING=staging, SCHEDULE=schedule)
    direct, turned = staging == "direct", problem.v_layout == "rows"
    pointers = {name: a.tensor for name, a in values.items() if isinstance(a, Pointer)}
    assert pointers == {
        "lse_ptr": "lse", **{f"{t}_scale_ptr": f"{t}_descale" for t in "qkv"},
        **({"out_ptr": "out"} if direct else {}),
    }  # fmt: skip
    descriptors = {name: a for name, a in values.items() if isinstance(a, Descriptor)}
    assert {name: a.tensor for name, a in descriptors.items()} == {
        "q_desc": "q", "k_desc": "k", "v_desc": "vt" if turned else "v",
        **({} if direct else {"out_desc": "out"}),
    }  # fmt: skip
    assert descriptors["v_desc"].shape == (2, 4, 64, 2000)
    for name, a in descriptors.items():
        dtype = "fp8e4nv" if name != "out_desc" else "fp16" if turned else "bf16"
        assert kinds[name] == f"tensordesc<{dtype}{list(a.block)}>"
        assert a.dtype == (FP8 if name != "out_desc" else problem.dtype_of_out)
    counters = [name for name, a in values.items() if isinstance(a, Counter)]
    assert counters == (["counter"] if schedule == "dynamic" else [])
    # The strides of k's and v's descales skip the head in a group.
    names = ("qsb", "qsh", "qsg", "qsm", "ksb", "ksh", "ksn", "vsb", "vsh", "vsn")
    assert [values[f"stride_{n}"] for n in names] == list(range(1, 11))
    if direct:
        assert [values[f"stride_o{axis}"] for axis in "bhm"] == [104, 96, 88]
    assert values["scale_log2"] == pytest.approx(0.5 / math.log(2), rel=1e-15)
    sizes = ("heads", "group", "n_heads", "seqlen_q", "seqlen_k", "n_tiles", "write_lse")
    assert [values[name] for name in sizes] == [16, 4, 32, 1000, 2000, 32 * 6, 1]


def test_what_is_not_given_is_said():
    values, _ = bound(PROBLEM, frozenset({"q", "k", "v", "out", "k_descale"}))
    assert [values[f"{t}_scaled"] for t in "qkv"] == [0, 1, 0]
    assert values["write_lse"] == 0


def test_the_first_function_turns_each_block_of_keys():
    turn, _ = KERNEL.functions(ROWS, CONFIG)
    call = Call(problem=ROWS, scale=0.5, strides=STRIDES, given=frozenset(TENSORS["fwd"]))
    source, result, heads, keys = turn.bind(call)
    assert (source.tensor, source.shape, source.strides) == ("v", (2, 4, 2000, 64), (32, 24, 16, 1))
    assert (result.tensor, result.shape) == ("vt", (2, 4, 64, 2000))
    assert result.strides == (4 * 64 * 2000, 64 * 2000, 2000, 1)
    assert (source.block[2:], result.block[2:]) == ((128, 64), (64, 128))
    assert (heads, keys) == (4, 2000)
    assert turn.grid(ROWS, H100) == 2 * 4 * 16
    (scratch,) = KERNEL.scratch(ROWS)
    assert (scratch.name, scratch.shape, scratch.dtype) == ("vt", (2, 4, 64, 2000), FP8)
    assert KERNEL.scratch(PROBLEM) == ()
    ragged = dataclasses.replace(ROWS, seqlen_k=2001)
    assert KERNEL.scratch(ragged)[0].shape[-1] == 2016


# -- what is served --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v_layout": "columns"}, "v by columns"),
        ({"head_dim": 72}, "head_dim=72"),
        ({"v_layout": "rows", "head_dim_v": 72}, "head_dim_v=72"),
        ({"head_dim_v": 36}, "head_dim_v=36"),
        ({"dtype": "float16", "kv_dtype": FP8}, "q in float16"),
        ({"batch": 2**20, "heads": 2**14}, "tiles"),
    ],
)
def test_what_is_not_served(changes, reason):
    assert reason in KERNEL.serves(dataclasses.replace(PROBLEM, **changes), H100)


def test_other_gpus_are_served_by_the_portable_kernel():
    assert KERNEL.serves(PROBLEM, H200) is None
    assert "sm_100" in KERNEL.serves(PROBLEM, B200)
    names = {kernel.name for kernel in kernels_for(PROBLEM, H100)}
    assert names == {"flash_fwd_fp8", "flash_fwd_fp8_ws"}
    assert [kernel.name for kernel in kernels_for(PROBLEM, B200)] == ["flash_fwd_fp8"]


def test_only_what_the_copy_engine_reads():
    assert KERNEL.adapt(CONFIG, ALIGNED) == CONFIG
    assert KERNEL.adapt(CONFIG, Access(aligned=True, tma=False)) is None


# -- space, defaults, model ------------------------------------------------------------------------


@settings(max_examples=60)
@given(problems())
def test_defaults_are_feasible_and_ranked_configs_fit(problem):
    defaults = KERNEL.defaults(problem, H100)
    assert defaults
    for config in defaults:
        assert SPACE.why_not(config, problem, H100) is None
        assert SPACE.parse(dict(config)) == config
        assert sum(shared_parts(config, problem).values()) <= H100.shared_memory
        assert registers_needed(config, problem) <= consumer_registers(config)
        ms = KERNEL.estimate_ms(problem, config, H100, 1)
        assert math.isfinite(ms)
        assert ms > 0
        assert group_heads(config, problem) <= problem.batch * problem.heads
        grid = KERNEL.functions(problem, config)[-1].grid(problem, H100)
        assert 1 <= grid <= max(1, tile_count(config, problem))
        assert KERNEL.pipeline(problem, config)


def test_the_space_holds_what_was_fastest_on_an_h200():
    def best(head_dim, **changes):
        problem = Problem(
            batch=4, heads=2048 // head_dim, kv_heads=2048 // head_dim, seqlen_q=4096,
            seqlen_k=4096, head_dim=head_dim, head_dim_v=head_dim, dtype=FP8, scales="tensor",
            v_layout="permuted",
        )  # fmt: skip
        config = Config(**{**KERNEL.default(problem, H200), **changes})
        return SPACE.why_not(config, problem, H200)

    assert best(64, PING_PONG="done") is None
    assert best(128, STAGES=4, PING_PONG="done") is None
    assert best(256, PING_PONG="done") is None


def test_turning_v_costs_time():
    given_so = KERNEL.estimate_ms(PROBLEM, CONFIG, H100, 1)
    assert KERNEL.estimate_ms(ROWS, CONFIG, H100, 1) > given_so
