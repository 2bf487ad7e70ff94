"""flash_fwd's declaration against its template, and its space, defaults and model."""

import ast
import dataclasses
import functools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autoflash.codegen.render import render
from autoflash.errors import ConfigError, UnsupportedError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.kernel import ALIGNED, TENSORS, Access, Call, Descriptor, Pointer
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS

KERNEL = KERNELS["flash_fwd"]
SPACE = KERNEL.space
A100, L40S, H100 = (NAMED_TARGETS[name] for name in ("a100", "l40s", "h100"))
MI300X = NAMED_TARGETS["mi300x"]
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1000, seqlen_k=2000, head_dim=128, head_dim_v=64,
    dtype="bfloat16", causal=True,
)  # fmt: skip
CONFIG = Config(
    BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2, LOAD="pointer", GROUP_HEADS=8,
    DIAGONAL_FIRST=False, maxnreg=0,
)  # fmt: skip
BOTH_LOADS = pytest.mark.parametrize("load", ["pointer", "tma"])


def config_of(**changes) -> Config:
    return Config(**{**CONFIG, **changes})


def problem_of(**changes) -> Problem:
    return dataclasses.replace(PROBLEM, **changes)


@st.composite
def problems(draw):
    kv_heads = draw(st.integers(1, 16))
    head_dim = draw(st.integers(1, 256))
    return Problem(
        batch=draw(st.integers(1, 64)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        seqlen_k=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        head_dim=head_dim,
        head_dim_v=draw(st.just(head_dim) | st.integers(1, 256)),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()),
    )


TARGETS = st.sampled_from(sorted(NAMED_TARGETS.values(), key=lambda t: t.name))


# -- drift between the template and the declaration ------------------------------------------------


@functools.cache
def kernel_arguments(load: str) -> tuple[list[str], list[str]]:
    """Names of the rendered kernel's (plain, constexpr) arguments, in order."""
    tree = ast.parse(render(KERNEL, PROBLEM, config_of(LOAD=load)).text)
    (function,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == KERNEL.name)
    arguments = function.args
    assert [arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg] == [[], [], None]
    plain = [a.arg for a in arguments.args if a.annotation is None]
    constexprs = [a.arg for a in arguments.args if a.annotation is not None]
    assert {ast.unparse(a.annotation) for a in arguments.args if a.annotation} == {"tl.constexpr"}
    assert [a.arg for a in arguments.args] == plain + constexprs
    return plain, constexprs


@BOTH_LOADS
def test_the_template_takes_the_declared_constexprs(load):
    assert list(KERNEL.constexprs(PROBLEM, config_of(LOAD=load))) == kernel_arguments(load)[1]


@BOTH_LOADS
def test_the_template_takes_the_declared_arguments(load):
    assert list(KERNEL.signature(PROBLEM, config_of(LOAD=load))) == kernel_arguments(load)[0]


@BOTH_LOADS
def test_every_param_reaches_the_kernel(load):
    names = set(kernel_arguments(load)[1]) | set(KERNEL.options(config_of(LOAD=load, maxnreg=128)))
    params = {param.name for param in SPACE.params}
    assert params - names == {"LOAD"}
    # and what the config doesn't say comes from the problem
    assert names - params == {
        "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "CAUSAL", "DOT_PRECISION",
    }  # fmt: skip


@pytest.mark.parametrize("param", SPACE.params, ids=lambda p: p.name)
def test_every_choice_makes_another_launch(param):
    def launch(value):
        config = config_of(**{param.name: value})
        plain = KERNEL.signature(PROBLEM, config)
        return str((plain, KERNEL.constexprs(PROBLEM, config), KERNEL.options(config)))

    assert len({launch(value) for value in param.choices}) == len(param.choices)
    assert param.doc


def test_load_is_the_variant():
    assert KERNEL.variant(PROBLEM, config_of(LOAD="tma")).template_context() == {"tma": True}
    assert KERNEL.variant(PROBLEM, config_of(LOAD="pointer")).template_context() == {"tma": False}


