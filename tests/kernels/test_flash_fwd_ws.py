"""flash_fwd_ws's declaration against its template, and its space, defaults and model."""

import ast
import dataclasses
import functools
import itertools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autoflash.codegen.render import render
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.flash_fwd_ws_space import (
    depth,
)
from autoflash.kernels.hopper_tiles import consumer_registers, group_heads, shared_parts, tile_count
from autoflash.kernels.kernel import ALIGNED, TENSORS, Access, Call, Counter, Descriptor, Pointer
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS

KERNEL = KERNELS["flash_fwd_ws"]
SPACE = KERNEL.space
A100, H100, H200, B200 = (NAMED_TARGETS[name] for name in ("a100", "h100", "h200", "b200"))
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1000, seqlen_k=2000, head_dim=128, head_dim_v=128,
    dtype="bfloat16", causal=True,
)  # fmt: skip
CONFIG = Config(
    CONSUMERS=2, PACK_HEADS=1, BLOCK_N=128, STAGES=2, OVERLAP=True, Q_IN_REGISTERS=False,
    SCHEDULE="dynamic", GROUP_MB=8, STAGING="own", PV_WAIT="middle", PING_PONG="none",
    LOADER_REGISTERS=24, EXP2_BY_FMA=0, RESCALE_ABOVE=8,
)  # fmt: skip
# STAGING and SCHEDULE of every variant.
VARIANTS = list(itertools.product(("own", "direct"), ("persistent", "dynamic")))
EACH_VARIANT = pytest.mark.parametrize(("staging", "schedule"), VARIANTS)


def config_of(**changes) -> Config:
    return Config(**{**CONFIG, **changes})


def problem_of(**changes) -> Problem:
    return dataclasses.replace(PROBLEM, **changes)


@st.composite
def problems(draw):
    """Problems that the kernel serves on sm_90."""
    kv_heads = draw(st.integers(1, 16))
    head_dim = draw(st.integers(1, 32)) * 8
    return Problem(
        batch=draw(st.integers(1, 64)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 8, 12])),
        kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        seqlen_k=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        head_dim=head_dim,
        head_dim_v=draw(st.just(head_dim) | st.integers(1, 32).map(lambda n: 8 * n)),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()),
    )


# -- drift between the template and the declaration ------------------------------------------------


@functools.cache
def kernel_arguments(staging: str, schedule: str) -> tuple[list[str], list[str]]:
    """Names of the rendered kernel's (plain, constexpr) arguments, in order."""
    text = render(KERNEL, PROBLEM, config_of(STAGING=staging, SCHEDULE=schedule)).text
    (function,) = (
        f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == KERNEL.name
    )
    arguments = function.args
    assert [arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg] == [[], [], None]
    plain = [a.arg for a in arguments.args if a.annotation is None]
    constexprs = [a.arg for a in arguments.args if a.annotation is not None]
    assert {ast.unparse(a.annotation) for a in arguments.args if a.annotation} == {"gl.constexpr"}
    assert [a.arg for a in arguments.args] == plain + constexprs
    return plain, constexprs


@EACH_VARIANT
def test_the_template_takes_the_declared_constexprs(staging, schedule):
    config = config_of(STAGING=staging, SCHEDULE=schedule)
    assert list(KERNEL.constexprs(PROBLEM, config)) == kernel_arguments(staging, schedule)[1]


@EACH_VARIANT
def test_the_template_takes_the_declared_arguments(staging, schedule):
    config = config_of(STAGING=staging, SCHEDULE=schedule)
    assert list(KERNEL.signature(PROBLEM, config)) == kernel_arguments(staging, schedule)[0]


@EACH_VARIANT
def test_every_param_reaches_the_kernel_or_its_launch(staging, schedule):
    names = set(kernel_arguments(staging, schedule)[1])
    params = {param.name for param in SPACE.params}
    assert params - names == {"SCHEDULE", "GROUP_MB"}
    assert names - params == {
        "BLOCK_D",
        "DEPTH",
        "BLOCK_DV",
        "HEAD_DIM_V",
        "CAUSAL",
        "CONSUMER_REGISTERS",
    }


