"""flash_bwd_ws's declaration against its template, and its space, defaults and model."""

import ast
import dataclasses
import functools

import pytest
from hypothesis import assume, example, given, settings

from autoflash.codegen.render import render
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.flash_bwd_ws_space import (
    dq_part,
    group_heads,
    lead_rows,
    padded_rows,
    shared_parts,
)
from autoflash.kernels.kernel import ALIGNED, TENSORS, Access, Call, Counter, Descriptor, Pointer
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from tests.kernels.test_flash_fwd import problems as forward_problems

KERNEL = KERNELS["flash_bwd_ws"]
SPACE = KERNEL.space
A100, H100, H200, B200 = (NAMED_TARGETS[name] for name in ("a100", "h100", "h200", "b200"))
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1001, seqlen_k=2000, head_dim=96, head_dim_v=96,
    dtype="bfloat16", causal=True, op="bwd",
)  # fmt: skip
CONFIG = Config(
    BLOCK_M=64, STAGES=2, DQ_SPLIT="columns", DP_EARLY=False, TURNS=False, SPREAD=False,
    SCHEDULE="dynamic", GROUP_MB=1,
)  # fmt: skip
NAMES = ["flash_bwd_ws_prepare", "flash_bwd_ws", "flash_bwd_ws_convert"]
BY_NAME = pytest.mark.parametrize("name", NAMES)
NARROW = {"head_dim": 64, "head_dim_v": 64}
ROWS_SPLIT = {"BLOCK_M": 128, "DQ_SPLIT": "rows"}


def config_of(**changes) -> Config:
    return Config(**{**CONFIG, **changes})


def problem_of(**changes) -> Problem:
    return dataclasses.replace(PROBLEM, **changes)