def test_no_register_cap_is_no_option():
    assert KERNEL.options(config_of(maxnreg=0)) == {"num_warps": 8, "num_stages": 2}
    assert KERNEL.options(config_of(maxnreg=168))["maxnreg"] == 168


@pytest.mark.parametrize(
    ("dim", "block"), [(1, 16), (16, 16), (17, 32), (63, 64), (64, 64), (72, 128), (256, 256)]
)
def test_dims_are_padded_to_a_power_of_two_of_at_least_16(dim, block):
    values = KERNEL.constexprs(problem_of(head_dim=dim, head_dim_v=256), CONFIG)
    assert (values["HEAD_DIM"], values["BLOCK_D"], values["BLOCK_DV"]) == (dim, block, 256)
    values = KERNEL.constexprs(problem_of(head_dim=256, head_dim_v=dim), CONFIG)
    assert (values["HEAD_DIM_V"], values["BLOCK_DV"], values["BLOCK_D"]) == (dim, block, 256)


# -- bind ------------------------------------------------------------------------------------------

CALL = Call(
    problem=PROBLEM,
    scale=0.5,
    strides={"q": (11, 12, 13), "k": (21, 22, 23), "v": (31, 32, 33), "out": (41, 42, 43)},
    given=frozenset(TENSORS["fwd"]),
)


def bound(load: str, call: Call = CALL):
    config = config_of(LOAD=load)
    arguments = KERNEL.bind(call, config)
    names = list(KERNEL.signature(call.problem, config))
    assert len(arguments) == len(names)
    return dict(zip(names, arguments, strict=True))


@BOTH_LOADS
def test_bind_puts_each_value_where_its_name_is(load):
    values = bound(load)
    for tensor, first in (("q", 11), ("k", 21), ("v", 31), ("o", 41)):
        axes = "bhm" if tensor in "qo" else "bhn"
        names = [f"stride_{tensor}{axis}" for axis in axes]
        if load == "pointer" or tensor in "vo":
            assert [values.pop(name) for name in names] == [first, first + 1, first + 2]
        else:
            assert not set(names) & set(values)
    pointers = {name: a.tensor for name, a in values.items() if isinstance(a, Pointer)}
    by_pointer = "qkv" if load == "pointer" else "v"
    assert pointers == {f"{t}_ptr": t for t in (*by_pointer, "out", "lse")}
    descriptors = {name: a.tensor for name, a in values.items() if isinstance(a, Descriptor)}
    assert descriptors == ({} if load == "pointer" else {f"{t}_desc": t for t in "qkv"})
    assert values["scale_log2"] == pytest.approx(0.5 / math.log(2), rel=1e-15)
    rest = ("heads", "group", "batch_heads", "seqlen_q", "seqlen_k", "write_lse")
    assert [values[name] for name in rest] == [16, 4, 32, 1000, 2000, 1]
    assert len(values) == len(pointers) + len(descriptors) + len(rest) + 1


@BOTH_LOADS
def test_write_lse_is_a_flag(load):
    assert bound(load, dataclasses.replace(CALL, given=CALL.given - {"lse"}))["write_lse"] == 0


@BOTH_LOADS
def test_the_kinds_of_the_arguments_are_those_of_the_signature(load):
    kinds = KERNEL.signature(PROBLEM, config_of(LOAD=load))
    for name, value in bound(load).items():
        if isinstance(value, Pointer):
            assert kinds[name] == ("*fp32" if name == "lse_ptr" else "*bf16")
        elif isinstance(value, Descriptor):
            assert kinds[name] == f"tensordesc<bf16{list(value.block)}>"
        elif isinstance(value, float):
            assert kinds[name] == "fp32"
        else:
            # Strides times an index can pass 2^31; lengths can't.
            assert kinds[name] == ("i64" if name.startswith("stride_") else "i32")


