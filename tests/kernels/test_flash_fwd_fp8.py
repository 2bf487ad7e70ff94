"""flash_fwd_fp8's declaration against its template, and its space, defaults and model."""

import ast
import dataclasses
import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.codegen.render import compiled_hash, render
from autoflash.dtypes import FP8
from autoflash.errors import ConfigError, UnsupportedError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.flash_fwd_fp8_space import needs_fnuz, shared_bytes
from autoflash.kernels.kernel import ALIGNED, TENSORS, Access, Call, Pointer, tensor_shape
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS

KERNEL = KERNELS["flash_fwd_fp8"]
SPACE = KERNEL.space
H100, L40S, MI300X = (NAMED_TARGETS[name] for name in ("h100", "l40s", "mi300x"))
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1000, seqlen_k=2000, head_dim=128, head_dim_v=64,
    dtype=FP8, causal=True, scales="block", v_layout="columns",
)  # fmt: skip
MIXED = dataclasses.replace(PROBLEM, dtype="float16", kv_dtype=FP8)
CONFIG = Config(
    BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2, GROUP_HEADS=8, FNUZ=False, maxnreg=0
)
TARGETS = [t for t in NAMED_TARGETS.values() if KERNEL.serves(PROBLEM, t) is None]


def config_of(**changes) -> Config:
    return Config(**{**CONFIG, **changes})