@pytest.mark.parametrize("param", SPACE.params, ids=lambda p: p.name)
def test_every_choice_makes_another_launch(param):
    problem = problem_of(heads=256, kv_heads=32, seqlen_k=4096)
    strides = dict.fromkeys(("q", "k", "v", "out"), (1 << 20, 1 << 10, 8))
    call = Call(problem=problem, scale=1.0, strides=strides, given=frozenset(TENSORS["fwd"]))

    def launch(value):
        config = config_of(**{param.name: value})
        parts = (KERNEL.signature(problem, config), KERNEL.constexprs(problem, config))
        return str((*parts, KERNEL.bind(call, config), KERNEL.grid(problem, config, H100)))

    assert len({launch(value) for value in param.choices}) == len(param.choices)
    assert param.doc


@pytest.mark.parametrize(("dim", "block"), [(8, 64), (64, 64), (72, 128), (192, 256), (256, 256)])
def test_dims_are_padded_to_a_power_of_two_of_at_least_64(dim, block):
    values = KERNEL.constexprs(problem_of(head_dim=dim, head_dim_v=256), CONFIG)
    assert (values["BLOCK_D"], values["BLOCK_DV"], values["HEAD_DIM_V"]) == (block, 256, 256)
    values = KERNEL.constexprs(problem_of(head_dim=256, head_dim_v=dim), CONFIG)
    assert (values["BLOCK_DV"], values["BLOCK_D"], values["HEAD_DIM_V"]) == (block, 256, dim)


@pytest.mark.parametrize(
    ("consumers", "loader", "registers"), [(2, 24, 240), (2, 40, 232), (3, 24, 160), (3, 40, 152)]
)
def test_consumers_get_what_the_loader_leaves(consumers, loader, registers):
    config = config_of(CONSUMERS=consumers, LOADER_REGISTERS=loader)
    assert consumer_registers(config) == registers
    assert KERNEL.constexprs(PROBLEM, config)["CONSUMER_REGISTERS"] == registers
    # Consumers, loader and what rounds the loader's warp up to a warpgroup fill the SM.
    assert (consumers * registers + loader) * 128 <= 65536


# -- bind ------------------------------------------------------------------------------------------

CALL = Call(
    problem=PROBLEM,
    scale=0.5,
    strides={"q": (80, 72, 64), "k": (56, 48, 40), "v": (32, 24, 16), "out": (104, 96, 88)},
    given=frozenset(TENSORS["fwd"]),
)


def bound(call: Call = CALL, **changes):
    config = config_of(**changes)
    arguments = KERNEL.bind(call, config)
    names = list(KERNEL.signature(call.problem, config))
    assert len(arguments) == len(names)
    return dict(zip(names, arguments, strict=True))


@EACH_VARIANT
def test_bind_puts_each_value_where_its_name_is(staging, schedule):
    values = bound(STAGING=staging, SCHEDULE=schedule)
    direct = staging == "direct"
    pointers = {name: a.tensor for name, a in values.items() if isinstance(a, Pointer)}
    assert pointers == {"lse_ptr": "lse"} | ({"out_ptr": "out"} if direct else {})
    descriptors = {name: a.tensor for name, a in values.items() if isinstance(a, Descriptor)}
    tensors = ["q", "k", "v", *([] if direct else ["out"])]
    assert descriptors == {f"{t}_desc": t for t in tensors}
    counters = [name for name, a in values.items() if isinstance(a, Counter)]
    assert counters == (["counter"] if schedule == "dynamic" else [])
    if direct:
        assert [values[f"stride_o{axis}"] for axis in "bhm"] == [104, 96, 88]
    assert values["scale_log2"] == pytest.approx(0.5 / math.log(2), rel=1e-15)
    sizes = ("heads", "group", "n_heads", "seqlen_q", "seqlen_k", "n_tiles", "write_lse")
    assert [values[name] for name in sizes] == [16, 4, 32, 1000, 2000, 32 * 8, 1]