def test_descriptors_say_shape_strides_and_block():
    values = bound("tma")
    assert values["q_desc"] == Descriptor(
        tensor="q", shape=(2, 16, 1000, 128), strides=(11, 12, 13, 1), block=(1, 1, 128, 128)
    )
    assert values["k_desc"] == Descriptor(
        tensor="k", shape=(2, 4, 2000, 128), strides=(21, 22, 23, 1), block=(1, 1, 64, 128)
    )
    assert values["v_desc"] == Descriptor(
        tensor="v", shape=(2, 4, 2000, 64), strides=(31, 32, 33, 1), block=(1, 1, 64, 64)
    )


def test_a_dimension_of_size_one_gets_a_stride_that_the_copy_engine_takes():
    problem = problem_of(batch=1, heads=4, kv_heads=1, seqlen_q=1)
    strides = {"q": (0, 128, 0), "k": (0, 0, 128), "v": (0, 0, 64), "out": (0, 64, 0)}
    values = bound("tma", dataclasses.replace(CALL, problem=problem, strides=strides))
    for name in ("q_desc", "k_desc", "v_desc"):
        for stride, given_ in zip(values[name].strides, (*strides[name[0]], 1), strict=True):
            if given_:
                assert stride == given_
            else:
                assert stride > 0
                assert stride * 2 % 16 == 0
    # The kernel's own arithmetic keeps the zeros.
    assert [values[f"stride_v{axis}"] for axis in "bhn"] == [0, 0, 64]


# -- constraints -----------------------------------------------------------------------------------

# constraint: (target, changes of PROBLEM, changes of CONFIG, words of the reason). Without the
# changes of the config, or with the least change of it, the constraint is content.
REJECTED = {
    "query rows": [
        (H100, {"seqlen_q": 64}, {"BLOCK_M": 128}, ["128", "64 query rows"]),
        (H100, {"seqlen_q": 1}, {"BLOCK_M": 32}, ["32", "1 query rows"]),
        (H100, {"seqlen_q": 33}, {"BLOCK_M": 32}, ["32", "64-row instruction"]),
    ],
    "keys": [
        (H100, {"seqlen_k": 64}, {"BLOCK_N": 128}, ["128", "64 keys"]),
        (H100, {"seqlen_k": 1}, {"BLOCK_N": 64}, ["64", "1 keys"]),
    ],
    "rows per warp": [
        (H100, {}, {"BLOCK_M": 64, "num_warps": 8}, ["8 warps", "128"]),
        (A100, {"seqlen_q": 16}, {"BLOCK_M": 16, "num_warps": 8}, ["8 warps", "128"]),
    ],
    "load path": [
        (A100, {}, {"LOAD": "tma"}, ["sm_80", "tensor copy"]),
        (L40S, {}, {"LOAD": "tma"}, ["sm_89", "tensor copy"]),
        (MI300X, {}, {"LOAD": "tma"}, ["gfx942", "tensor copy"]),
        (H100, {"head_dim": 63}, {"LOAD": "tma"}, ["16 bytes"]),
        (H100, {"head_dim_v": 4}, {"LOAD": "tma"}, ["16 bytes"]),
    ],
    "loop order": [(H100, {"causal": False}, {"DIAGONAL_FIRST": True}, ["diagonal"])],
    "tile order": [
        (H100, {"batch": 1, "heads": 4}, {"GROUP_HEADS": 8}, ["8", "4 heads"]),
        (H100, {"batch": 1, "heads": 16}, {"GROUP_HEADS": 32}, ["32", "16 heads"]),
    ],
    "register cap": [
        (MI300X, {}, {"maxnreg": 128}, ["NVIDIA"]),
        (H100, {}, {"maxnreg": 168, "num_warps": 8}, ["168", "4 warps"]),
    ],
    "registers": [
        (H100, {"head_dim_v": 256}, {"BLOCK_M": 128, "num_warps": 4}, ["351", "255"]),
        (H100, {"head_dim_v": 128}, {"BLOCK_N": 128, "maxnreg": 128}, ["159", "128"]),
    ],
    "shared memory": [
        (H100, {"head_dim": 256, "head_dim_v": 256}, {"num_stages": 3}, [str(227 * 1024)]),
        (L40S, {"head_dim": 256, "head_dim_v": 256}, {"num_stages": 4}, [str(99 * 1024)]),
    ],
}
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
    for target in NAMED_TARGETS.values():
        assert constraint.why_not(CONFIG, PROBLEM, target) is None
    assert constraint.why_not(config_of(LOAD="tma", DIAGONAL_FIRST=True), PROBLEM, H100) is None