@st.composite
def problems(draw):
    kv_heads = draw(st.integers(1, 16))
    head_dim = draw(st.integers(1, 256))
    dtype = draw(st.sampled_from([FP8, "float16", "bfloat16"]))
    return Problem(
        batch=draw(st.integers(1, 64)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        seqlen_k=draw(st.integers(1, 300) | st.integers(1, 100_000)),
        head_dim=head_dim,
        head_dim_v=draw(st.just(head_dim) | st.integers(1, 256)),
        dtype=dtype,
        kv_dtype=FP8,
        out_dtype=draw(st.sampled_from(["float16", "bfloat16"])) if dtype == FP8 else "",
        scales=draw(st.sampled_from(["tensor", "head", "block"])),
        v_layout=draw(st.sampled_from(["rows", "columns", "permuted"])),
        causal=draw(st.booleans()),
    )


# -- drift between the template and the declaration ------------------------------------------------


@functools.cache
def kernel_arguments() -> tuple[list[str], list[str]]:
    """Names of the rendered kernel's (plain, constexpr) arguments, in order."""
    tree = ast.parse(render(KERNEL, PROBLEM, CONFIG).text)
    (function,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == KERNEL.name)
    plain = [a.arg for a in function.args.args if a.annotation is None]
    constexprs = [a.arg for a in function.args.args if a.annotation is not None]
    assert [a.arg for a in function.args.args] == plain + constexprs
    return plain, constexprs


@pytest.mark.parametrize("problem", [PROBLEM, MIXED], ids=["fp8", "mixed"])
def test_the_template_takes_what_is_declared(problem):
    plain, constexprs = kernel_arguments()
    assert list(KERNEL.signature(problem, CONFIG)) == plain
    assert list(KERNEL.constexprs(problem, CONFIG)) == constexprs
    assert set(KERNEL.divisible(problem, CONFIG)) <= set(plain)


def test_every_param_reaches_the_kernel():
    names = set(kernel_arguments()[1]) | set(KERNEL.options(config_of(maxnreg=128)))
    params = {param.name for param in SPACE.params}
    assert params <= names
    assert names - params == {
        "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "CAUSAL", "V_LAYOUT", "BLOCK_SCALES",
        "P_EXPONENT",
    }  # fmt: skip


@pytest.mark.parametrize("param", SPACE.params, ids=lambda p: p.name)
def test_every_choice_makes_another_launch(param):
    def launch(value):
        config = config_of(**{param.name: value})
        plain = KERNEL.signature(PROBLEM, config)
        return str((plain, KERNEL.constexprs(PROBLEM, config), KERNEL.options(config)))

    assert len({launch(value) for value in param.choices}) == len(param.choices)
    assert param.doc


def test_one_device_code_for_all_problems():
    hashes = {
        render(KERNEL, problem, config).kernel_hash
        for problem in (PROBLEM, MIXED, dataclasses.replace(PROBLEM, scales="head"))
        for config in (CONFIG, config_of(BLOCK_M=64, FNUZ=True))
    }
    assert len(hashes) == 1


def test_what_the_compiler_is_given_tells_problems_apart():
    changes = (
        {}, {"scales": "head"}, {"v_layout": "rows"}, {"v_layout": "permuted"},
        {"out_dtype": "float16"}, {"dtype": "float16", "kv_dtype": FP8},
        {"dtype": "bfloat16", "kv_dtype": FP8}, {"causal": False}, {"head_dim": 64},
    )  # fmt: skip
    found = {
        compiled_hash(KERNEL, dataclasses.replace(PROBLEM, **change), CONFIG) for change in changes
    }
    assert len(found) == len(changes)
    # Per tensor or per head is a matter of strides.
    one, other = (dataclasses.replace(PROBLEM, scales=s) for s in ("tensor", "head"))
    assert compiled_hash(KERNEL, one, CONFIG) == compiled_hash(KERNEL, other, CONFIG)


# -- bind ------------------------------------------------------------------------------------------

STRIDES = {
    "q": (11, 12, 13), "k": (21, 22, 23), "v": (31, 32, 33), "out": (41, 42, 43),
    "q_descale": (51, 52, 53, 54), "k_descale": (61, 62, 0, 64), "v_descale": (71, 72, 0, 74),
}  # fmt: skip
CALL = Call(problem=PROBLEM, scale=0.5, strides=STRIDES, given=frozenset(TENSORS["fwd"]))


def bound(call: Call = CALL):
    arguments = KERNEL.bind(call, CONFIG)
    names = list(KERNEL.signature(call.problem, CONFIG))
    return dict(zip(names, arguments, strict=True))


def test_bind_puts_each_value_where_its_name_is():
    values = bound()
    for tensor, first in (("q", 11), ("k", 21), ("v", 31), ("o", 41)):
        axes = "bhm" if tensor in "qo" else "bhn"
        found = [values.pop(f"stride_{tensor}{axis}") for axis in axes]
        assert found == [first, first + 1, first + 2]
    assert [values.pop(f"stride_qs{axis}") for axis in "bhgm"] == [51, 52, 53, 54]
    assert [values.pop(f"stride_ks{axis}") for axis in "bhn"] == [61, 62, 64]
    assert [values.pop(f"stride_vs{axis}") for axis in "bhn"] == [71, 72, 74]
    pointers = {name: a.tensor for name, a in values.items() if isinstance(a, Pointer)}
    assert pointers == {
        **{f"{t}_ptr": t for t in ("q", "k", "v", "out", "lse")},
        **{f"{t}_scale_ptr": f"{t}_descale" for t in "qkv"},
    }
    assert values["scale_log2"] == pytest.approx(0.5 / math.log(2), rel=1e-15)
    rest = ("heads", "group", "batch_heads", "seqlen_q", "seqlen_k")
    assert [values[name] for name in rest] == [16, 4, 32, 1000, 2000]
    flags = ("q_scaled", "k_scaled", "v_scaled", "write_lse")
    assert [values[name] for name in flags] == [1] * 4
    assert len(values) == len(pointers) + len(rest) + len(flags) + 1


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_a_descale_that_is_not_given_is_a_flag(name):
    strides = {n: s for n, s in STRIDES.items() if n != name}
    values = bound(dataclasses.replace(CALL, strides=strides, given=CALL.given - {name}))
    tensor = name[0]
    assert {n: values[f"{n}_scaled"] for n in "qkv"} == {n: int(n != tensor) for n in "qkv"}
    assert {v for n, v in values.items() if n.startswith(f"stride_{tensor}s")} == {0}


@pytest.mark.parametrize(
    ("problem", "config", "kinds"),
    [
        (PROBLEM, CONFIG, ("*fp8e4nv", "*fp8e4nv", "*fp8e4nv", "*bf16")),
        (PROBLEM, config_of(FNUZ=True), ("*u8", "*u8", "*u8", "*bf16")),
        (MIXED, CONFIG, ("*fp16", "*fp8e4nv", "*fp8e4nv", "*fp16")),
    ],
)
def test_types_of_pointers(problem, config, kinds):
    signature = KERNEL.signature(problem, config)
    assert tuple(signature[f"{t}_ptr"] for t in ("q", "k", "v", "out")) == kinds
    assert {signature[f"{t}_scale_ptr"] for t in "qkv"} == {"*fp32"}


def test_only_what_an_aligned_call_holds_is_promised():
    found = KERNEL.divisible(MIXED, CONFIG)
    assert {name for name, factor in found.items() if factor == 1} == {
        *(f"{t}_scale_ptr" for t in "qkv"),
        *(f"stride_{t}s{a}" for t, axes in (("q", "bhgm"), ("k", "bhn"), ("v", "bhn"))
          for a in axes),
    }  # fmt: skip
    # 16 bytes are 16 elements of fp8, and 8 of 16 bits.
    assert {name for name, factor in found.items() if factor == 16} == {
        f"stride_{t}{a}" for t in "kv" for a in "bhn"
    }
    assert KERNEL.divisible(PROBLEM, CONFIG)["stride_qm"] == 16


def test_the_shape_of_v_is_that_of_its_layout():
    assert tensor_shape("v", PROBLEM) == (2, 4, 64, 2000)
    ragged = dataclasses.replace(PROBLEM, seqlen_k=1999)
    assert tensor_shape("v", ragged) == (2, 4, 64, 2000)
    assert tensor_shape("v", dataclasses.replace(ragged, v_layout="rows")) == (2, 4, 1999, 64)


def test_unaligned_tensors_are_served_by_the_same_config():
    assert KERNEL.adapt(CONFIG, Access(aligned=False, tma=False)) == CONFIG
    assert KERNEL.adapt(CONFIG, ALIGNED) == CONFIG


# -- what is served --------------------------------------------------------------------------------


def test_kernels_of_fp8_and_of_others_are_told_apart():
    plain = dataclasses.replace(MIXED, kv_dtype="", scales="", v_layout="rows")
    assert KERNEL not in kernels_for(plain, H100)
    for problem in (PROBLEM, MIXED):
        assert {kernel.fp8 for kernel in kernels_for(problem, L40S)} == {True}
    with pytest.raises(UnsupportedError, match="flash_fwd_fp8: sm_80 has no e4m3") as caught:
        kernels_for(MIXED, NAMED_TARGETS["a100"])
    assert "flash_fwd:" not in str(caught.value)


def test_lengths_beyond_the_grid():
    huge = dataclasses.replace(PROBLEM, batch=1 << 20, heads=64, kv_heads=64, seqlen_q=1 << 20)
    assert "blocks of 16 query rows: split the batch" in KERNEL.serves(huge, H100)
    assert "the longest that is served" in KERNEL.serves(
        dataclasses.replace(PROBLEM, seqlen_k=2**31 - 1), H100
    )


@settings(max_examples=150)
@given(problem=problems(), target=st.sampled_from(TARGETS))
def test_defaults_are_feasible_and_get_more_modest(problem, target):
    found = KERNEL.defaults(problem, target)
    assert found
    for config in found:
        assert SPACE.parse(config) == config
        assert SPACE.why_not(config, problem, target) is None
        blocks = KERNEL.estimate_blocks_per_sm(problem, config, target)
        assert blocks >= 1
        assert 0 < KERNEL.estimate_ms(problem, config, target, blocks) < math.inf
        assert KERNEL.pipeline(problem, config)
    sizes = [shared_bytes(config, problem, target) for config in found]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=40)