@EACH_VARIANT
def test_the_kinds_of_the_arguments_are_those_of_the_signature(staging, schedule):
    kinds = KERNEL.signature(PROBLEM, config_of(STAGING=staging, SCHEDULE=schedule))
    for name, value in bound(STAGING=staging, SCHEDULE=schedule).items():
        if isinstance(value, Pointer):
            assert kinds[name] == ("*fp32" if name == "lse_ptr" else "*bf16")
        elif isinstance(value, Counter):
            assert kinds[name] == "*i32"
        elif isinstance(value, Descriptor):
            assert kinds[name] == f"tensordesc<bf16{list(value.block)}>"
        elif isinstance(value, float):
            assert kinds[name] == "fp32"
        else:
            assert kinds[name] == ("i64" if name.startswith("stride_") else "i32")


def test_write_lse_is_a_flag():
    assert bound(dataclasses.replace(CALL, given=CALL.given - {"lse"}))["write_lse"] == 0


def test_descriptors_say_shape_strides_and_block():
    values = bound(BLOCK_N=64)
    assert values["q_desc"] == Descriptor(
        tensor="q", shape=(2, 16, 1000, 128), strides=(80, 72, 64, 1), block=(1, 1, 64, 128)
    )
    assert values["k_desc"] == Descriptor(
        tensor="k", shape=(2, 4, 2000, 128), strides=(56, 48, 40, 1), block=(1, 1, 64, 128)
    )
    assert values["v_desc"] == Descriptor(
        tensor="v", shape=(2, 4, 2000, 128), strides=(32, 24, 16, 1), block=(1, 1, 64, 128)
    )
    assert values["out_desc"] == Descriptor(
        tensor="out", shape=(2, 16, 1000, 128), strides=(104, 96, 88, 1), block=(1, 1, 64, 128)
    )


def test_packed_heads_are_a_dimension_of_their_own():
    problem = problem_of(head_dim=192, head_dim_v=72)
    values = bound(dataclasses.replace(CALL, problem=problem), PACK_HEADS=4)
    assert values["q_desc"] == Descriptor(
        tensor="q", shape=(2, 4, 1000, 4, 192), strides=(80, 4 * 72, 64, 72, 1),
        block=(1, 1, 16, 4, 256),
    )  # fmt: skip
    assert values["out_desc"] == Descriptor(
        tensor="out", shape=(2, 4, 1000, 4, 72), strides=(104, 4 * 96, 88, 96, 1),
        block=(1, 1, 16, 4, 128),
    )  # fmt: skip
    assert values["k_desc"].shape == (2, 4, 2000, 192)
    # 32 rows of 4 heads in each of 2 * 16 / 4 heads.
    assert (values["n_heads"], values["n_tiles"]) == (8, 8 * 32)


def test_a_dimension_of_size_one_gets_a_stride_that_the_copy_engine_takes():
    problem = problem_of(batch=1, heads=4, kv_heads=1, seqlen_q=1)
    strides = {"q": (0, 128, 0), "k": (0, 0, 128), "v": (0, 0, 64), "out": (0, 64, 0)}
    for packed in (1, 4):
        call = dataclasses.replace(CALL, problem=problem, strides=strides)
        values = bound(call, PACK_HEADS=packed)
        for name in ("q_desc", "k_desc", "v_desc", "out_desc"):
            assert all(s > 0 and s * 2 % 16 == 0 for s in values[name].strides[:-1])
            assert values[name].strides[-1] == 1
    assert values["q_desc"].strides[3] == 128