@given(problems(), TARGETS)
@settings(max_examples=15, deadline=None)
def test_some_config_is_allowed_and_the_list_is_exactly_those(problem, target):
    assume(KERNEL.serves(problem, target) is None)
    allowed = SPACE.configs(problem, target)
    assert allowed
    assert len(set(allowed)) == len(allowed)
    every = set(SPACE.all_configs())
    assert len(every) == SPACE.size
    for config in allowed[:: max(1, len(allowed) // 20)]:
        assert all(c.why_not(config, problem, target) is None for c in SPACE.constraints)
    rejected = sorted(every - set(allowed), key=repr)
    for config in rejected[:: len(rejected) // 20]:
        reasons = [c.why_not(config, problem, target) for c in SPACE.constraints]
        first = next(r for r in reasons if r is not None)
        assert SPACE.why_not(config, problem, target).endswith(f": {first}")


# -- default ---------------------------------------------------------------------------------------


@given(problems(), TARGETS)
@example(problem_of(seqlen_q=1, seqlen_k=1, head_dim=1, head_dim_v=1), A100)
@example(problem_of(seqlen_q=100_000, head_dim=256, head_dim_v=256), L40S)
@example(problem_of(batch=1, heads=1, kv_heads=1, head_dim=256, head_dim_v=256), MI300X)
@settings(max_examples=400, deadline=None)
def test_the_default_is_allowed(problem, target):
    assume(KERNEL.serves(problem, target) is None)
    config = KERNEL.default(problem, target)
    assert SPACE.parse(config) == config
    assert SPACE.why_not(config, problem, target) is None
    assert KERNEL.default(problem, target) == config


@given(problems(), TARGETS)
@settings(max_examples=200, deadline=None)
def test_the_default_runs_tensors_that_lie_anyhow(problem, target):
    assume(KERNEL.serves(problem, target) is None)
    config = KERNEL.default(problem, target)
    for access in (ALIGNED, Access(aligned=True, tma=False), Access(aligned=False, tma=False)):
        adapted = KERNEL.adapt(config, access)
        assert SPACE.why_not(adapted, problem, target) is None
        assert adapted["LOAD"] == "pointer" or access.tma


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("target", NAMED_TARGETS.values(), ids=lambda t: t.arch)
def test_the_default_does_not_waste_rows_or_keys(target, causal):
    for length in (1, 16, 17, 32, 33, 64, 65, 128, 4096):
        problem = problem_of(seqlen_q=length, seqlen_k=length, causal=causal)
        config = KERNEL.default(problem, target)
        assert config["BLOCK_M"] < max(17, 2 * length)
        assert config["BLOCK_N"] < max(33, 2 * length)
        if length >= 64:
            assert config["BLOCK_M"] >= 64


# -- serves, grid, example, adapt ------------------------------------------------------------------


def test_serves_refuses_with_the_way_out():
    assert KERNEL.serves(PROBLEM, H100) is None
    assert "float16 or bfloat16" in KERNEL.serves(problem_of(dtype="float32"), H100)
    turing = dataclasses.replace(A100, arch="sm_75")
    assert "sm_75 is older than sm_80" in KERNEL.serves(PROBLEM, turing)
    with pytest.raises(UnsupportedError, match="flash_fwd: sm_75 is older than sm_80"):
        kernels_for(PROBLEM, turing)
    assert KERNEL in kernels_for(PROBLEM, H100)
    assert kernels_for(PROBLEM, A100) == [KERNEL]


def test_serves_knows_the_largest_grid():
    # 2^31 - 1 programs of 16 rows are the most that the grid's first dimension takes.
    most = problem_of(batch=1, heads=1, kv_heads=1, seqlen_q=2**31 - 512, causal=False)
    assert KERNEL.serves(most, H100) is None
    more = dataclasses.replace(most, batch=17)
    assert "split the batch" in KERNEL.serves(more, H100)
    # Rounded up to a tile, a longer length would not fit in 32 bits.
    for name in ("seqlen_q", "seqlen_k"):
        longer = dataclasses.replace(most, **{name: 2**31 - 511})
        assert KERNEL.serves(longer, H100).startswith("a length of 2147483137: the longest")
    exact = problem_of(batch=2**31 - 1, heads=1, kv_heads=1, seqlen_q=16)
    assert KERNEL.serves(exact, H100) is None
    assert KERNEL.grid(exact, config_of(BLOCK_M=16), H100) == 2**31 - 1
    assert "split" in KERNEL.serves(dataclasses.replace(exact, seqlen_q=17), H100)


@pytest.mark.parametrize(
    ("rows", "block", "per_head"),
    [(1, 16, 1), (16, 16, 1), (17, 16, 2), (127, 128, 1), (128, 128, 1), (129, 128, 2),
     (4096, 64, 64), (100_000, 256, 391), (0, 64, 0)],
)  # fmt: skip
def test_the_grid_has_one_program_per_row_block_and_head(rows, block, per_head):
    problem = problem_of(batch=3, heads=6, kv_heads=2, seqlen_q=rows)
    for group in (1, 8):
        config = config_of(BLOCK_M=block, GROUP_HEADS=group)
        assert KERNEL.grid(problem, config, H100) == 18 * per_head


@given(problems())
@settings(max_examples=50, deadline=None)
def test_the_example_has_the_same_code_at_fixed_sizes(problem):
    shown = KERNEL.example(problem)
    for name in ("op", "dtype", "causal", "head_dim", "head_dim_v"):
        assert getattr(shown, name) == getattr(problem, name)
    fixed = (shown.batch, shown.heads, shown.kv_heads, shown.seqlen_q, shown.seqlen_k)
    assert fixed == (4, 16, 16, 4096, 4096)
    for load in ("pointer", "tma"):
        config = config_of(LOAD=load)
        assert KERNEL.signature(shown, config) == KERNEL.signature(problem, config)
        assert KERNEL.constexprs(shown, config) == KERNEL.constexprs(problem, config)


def test_adapt_changes_only_what_the_tensors_forbid():
    views = Access(aligned=False, tma=False)
    expanded = Access(aligned=True, tma=False)
    tma = config_of(LOAD="tma", maxnreg=128)
    assert KERNEL.adapt(tma, ALIGNED) == tma
    for access in (views, expanded):
        assert KERNEL.adapt(tma, access) == config_of(LOAD="pointer", maxnreg=0)
    capped = config_of(LOAD="pointer", maxnreg=128)
    for access in (ALIGNED, views, expanded):
        assert KERNEL.adapt(capped, access) == capped


# -- parse -----------------------------------------------------------------------------------------


def test_parse_takes_every_config_of_the_space():
    for config in SPACE.all_configs():
        assert SPACE.parse(dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"BLOCK_K": 64}, "BLOCK_K"),
        ({"block_m": 64}, "block_m"),
        ({"__class__": 64}, "__class__"),
        ({"BLOCK_M": 96}, "BLOCK_M=96"),
        ({"BLOCK_M": -128}, "BLOCK_M=-128"),
        ({"BLOCK_M": "128"}, "BLOCK_M='128'"),
        ({"BLOCK_M": 128.0}, "BLOCK_M='128.0'"),
        ({"BLOCK_M": None}, "BLOCK_M"),
        ({"BLOCK_M": [128]}, "BLOCK_M"),
        ({"num_stages": True}, "num_stages='True'"),
        ({"GROUP_HEADS": True}, "GROUP_HEADS='True'"),
        ({"maxnreg": False}, "maxnreg='False'"),
        ({"DIAGONAL_FIRST": 1}, "DIAGONAL_FIRST='1'"),
        ({"DIAGONAL_FIRST": 0}, "DIAGONAL_FIRST='0'"),
        ({"LOAD": "TMA"}, "LOAD='TMA'"),
        ({"LOAD": "tma\n"}, "LOAD="),
        ({"LOAD": "{{ 7 * 7 }}"}, "LOAD="),
    ],
)
def test_parse_refuses_what_the_space_does_not_declare(changes, named):
    with pytest.raises(ConfigError) as refusal:
        SPACE.parse({**CONFIG, **changes})
    assert named.replace("'", "") in str(refusal.value).replace("'", "")