@given(problem=problems(), target=st.sampled_from(TARGETS))
def test_the_space_holds_what_its_constraints_say(problem, target):
    configs = SPACE.configs(problem, target)
    assert configs
    for config in configs:
        # A tile of rows or keys has one scale.
        assert 128 % config["BLOCK_M"] == 128 % config["BLOCK_N"] == 0
        assert config["FNUZ"] == needs_fnuz(problem, target)
        assert shared_bytes(config, problem, target) <= target.shared_memory


def test_only_mi300_takes_e4m3fnuz_and_for_fp8_products_alone():
    assert [t.name for t in TARGETS if needs_fnuz(PROBLEM, t)] == [MI300X.name]
    assert not needs_fnuz(MIXED, MI300X)
    reason = SPACE.why_not(CONFIG, PROBLEM, MI300X)
    assert reason == "matrix unit: the matrix unit of gfx942 takes e4m3fnuz here"
    assert "takes e4m3fn here" in SPACE.why_not(config_of(FNUZ=True), PROBLEM, H100)
    with pytest.raises(ConfigError, match="FNUZ='1': must be one of"):
        SPACE.parse({**CONFIG, "FNUZ": 1})


def test_p_fits_its_format():
    """448 and 240 are the largest numbers; P is at most 1."""

    def exponent(problem, **changes):
        return KERNEL.constexprs(problem, config_of(**changes))["P_EXPONENT"]

    assert (exponent(PROBLEM), exponent(PROBLEM, FNUZ=True), exponent(MIXED)) == (8, 7, 0)


# -- the model -------------------------------------------------------------------------------------


def test_fp8_is_faster_than_what_becomes_16_bits():
    """Where products decide."""
    long = {"seqlen_q": 16384, "seqlen_k": 16384, "causal": False}
    times = [
        KERNEL.estimate_ms(dataclasses.replace(p, **long), CONFIG, H100, 1)
        for p in (PROBLEM, MIXED, dataclasses.replace(PROBLEM, v_layout="rows"))
    ]
    assert times[0] < times[2]
    assert times[0] < times[1]


def test_short_queries_cost_what_their_keys_weigh():
    decode = dataclasses.replace(MIXED, batch=64, seqlen_q=1, seqlen_k=65536, causal=False)
    config = KERNEL.default(decode, H100)
    assert KERNEL.estimate_ms(decode, config, H100, 1) >= decode.min_bytes / 3.35e12 * 1e3