@pytest.mark.parametrize(
    ("changes", "values", "expected"),
    [
        # 2000 keys of 2 * 128 numbers are 1 MB: 16 MiB hold 16 pairs, that 4 query heads share.
        ({"heads": 256, "kv_heads": 64}, {}, 64),
        ({"heads": 256, "kv_heads": 64}, {"GROUP_MB": 32}, 128),
        ({"heads": 256, "kv_heads": 64}, {"PACK_HEADS": 4}, 16),
        ({"heads": 256, "kv_heads": 64}, {"PACK_HEADS": 2}, 32),
        # never more than there are, never none
        ({}, {}, 32),
        ({}, {"PACK_HEADS": 4}, 8),
        ({"seqlen_k": 1_000_000, "kv_heads": 16}, {}, 1),
        ({"seqlen_k": 1_000_000}, {}, 4),
    ],
)
def test_heads_side_by_side(changes, values, expected):
    config = config_of(**{"GROUP_MB": 16, **values})
    assert group_heads(config, problem_of(**changes)) == expected


@pytest.mark.parametrize(
    ("dim", "columns"),
    [(8, 48), (40, 48), (56, 64), (64, 64), (72, 80), (96, 96), (104, 128), (128, 128), (160, 160),
     (192, 192), (200, 256), (256, 256)],
)  # fmt: skip
def test_products_go_over_few_columns_of_padding(dim, columns):
    assert depth(problem_of(head_dim=dim)) == columns


# -- constraints -----------------------------------------------------------------------------------

WIDE = {"head_dim": 256, "head_dim_v": 256}
NARROW = {"head_dim": 64, "head_dim_v": 64}
# constraint: (target, changes of PROBLEM, changes of CONFIG, words of the reason).
REJECTED = {
    "hardware": [
        (A100, {}, {}, ["sm_80", "flash_fwd serves"]),
        (B200, {}, {}, ["sm_100", "flash_fwd serves"]),
        (NAMED_TARGETS["mi300x"], {}, {}, ["gfx942", "flash_fwd serves"]),
        (H100, {"head_dim": 100}, {}, ["head_dim=100", "16 bytes", "flash_fwd serves"]),
        (H100, {"head_dim_v": 4}, {}, ["head_dim_v=4", "16 bytes", "flash_fwd serves"]),
        (H100, {"dtype": "float32"}, {}, ["float32", "float16 or bfloat16"]),
    ],
    "packed heads": [
        (H100, {}, {"PACK_HEADS": 8}, ["8", "4 query heads"]),
        (H100, {"kv_heads": 16}, {"PACK_HEADS": 2}, ["2", "1 query heads"]),
    ],
    "most heads": [(H100, {}, {"PACK_HEADS": 2}, ["between"])],
    "query rows": [
        (H100, {"seqlen_q": 128}, {"CONSUMERS": 3}, ["3 consumers", "128 rows"]),
        (H100, {"seqlen_q": 30}, {"CONSUMERS": 3, "PACK_HEADS": 4}, ["3 consumers", "120 rows"]),
        (H100, {"seqlen_q": 192}, {"CONSUMERS": 4}, ["4 consumers", "192 rows"]),
    ],
    "keys": [(H100, {"seqlen_k": 64}, {"BLOCK_N": 128}, ["128", "64 keys"])],
    "steps": [(H100, {}, {"BLOCK_N": 64}, ["10 %", "128"])],
    "queries": [(H100, {}, {"Q_IN_REGISTERS": True}, ["6 %"])],
    "slices of q": [(H100, {"head_dim": 40, "head_dim_v": 40}, {"Q_IN_REGISTERS": True}, ["40"])],
    "registers": [
        (H100, {}, {"CONSUMERS": 3}, ["192", "160"]),
        (H100, WIDE, {"BLOCK_N": 128}, ["256", "240"]),
        (H100, WIDE, {"BLOCK_N": 64, "CONSUMERS": 3}, ["208", "160"]),
        (H100, NARROW, {"CONSUMERS": 4}, ["160", "112"]),
    ],
    "schedule": [
        (H100, {"batch": 1}, {}, ["128 tiles", "132"]),
        (H100, {"batch": 1, "causal": False}, {"SCHEDULE": "persistent"}, ["128 tiles"]),
        (H100, {}, {"SCHEDULE": "persistent"}, ["causal", "10 to 30 %"]),
    ],
    "ring": [
        (H100, {"seqlen_k": 200}, {"SCHEDULE": "grid", "STAGES": 3}, ["3 stages", "2 blo"]),
        (H100, {}, {"STAGES": 4}, ["512 keys", "384"]),
    ],
    "tile order": [
        (H100, {}, {"GROUP_MB": 16}, ["32 heads", "8"]),
        (H100, {"batch": 1}, {"SCHEDULE": "grid", "GROUP_MB": 64}, ["all tiles"]),
    ],
    "shared memory": [
        (H100, {}, {"STAGES": 3}, ["263168", str(227 * 1024)]),
        (H100, WIDE, {"BLOCK_N": 64}, [str(227 * 1024)]),
    ],
    "staging": [
        (H100, {}, {"STAGING": "query"}, ["=own", "4 %"]),
        (H100, {}, {"STAGING": "direct"}, ["=own", "4 %"]),
        (H100, {}, {"STAGING": "half"}, ["=own", "4 %"]),
        (H100, WIDE, {"BLOCK_N": 64, "STAGING": "query"}, ["=half", "4 %"]),
    ],
    "halves of out": [(H100, NARROW, {"STAGING": "half"}, ["64", "narrow"])],
    "q's place": [
        (H100, {"head_dim": 192, "head_dim_v": 128}, {"STAGING": "query", "STAGES": 3}, ["256"]),
        (H100, WIDE, {"STAGING": "query", "Q_IN_REGISTERS": True}, ["filled again"]),
    ],
    "overlap": [
        (H100, {}, {"OVERLAP": False}, ["2 consumers", "13 %"]),
        (H100, NARROW, {"CONSUMERS": 4, "BLOCK_N": 64}, ["four consumers", "10 %"]),
        (H100, NARROW, {"OVERLAP": False, "CONSUMERS": 3, "PING_PONG": "done"}, ["together"]),
        (H100, NARROW, {"OVERLAP": False, "CONSUMERS": 3, "PV_WAIT": "end"}, ["in step"]),
    ],
    "loader registers": [
        (H100, {}, {"LOADER_REGISTERS": 40, "SCHEDULE": "grid"}, ["40", "counter"]),
    ],
    "exponentials": [
        (H100, {}, {"EXP2_BY_FMA": 8}, ["above 64"]),
        (H100, NARROW, {"EXP2_BY_FMA": 8, "CONSUMERS": 3}, ["more than two"]),
    ],
}  # fmt: skip
REJECTED_CASES = [
    pytest.param(name, *case, id=f"{name} {number}")
    for name, cases in REJECTED.items()
    for number, case in enumerate(cases)
]