@pytest.mark.parametrize("param", SPACE.params, ids=lambda p: p.name)
def test_parse_refuses_a_config_that_lacks_a_param(param):
    with pytest.raises(ConfigError, match=param.name):
        SPACE.parse({name: value for name, value in CONFIG.items() if name != param.name})


# -- the model -------------------------------------------------------------------------------------


CONFIGS = list(SPACE.all_configs())


def estimate(problem, config, target):
    blocks = KERNEL.estimate_blocks_per_sm(problem, config, target)
    return KERNEL.estimate_ms(problem, config, target, blocks)


@given(problems(), TARGETS, st.integers(0, SPACE.size - 1))
@settings(max_examples=300, deadline=None)
def test_estimates_are_finite_and_positive(problem, target, number):
    config = CONFIGS[number]
    blocks = KERNEL.estimate_blocks_per_sm(problem, config, target)
    assert 1 <= blocks <= 2048 // (config["num_warps"] * target.warp_size)
    for resident in {1, blocks}:
        ms = KERNEL.estimate_ms(problem, config, target, resident)
        assert math.isfinite(ms)
        # No GPU moves the bytes or does the products faster than its rates.
        bound_ms = problem.min_bytes / target.bandwidth_tbs * 1e-9
        assert ms >= bound_ms * (1 - 1e-9) > 0