def problems():
    """Of each length, dtype and number of heads, with the head dims that are served."""

    def served(problem):
        dim = -(-problem.head_dim // 2 // 8) * 8
        return dataclasses.replace(problem, op="bwd", head_dim=dim, head_dim_v=dim)

    return forward_problems().map(served)


def functions(problem=PROBLEM, config=CONFIG):
    return {function.name: function for function in KERNEL.functions(problem, config)}


# -- drift between the template and the declaration ------------------------------------------------


@functools.cache
def device_functions() -> dict[str, ast.FunctionDef]:
    tree = ast.parse(render(KERNEL, PROBLEM, CONFIG).text)
    return {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}


@BY_NAME
def test_arguments_are_those_of_the_template(name):
    arguments = device_functions()[name].args.args
    plain = [a.arg for a in arguments if a.annotation is None]
    constexprs = [a.arg for a in arguments if a.annotation is not None]
    assert [a.arg for a in arguments] == plain + constexprs
    assert list(functions()[name].signature) == plain
    assert list(functions()[name].constexprs) == constexprs


@BY_NAME
def test_the_language_is_that_of_the_decorator(name):
    (decorator,) = device_functions()[name].decorator_list
    expected = {"triton": "triton.jit", "gluon": "gluon.jit"}[functions()[name].language]
    assert ast.unparse(decorator) == expected


def test_every_param_is_a_constexpr_or_orders_the_tiles():
    constexprs = functions()["flash_bwd_ws"].constexprs
    params = {param.name for param in SPACE.params}
    assert params - set(constexprs) == {"GROUP_MB", "SCHEDULE"}
    for param in SPACE.params:
        for choice in param.choices:
            changed = functions(config=config_of(**{param.name: choice}))["flash_bwd_ws"]
            assert changed.constexprs.get(param.name, choice) == choice


STRIDES = {
    name: (1000 * i + 16, 1000 * i + 160, 1000 * i + 320)
    for i, name in enumerate(("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
}
CALL = Call(problem=PROBLEM, scale=0.5, strides=STRIDES, given=frozenset(TENSORS["bwd"]))


def bound(name, call=CALL, **changes):
    function = functions(call.problem, config_of(**changes))[name]
    return dict(zip(function.signature, function.bind(call), strict=True))


@BY_NAME
def test_what_is_bound_fits_the_signature(name):
    kinds = functions()[name].signature
    for argument, value in bound(name).items():
        kind = kinds[argument]
        if argument.endswith("_ptr"):
            assert value == Pointer(tensor=argument.removesuffix("_ptr"))
            wide = value.tensor in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
            assert kind == ("*bf16" if wide else "*fp32")
        elif argument.endswith("_desc"):
            assert isinstance(value, Descriptor)
            assert value.tensor == argument.removesuffix("_desc")
            dtype = "bf16" if value.dtype is None else "fp32"
            assert kind == f"tensordesc<{dtype}{list(value.block)}>"
            assert len(value.block) == len(value.shape) == len(value.strides)
        elif argument == "counter":
            assert (value, kind) == (Counter(), "*i32")
        elif argument.startswith("stride_"):
            tensor = {"o": "out", "do": "dout", "dq": "dq"}[argument.removeprefix("stride_")[:-1]]
            assert (value, kind) == (STRIDES[tensor]["bhm".index(argument[-1])], "i64")
        else:
            assert kind == ("fp32" if isinstance(value, float) else "i32")


def test_what_is_bound_by_hand():
    main = bound("flash_bwd_ws")
    expected = {
        "scale": 0.5, "scale_log2": pytest.approx(0.5 * 1.4426950408889634), "kv_heads": 4,
        "group": 4, "batch_heads": 8, "group_heads": 1, "seqlen_q": 1001, "seqlen_k": 2000,
        "padded": 1132, "lead": 3, "n_tiles": 128, "counter": Counter(),
    }  # fmt: skip
    assert {name: main[name] for name in expected} == expected
    assert main["q_desc"].shape == (2, 16, 1001, 96)
    assert main["dk_desc"].shape == main["k_desc"].shape == (2, 4, 2000, 96)
    assert main["dk_desc"].strides == (6016, 6160, 6320, 1)
    assert (main["sums_desc"].shape, main["sums_desc"].strides) == ((2 * 16 * 1132, 96), (96, 1))
    assert main["lse2_desc"].shape == (2 * 16 * 1132,)
    assert bound("flash_bwd_ws_prepare")["has_dlse"] == 1
    without = dataclasses.replace(CALL, given=CALL.given - {"dlse"})
    assert bound("flash_bwd_ws_prepare", without)["has_dlse"] == 0


def test_scratch_has_room_for_what_is_read():
    shapes = {s.name: s.shape for s in KERNEL.scratch(PROBLEM)}
    assert shapes == {
        "lse2": (2, 16, 1132), "minus_delta": (2, 16, 1132), "sums": (2, 16, 1132, 96),
    }  # fmt: skip
    # A block that starts at the last row ends inside its head's statistics.
    (most,) = (max(p.choices) for p in SPACE.params if p.name == "BLOCK_M")
    for rows in (1, 2, 3, 4, 1001, 4096):
        problem = problem_of(seqlen_q=rows)
        assert padded_rows(problem) >= lead_rows(problem) + rows - 1 + most
        assert padded_rows(problem) * 4 % 16 == 0


@pytest.mark.parametrize(("rows", "keys", "lead"), [(5, 2, 1), (2, 5, 3), (4, 8, 0), (300, 129, 1)])
def test_statistics_lie_at_multiples_of_16_bytes_from_where_a_tile_begins(rows, keys, lead):
    problem = problem_of(seqlen_q=rows, seqlen_k=keys, causal=True)
    assert lead_rows(problem) == lead
    for start in range(0, keys, 128):
        assert (lead_rows(problem) + start - keys + rows) % 4 == 0
    assert lead_rows(problem_of(seqlen_q=rows, seqlen_k=keys, causal=False)) == 0


# -- constraints -----------------------------------------------------------------------------------

REJECTED = [
    ("order of rows", H100, {}, {"SPREAD": True}, ["causal"]),
    ("order of rows", H100, {"causal": False, "seqlen_k": 128}, {"SPREAD": True}, ["one tile"]),
    ("hardware", A100, {}, {}, ["sm_80", "flash_bwd serves"]),
    ("hardware", B200, {}, {}, ["sm_100", "flash_bwd serves"]),
    ("hardware", H100, {"dtype": "float32"}, {}, ["float32", "float16 or bfloat16"]),
    ("hardware", H100, {"head_dim_v": 64}, {}, ["96", "64", "equal", "flash_bwd serves"]),
    ("hardware", H100, {"head_dim": 192, "head_dim_v": 192}, {}, ["192", "128", "registers"]),
    ("hardware", H100, {"head_dim": 60, "head_dim_v": 60}, {}, ["60", "16 bytes"]),
    ("hardware", H100, {"batch": 2**17, "seqlen_q": 1024}, {}, ["2^31", "flash_bwd serves"]),
    ("rows of dq", H100, {}, {"DQ_SPLIT": "rows"}, ["64 rows", "split"]),
    ("registers", H100, {}, {"BLOCK_M": 128}, ["352", "240"]),
    ("shared memory", H100, NARROW, {**ROWS_SPLIT, "STAGES": 3}, [str(227 * 1024)]),
    ("tile order", H100, {"batch": 8, "seqlen_q": 10_000}, {"GROUP_MB": 8}, ["1 heads", "as 1"]),
    ("schedule", H100, {"batch": 1}, {}, ["64 tiles", "132 SMs"]),
    ("tile order", H100, {"batch": 1}, {"GROUP_MB": 8}, ["all tiles"]),
]  # fmt: skip


def test_every_constraint_has_an_example():
    names = [constraint.name for constraint in SPACE.constraints]
    assert sorted({case[0] for case in REJECTED}) == sorted(names)


@pytest.mark.parametrize(("name", "target", "changes", "values", "words"), REJECTED)
def test_the_constraint_rejects_with_a_reason(name, target, changes, values, words):
    (constraint,) = (c for c in SPACE.constraints if c.name == name)
    problem, config = problem_of(**changes), SPACE.parse(config_of(**values))
    reason = constraint.why_not(config, problem, target)
    assert reason is not None
    assert [word for word in words if word not in reason] == []
    assert SPACE.why_not(config, problem, target) is not None
    problem = problem_of(batch=4)
    assert constraint.why_not(CONFIG, problem, target if name != "hardware" else H100) is None


def test_served_where_it_can_run_beside_the_portable_one():
    assert kernels_for(PROBLEM, H100)[:2] == [KERNELS["flash_bwd"], KERNEL]
    assert kernels_for(PROBLEM, A100) == [KERNELS["flash_bwd"]]


def test_calls_that_it_can_not_answer():
    assert KERNEL.adapt(CONFIG, ALIGNED) == CONFIG
    for access in (
        Access(aligned=True, tma=False),
        Access(aligned=True, tma=True, whole=False),
        Access(aligned=True, tma=True, repeatable=True),
    ):
        assert KERNEL.adapt(CONFIG, access) is None
        assert KERNELS["flash_bwd"].adapt(KERNELS["flash_bwd"].default(PROBLEM, H100), access)


# -- defaults, example, pipeline, model ------------------------------------------------------------


@given(problems())
@example(problem_of(seqlen_q=1, seqlen_k=1, head_dim=8, head_dim_v=8))
@example(problem_of(batch=1, heads=1, kv_heads=1, seqlen_q=100_000, **NARROW))
@settings(max_examples=100, deadline=None)
def test_the_defaults_and_the_space_are_allowed(problem):
    assume(KERNEL.serves(problem, H100) is None)
    configs = KERNEL.defaults(problem, H100)
    assert configs
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert SPACE.parse(config) == config
        assert SPACE.why_not(config, problem, H100, advice=False) is None
    allowed = SPACE.configs(problem, H100)
    assert 0 < len(allowed) < 1000
    for config in allowed:
        assert sum(shared_parts(config, problem).values()) <= H100.shared_memory
        assert 1 <= group_heads(config, problem) <= problem.batch * problem.kv_heads


def test_sizes_by_hand():
    wide = problem_of(head_dim=128, head_dim_v=128)
    assert shared_parts(CONFIG, wide) == {
        "k, v": 98304, "q, dout": 65536, "statistics": 1024, "dS": 32768, "dq": 32768,
        "barriers": 2048,
    }  # fmt: skip
    assert dq_part(CONFIG, wide) == (64, 64)
    assert dq_part(config_of(BLOCK_M=128, DQ_SPLIT="rows"), problem_of(**NARROW)) == (64, 64)


def test_the_example_has_the_same_code():
    shown = KERNEL.example(PROBLEM)
    assert shown.op == "bwd"
    for one, other in zip(
        KERNEL.functions(shown, CONFIG), KERNEL.functions(PROBLEM, CONFIG), strict=True
    ):
        assert (one.signature, one.constexprs) == (other.signature, other.constexprs)


def test_the_pipeline_is_told():
    lines = KERNEL.pipeline(problem_of(head_dim=128, head_dim_v=128), config_of(TURNS=True))
    assert lines == [
        "1 warp loads, with 24 registers per thread",
        "2 consumers of 4 warps and 64 keys, 240 registers, in turns",
        "ring of 2 blocks of 64 query rows; dP issued after the exponentials; dq split by columns; "
        "a tile starts at the first row; "
        "tiles by dynamic schedule",
        "shared memory: k, v 96 KiB, q, dout 64 KiB, statistics 1 KiB, dS 32 KiB, dq 32 KiB, "
        "barriers 2 KiB",
    ]


@given(problems())
@settings(max_examples=100, deadline=None)
def test_the_model_gives_a_time(problem):
    assume(KERNEL.serves(problem, H100) is None)
    config = KERNEL.default(problem, H100)
    assert KERNEL.estimate_blocks_per_sm(problem, config, H100) == 1
    ms = KERNEL.estimate_ms(problem, config, H100, 1)
    assert problem.min_bytes / (H100.bandwidth_tbs * 1e12) * 1e3 <= ms < 1e12
    more = dataclasses.replace(problem, batch=4 * problem.batch)
    assert KERNEL.estimate_ms(more, config, H100, 1) > ms


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_prefers_it_to_the_portable_one(dim, causal):
    heads = 2048 // dim
    problem = problem_of(
        batch=4, heads=heads, kv_heads=heads, seqlen_q=4096, seqlen_k=4096, head_dim=dim,
        head_dim_v=dim, causal=causal,
    )  # fmt: skip
    other = KERNELS["flash_bwd"]
    config = other.default(problem, H200)
    blocks = other.estimate_blocks_per_sm(problem, config, H200)
    own = KERNEL.estimate_ms(problem, KERNEL.default(problem, H200), H200, 1)
    assert own < other.estimate_ms(problem, config, H200, blocks)