def test_every_constraint_has_an_example():
    assert list(REJECTED) == [constraint.name for constraint in SPACE.constraints]


@pytest.mark.parametrize(("name", "target", "changes", "values", "words"), REJECTED_CASES)
def test_the_constraint_rejects_with_a_reason(name, target, changes, values, words):
    (constraint,) = (c for c in SPACE.constraints if c.name == name)
    problem, config = problem_of(**changes), SPACE.parse(config_of(**values))
    reason = constraint.why_not(config, problem, target)
    assert reason is not None
    assert [word for word in words if word not in reason] == []
    assert SPACE.why_not(config, problem, target) is not None
    assert config not in SPACE.configs(problem, target)


@pytest.mark.parametrize("name", [constraint.name for constraint in SPACE.constraints])
def test_the_constraint_lets_a_good_config_through(name):
    (constraint,) = (c for c in SPACE.constraints if c.name == name)
    for target in (H100, H200):
        assert constraint.why_not(CONFIG, PROBLEM, target) is None
    packed = config_of(PACK_HEADS=4, STAGES=3, STAGING="direct")
    assert constraint.why_not(packed, PROBLEM, H100) is None


# What was measured to be best (docs/hopper-forward.md) must stay in the space.
THREE = {"STAGES": 3, "CONSUMERS": 3, "PING_PONG": "done"}
FOUR = {"STAGES": 4, "CONSUMERS": 4, "PING_PONG": "done", "BLOCK_N": 64}
BEST = [
    (128, False, 4096, {"GROUP_MB": 16}),
    (128, True, 16384, {"PV_WAIT": "middle", "GROUP_MB": 16}),
    (256, False, 4096, {"BLOCK_N": 64, "STAGING": "half"}),
    (256, True, 16384, {"BLOCK_N": 64, "STAGING": "half", "GROUP_MB": 1}),
    (64, True, 1024, FOUR),
    (64, True, 4096, FOUR),
    (64, False, 4096, THREE),
    (64, True, 16384, THREE),
]