@given(problems(), TARGETS)
@settings(max_examples=200, deadline=None)
def test_estimates_grow_with_the_lengths(problem, target):
    def of_length(length):
        return dataclasses.replace(problem, seqlen_q=length, seqlen_k=length)

    assume(KERNEL.serves(of_length(65536), target) is None)
    config = KERNEL.default(of_length(256), target)
    lengths = (256, 1024, 4096, 16384, 65536)
    times = [estimate(of_length(length), config, target) for length in lengths]
    assert times == sorted(times)
    # Of a single head the longest tile alone takes four times as long.
    assert times[-1] > 3 * times[-2]


@given(problems(), TARGETS)
@settings(max_examples=100, deadline=None)
@example(dataclasses.replace(PROBLEM, batch=1, heads=1, kv_heads=1, head_dim=1), MI300X)
def test_estimates_grow_with_the_keys_and_the_batch(problem, target):
    config = KERNEL.default(problem, target)
    base = dataclasses.replace(problem, seqlen_q=256, seqlen_k=4096)
    more_keys = dataclasses.replace(base, seqlen_k=16384)
    more_batch = dataclasses.replace(base, batch=base.batch * 4096)
    assert estimate(more_keys, config, target) > 1.5 * estimate(base, config, target)
    # A small base leaves most of the GPU idle, so the work grows more than the time.
    assert estimate(more_batch, config, target) > 1.5 * estimate(base, config, target)