def of_16384_tokens(dim: int, causal: bool, length: int) -> Problem:
    heads = 2048 // dim
    return problem_of(
        batch=16384 // length, heads=heads, kv_heads=heads, seqlen_q=length, seqlen_k=length,
        head_dim=dim, head_dim_v=dim, causal=causal,
    )  # fmt: skip


@pytest.mark.parametrize(("dim", "causal", "length", "values"), BEST)
def test_what_was_measured_to_be_best_is_allowed(dim, causal, length, values):
    problem = of_16384_tokens(dim, causal, length)
    assert SPACE.why_not(config_of(**values), problem, H200) is None


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_a_space_is_small_enough_to_be_searched(dim):
    for causal, length, group in itertools.product((False, True), (1024, 16384), (1, 8)):
        problem = of_16384_tokens(dim, causal, length)
        problem = dataclasses.replace(problem, heads=16 * group, kv_heads=16)
        assert 20 <= len(SPACE.configs(problem, H200)) <= 5000


@given(problems())
@settings(max_examples=30, deadline=None)
def test_some_config_is_allowed_and_all_of_them_fit(problem):
    allowed = SPACE.configs(problem, H100)
    assert allowed
    for config in allowed:
        assert sum(shared_parts(config, problem).values()) <= H100.shared_memory
        assert config["SCHEDULE"] == "grid" or tile_count(config, problem) > H100.sm_count


# -- defaults --------------------------------------------------------------------------------------


@given(problems())
@example(problem_of(seqlen_q=1, seqlen_k=1, head_dim=8, head_dim_v=8))
@example(problem_of(seqlen_q=100_000, head_dim=256, head_dim_v=256))
@example(problem_of(batch=1, heads=1, kv_heads=1, head_dim=192, head_dim_v=256))
@example(problem_of(batch=1, heads=24, kv_heads=2, seqlen_q=3, seqlen_k=4000))
@settings(max_examples=300, deadline=None)
def test_the_defaults_are_allowed(problem):
    configs = KERNEL.defaults(problem, H100)
    assert configs
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert SPACE.parse(config) == config
        assert SPACE.why_not(config, problem, H100) is None
    # The last needs no counter, no rescaling by inline assembly and the fewest registers.
    assert (configs[-1]["SCHEDULE"], configs[-1]["RESCALE_ABOVE"]) == ("grid", 0)
    assert (configs[-1]["CONSUMERS"], configs[-1]["PV_WAIT"]) == (2, "end")
    assert KERNEL.defaults(problem, H100) == configs


@pytest.mark.parametrize(("dim", "causal", "length", "values"), BEST)
def test_the_default_is_what_was_measured_to_be_best(dim, causal, length, values):
    config = KERNEL.default(of_16384_tokens(dim, causal, length), H200)
    assert {name: config[name] for name in values} == values
    assert config["RESCALE_ABOVE"] == 8


def test_few_rows_pack_the_heads_of_a_group():
    decode = problem_of(seqlen_q=1, heads=32, kv_heads=4)
    assert KERNEL.default(decode, H100)["PACK_HEADS"] == 8
    assert KERNEL.default(problem_of(seqlen_q=1, heads=12, kv_heads=4), H100)["PACK_HEADS"] == 1
    assert KERNEL.default(PROBLEM, H100)["PACK_HEADS"] == 1


# -- serves, grid, example, adapt, pipeline --------------------------------------------------------


def test_serves_refuses_with_the_way_out():
    assert KERNEL.serves(PROBLEM, H100) is None
    assert KERNEL in kernels_for(PROBLEM, H100)
    for target in (A100, B200, NAMED_TARGETS["l40s"], NAMED_TARGETS["mi300x"]):
        assert "flash_fwd serves it" in KERNEL.serves(PROBLEM, target)
        assert KERNEL not in kernels_for(PROBLEM, target)
    assert "float16 or bfloat16" in KERNEL.serves(problem_of(dtype="float32"), H100)
    assert "head_dim=36" in KERNEL.serves(problem_of(head_dim=36), H100)
    for name in ("seqlen_q", "seqlen_k"):
        longer = problem_of(batch=1, heads=1, kv_heads=1, **{name: 2**31 - 511})
        assert KERNEL.serves(longer, H100).startswith("a length of 2147483137: the longest")


def test_serves_knows_how_many_tiles_can_be_numbered():
    most = problem_of(batch=2**30, heads=1, kv_heads=1, seqlen_q=128)
    assert KERNEL.serves(most, H100) is None
    assert tile_count(CONFIG, most) == 2**30
    assert "split the batch" in KERNEL.serves(dataclasses.replace(most, seqlen_q=129), H100)
    # The number of the next tile, a program's stride further, is a 32-bit number too.
    assert 2**30 + KERNEL.grid(most, config_of(SCHEDULE="grid"), H100) <= 2**31


@pytest.mark.parametrize(
    ("rows", "consumers", "packed", "tiles"),
    [(1, 2, 1, 96), (128, 2, 1, 96), (129, 2, 1, 192), (129, 3, 1, 96), (4096, 2, 4, 24 * 128)],
)
def test_the_grid(rows, consumers, packed, tiles):
    problem = problem_of(batch=6, seqlen_q=rows)
    config = config_of(CONSUMERS=consumers, PACK_HEADS=packed, SCHEDULE="grid")
    assert KERNEL.grid(problem, config, H100) == tiles
    for schedule in ("persistent", "dynamic"):
        persistent = Config(**{**config, "SCHEDULE": schedule})
        assert KERNEL.grid(problem, persistent, H100) == min(tiles, 132)
        half = dataclasses.replace(H100, sm_count=66)
        assert KERNEL.grid(problem, persistent, half) == min(tiles, 66)


@given(problems())
@settings(max_examples=50, deadline=None)
def test_the_example_has_the_same_code_and_can_be_packed_alike(problem):
    shown = KERNEL.example(problem)
    for name in ("op", "dtype", "causal", "head_dim", "head_dim_v"):
        assert getattr(shown, name) == getattr(problem, name)
    assert (shown.batch, shown.heads, shown.seqlen_q, shown.seqlen_k) == (4, 16, 4096, 4096)
    for packed in (1, 2, 4, 8):
        assert (problem.group % packed == 0) == (shown.group % packed == 0)
    assert KERNEL.signature(shown, CONFIG) == KERNEL.signature(problem, CONFIG)
    assert KERNEL.constexprs(shown, CONFIG) == KERNEL.constexprs(problem, CONFIG)


def test_tensors_that_the_copy_engine_can_not_read_can_not_be_run():
    assert KERNEL.adapt(CONFIG, ALIGNED) == CONFIG
    assert KERNEL.adapt(CONFIG, Access(aligned=True, tma=False)) is None
    assert KERNEL.adapt(CONFIG, Access(aligned=False, tma=False)) is None


def test_the_pipeline_is_told():
    assert KERNEL.pipeline(PROBLEM, CONFIG) == [
        "1 warp loads, with 24 registers per thread",
        "2 consumers of 4 warps and 64 rows, 240 registers",
        "ring of 2 blocks of 128 keys; P v overlapped with the next scores",
        "tiles by dynamic schedule; out through a place of its own",
        "shared memory: q 32 KiB, k 64 KiB, v 64 KiB, out 32 KiB, barriers 1 KiB",
    ]
    turns = config_of(PACK_HEADS=4, STAGING="direct", OVERLAP=False, PING_PONG="done")
    packed = KERNEL.pipeline(PROBLEM, turns)
    assert "16 rows of 4 heads" in packed[1]
    assert packed[2].endswith("one after the other, consumers in turns")
    assert "from registers" in packed[3]
    assert "out" not in packed[4]
    assert KERNELS["flash_fwd"].pipeline(PROBLEM, KERNELS["flash_fwd"].default(PROBLEM, A100))


# -- the written model -----------------------------------------------------------------------------


def tflops(problem: Problem, config: Config) -> float:
    return problem.tflops(KERNEL.estimate_ms(problem, config, H200, 1))


@pytest.mark.parametrize(
    ("dim", "causal", "measured"),
    # 1k, 4k and 16k keys, 16384 tokens, bfloat16, one H200 (docs/hopper-forward.md).
    [
        (64, False, (440, 519, 552)),
        (64, True, (355, 473, 538)),
        (128, False, (595, 684, 692)),
        (128, True, (480, 642, 684)),
        (256, False, (664, 730, 751)),
        (256, True, (540, 690, 747)),
    ],
)
def test_the_model_is_near_what_was_measured(dim, causal, measured):
    for length, rate in zip((1024, 4096, 16384), measured, strict=True):
        problem = of_16384_tokens(dim, causal, length)
        assert tflops(problem, KERNEL.default(problem, H200)) == pytest.approx(rate, rel=0.12)


@pytest.mark.parametrize(
    ("dim", "causal", "worse"),
    [
        (128, False, {"RESCALE_ABOVE": 0}),
        (128, False, {"SCHEDULE": "grid"}),
        (128, False, {"OVERLAP": False, "PV_WAIT": "end"}),
        (128, False, {"PV_WAIT": "end"}),
        (128, False, {"BLOCK_N": 64}),
        (128, False, {"STAGING": "direct"}),
        (128, True, {"SCHEDULE": "grid"}),
        (64, False, {"EXP2_BY_FMA": 8}),
    ],
)
def test_the_model_orders_what_was_measured(dim, causal, worse):
    problem = of_16384_tokens(dim, causal, 1024)
    default = KERNEL.default(problem, H200)
    assert tflops(problem, Config(**{**default, **worse})) < 0.98 * tflops(problem, default)


@given(problems(), st.data())
@settings(max_examples=200, deadline=None)
def test_estimates_are_finite_and_positive(problem, data):
    config = data.draw(st.sampled_from(KERNEL.defaults(problem, H100)))
    assert KERNEL.estimate_blocks_per_sm(problem, config, H100) == 1
    ms = KERNEL.estimate_ms(problem, config, H100, 1)
    assert math.isfinite(ms)
    assert ms >= problem.min_bytes / H100.bandwidth_tbs * 1e-9 * (1 - 1e-9) > 0
    assert KERNEL.estimate_ms(problem, config, H100, 3) == ms


@given(problems())
@settings(max_examples=100, deadline=None)
def test_estimates_grow_with_the_lengths_and_the_batch(problem):
    def of_length(length):
        return dataclasses.replace(problem, seqlen_q=length, seqlen_k=length)

    assume(KERNEL.serves(of_length(65536), H100) is None)
    config = KERNEL.default(of_length(256), H100)
    times = [KERNEL.estimate_ms(of_length(n), config, H100, 1) for n in (256, 1024, 4096, 65536)]
    assert times == sorted(times)
    base = dataclasses.replace(problem, seqlen_q=256, seqlen_k=4096)
    more = dataclasses.replace(base, batch=base.batch * 256)
    assume(KERNEL.serves(more, H100) is None)
    config = KERNEL.default(base, H100)
    slow, fast = (KERNEL.estimate_ms(p, config, H100, 1) for p in (more, base))
    assert slow > 1.5 * fast
