"""flash_bwd's declaration against its template, and its space, defaults and model."""

import ast
import dataclasses
import functools
import itertools

import pytest
from hypothesis import assume, example, given, settings

from autoflash.codegen.render import render
from autoflash.errors import UnsupportedError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.flash_bwd_space import PARTS, accumulator_registers, shared_bytes
from autoflash.kernels.kernel import ALIGNED, TENSORS, Access, Call, Pointer, Scratch
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from tests.kernels.test_flash_fwd import TARGETS
from tests.kernels.test_flash_fwd import problems as forward_problems

KERNEL = KERNELS["flash_bwd"]
SPACE = KERNEL.space
A100, L40S, H100, MI300X = (NAMED_TARGETS[name] for name in ("a100", "l40s", "h100", "mi300x"))
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1000, seqlen_k=2000, head_dim=128, head_dim_v=64,
    dtype="bfloat16", causal=True, op="bwd",
)  # fmt: skip
CONFIG = Config(
    DKDV_BLOCK_M=32, DKDV_BLOCK_N=64, DKDV_WARPS=8, DKDV_STAGES=2, DQ_BLOCK_M=64, DQ_BLOCK_N=32,
    DQ_WARPS=4, DQ_STAGES=1, GROUP_HEADS=8, LOAD="pointer",
)  # fmt: skip
NAMES = ["flash_bwd_delta", "flash_bwd_dkdv", "flash_bwd_dq"]
BY_NAME = pytest.mark.parametrize("name", NAMES)
BOTH_LOADS = pytest.mark.parametrize("load", ["pointer", "tma"])


def config_of(**changes) -> Config:
    return Config(**{**CONFIG, **changes})


def problem_of(**changes) -> Problem:
    return dataclasses.replace(PROBLEM, **changes)


def problems():
    return forward_problems().map(lambda problem: dataclasses.replace(problem, op="bwd"))


def functions(problem=PROBLEM, config=CONFIG):
    return {function.name: function for function in KERNEL.functions(problem, config)}


# -- drift between the template and the declaration ------------------------------------------------


@functools.cache
def device_functions(load: str = "pointer") -> dict[str, ast.FunctionDef]:
    tree = ast.parse(render(KERNEL, PROBLEM, config_of(LOAD=load)).text)
    return {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}


def test_the_functions_are_launched_in_order():
    assert list(functions()) == NAMES
    results = [function.results for function in functions().values()]
    assert results == [{"dq", "dk", "dv"}, {"dk", "dv"}, {"dq"}]
    assert set(itertools.chain(*results)) < set(TENSORS["bwd"])


@BOTH_LOADS
@BY_NAME
def test_arguments_are_those_of_the_template(name, load):
    arguments = device_functions(load)[name].args.args
    plain = [a.arg for a in arguments if a.annotation is None]
    constexprs = [a.arg for a in arguments if a.annotation is not None]
    assert [a.arg for a in arguments] == plain + constexprs
    function = functions(config=config_of(LOAD=load))[name]
    assert list(function.signature) == plain
    assert list(function.constexprs) == constexprs


def test_every_param_is_a_constexpr_or_an_option_of_its_part():
    for part, name in zip(PARTS, NAMES[1:], strict=True):
        function = functions()[name]
        own = {p.name for p in SPACE.params if p.name.startswith(f"{part}_")}
        assert own == {f"{part}_{n}" for n in ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES")}
        for letter in "MN":
            block = f"BLOCK_{letter}"
            assert function.constexprs[block] == CONFIG[f"{part}_{block}"]
        assert function.options == {
            "num_warps": CONFIG[f"{part}_WARPS"], "num_stages": CONFIG[f"{part}_STAGES"],
        }  # fmt: skip
        assert function.constexprs["GROUP_HEADS"] == CONFIG["GROUP_HEADS"]


@pytest.mark.parametrize("param", SPACE.params, ids=lambda param: param.name)
def test_each_choice_changes_what_is_run(param):
    def everything(config):
        shown = [
            (f.name, f.signature, f.constexprs, f.options)
            for f in KERNEL.functions(PROBLEM, config)
        ]
        return str((shown, [f.grid(PROBLEM, H100) for f in KERNEL.functions(PROBLEM, config)]))

    found = {everything(config_of(**{param.name: choice})) for choice in param.choices}
    assert len(found) == len(param.choices)


STRIDES = {
    name: (10 * i + 1, 10 * i + 2, 10 * i + 3)
    for i, name in enumerate(("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
}
CALL = Call(problem=PROBLEM, scale=0.5, strides=STRIDES, given=frozenset(TENSORS["bwd"]))


def bound(name, call=CALL, load="pointer"):
    function = functions(config=config_of(LOAD=load))[name]
    return dict(zip(function.signature, function.bind(call), strict=True))


@BOTH_LOADS
@BY_NAME
def test_what_is_bound_fits_the_signature(name, load):
    short = {"do": "dout", "o": "out"}
    kinds = functions(config=config_of(LOAD=load))[name].signature
    values = bound(name, load=load)
    for argument, value in values.items():
        if argument.endswith("_ptr"):
            assert value == Pointer(tensor=argument.removesuffix("_ptr"))
            flat = argument in ("lse_ptr", "dlse_ptr", "statistics_ptr")
            assert kinds[argument] == ("*fp32" if flat else "*bf16")
        elif argument.endswith("_desc"):
            assert value.tensor == argument.removesuffix("_desc")
            assert kinds[argument] == f"tensordesc<bf16{list(value.block)}>"
            assert value.strides == (*STRIDES[value.tensor], 1)
        elif argument.startswith("stride_"):
            tensor = argument.removeprefix("stride_")[:-1]
            axis = {"b": 0, "h": 1, "m": 2, "n": 2}[argument[-1]]
            assert value == STRIDES[short.get(tensor, tensor)][axis]
            assert kinds[argument] == "i64"
        elif argument.startswith("scale"):
            assert kinds[argument] == "fp32"
        else:
            assert (type(value), kinds[argument]) == (int, "i32")
    sizes = {
        "seqlen_q": 1000, "seqlen_k": 2000, "group": 4, "heads": 16, "kv_heads": 4,
        "has_dlse": 1, "scale": 0.5, "scale_log2": pytest.approx(0.5 * 1.4426950408889634),
        "batch_heads": {"flash_bwd_dkdv": 8, "flash_bwd_dq": 32}.get(name),
    }  # fmt: skip
    for argument in sizes.keys() & values.keys():
        assert values[argument] == sizes[argument]


def test_what_is_walked_comes_through_descriptors():
    dkdv, dq = (bound(name, load="tma") for name in NAMES[1:])
    blocks = {n: v.block for n, v in (dkdv | dq).items() if n.endswith("_desc")}
    assert blocks == {
        "q_desc": (1, 1, 32, 128), "dout_desc": (1, 1, 32, 64),
        "k_desc": (1, 1, 32, 128), "v_desc": (1, 1, 32, 64),
    }  # fmt: skip
    assert dkdv["q_desc"].shape == (2, 16, 1000, 128)
    assert dq["v_desc"].shape == (2, 4, 2000, 64)
    tma = config_of(LOAD="tma")
    assert KERNEL.adapt(tma, Access(aligned=True, tma=False)) == CONFIG
    assert KERNEL.adapt(tma, ALIGNED) == tma


def test_has_dlse_is_a_flag():
    call = dataclasses.replace(CALL, given=CALL.given - {"dlse"})
    assert bound("flash_bwd_delta", call)["has_dlse"] == 0


def test_statistics_are_scratch():
    expected = Scratch(name="statistics", shape=(2, 16, 1000, 4), dtype="float32")
    assert KERNEL.scratch(PROBLEM) == (expected,)


# -- constraints -----------------------------------------------------------------------------------

REJECTED = [
    ("DKDV lengths", H100, {"seqlen_q": 16}, {}, ["DKDV_BLOCK_M=32", "16 query rows"]),
    ("DKDV lengths", H100, {"seqlen_k": 20}, {}, ["DKDV_BLOCK_N=64", "20 keys"]),
    ("DQ lengths", H100, {"seqlen_q": 20}, {}, ["DQ_BLOCK_M=64", "20 query rows"]),
    ("DKDV rows per warp", H100, {}, {"DKDV_BLOCK_N": 32}, ["8 warps", "32 rows"]),
    ("DQ rows per warp", H100, {}, {"DQ_BLOCK_M": 16, "DQ_WARPS": 8}, ["8 warps", "16 rows"]),
    ("DKDV registers", H100, {}, {"DKDV_BLOCK_N": 128, "DKDV_WARPS": 4}, ["287", "255"]),
    ("DQ registers", H100, {}, {"DQ_BLOCK_M": 128, "DQ_BLOCK_N": 64}, ["287", "255"]),
    ("DKDV shared memory", L40S, {}, {"DKDV_BLOCK_M": 128, "DKDV_STAGES": 3}, ["147456", "101376"]),
    ("DQ shared memory", L40S, {}, {"DQ_BLOCK_N": 128, "DQ_STAGES": 3}, ["147456", "101376"]),
    ("load path", A100, {}, {"LOAD": "tma"}, ["sm_80", "tensor copy"]),
    ("load path", H100, {"head_dim_v": 60}, {"LOAD": "tma"}, ["16 bytes"]),
    ("tile order", H100, {"batch": 1, "heads": 4}, {}, ["GROUP_HEADS=8", "4 heads"]),
]


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
    assert constraint.why_not(CONFIG, PROBLEM, target) is None
    # What it reads is all that it reads.
    few = Config(**{n: config[n] for n in constraint.reads})
    assert constraint.why_not(few, problem, target) == reason


@given(problems(), TARGETS)
@settings(max_examples=5, deadline=None)
def test_some_config_is_allowed(problem, target):
    assume(KERNEL.serves(problem, target) is None)
    allowed = SPACE.configs(problem, target)
    # So many are enumerated in half a second.
    assert 0 < len(allowed) < 20_000
    for config in allowed[:: max(1, len(allowed) // 20)]:
        assert SPACE.why_not(config, problem, target) is None


# -- defaults, serves, grid, example, model --------------------------------------------------------


@given(problems(), TARGETS)
@example(problem_of(seqlen_q=1, seqlen_k=1, head_dim=1, head_dim_v=1), A100)
@example(problem_of(seqlen_q=100_000, head_dim=256, head_dim_v=256), L40S)
@example(problem_of(batch=1, heads=1, kv_heads=1, head_dim=256, head_dim_v=256), MI300X)
@settings(max_examples=100, deadline=None)
def test_the_defaults_are_allowed(problem, target):
    assume(KERNEL.serves(problem, target) is None)
    configs = KERNEL.defaults(problem, target)
    assert configs
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert SPACE.parse(config) == config
        assert SPACE.why_not(config, problem, target) is None
        adapted = KERNEL.adapt(config, Access(aligned=False, tma=False))
        assert adapted == Config(**{**config, "LOAD": "pointer"})


@given(problems(), TARGETS)
@settings(max_examples=100, deadline=None)
def test_the_model_gives_a_time(problem, target):
    assume(KERNEL.serves(problem, target) is None)
    config = KERNEL.default(problem, target)
    blocks = KERNEL.estimate_blocks_per_sm(problem, config, target)
    assert 1 <= blocks <= 32
    ms = KERNEL.estimate_ms(problem, config, target, blocks)
    floor = problem.min_bytes / (target.bandwidth_tbs * 1e12) * 1e3
    assert floor <= ms < 1e12
    # More to do takes longer.
    more = dataclasses.replace(problem, batch=4 * problem.batch)
    assert KERNEL.estimate_ms(more, config, target, blocks) > ms


def test_serves_refuses_with_the_way_out():
    assert KERNEL.serves(PROBLEM, H100) is None
    assert kernels_for(PROBLEM, H100) == kernels_for(PROBLEM, A100) == [KERNEL]
    assert "float16 or bfloat16" in KERNEL.serves(problem_of(dtype="float32"), H100)
    assert "2147483136" in KERNEL.serves(problem_of(seqlen_k=2**31 - 511), H100)
    many = problem_of(batch=2**20, heads=4096, kv_heads=4096)
    assert "split the batch" in KERNEL.serves(many, H100)
    turing = dataclasses.replace(A100, arch="sm_75")
    with pytest.raises(UnsupportedError, match="flash_bwd: sm_75 is older than sm_80"):
        kernels_for(PROBLEM, turing)


def test_the_grids_cover_rows_and_keys():
    grids = [function.grid(PROBLEM, H100) for function in functions().values()]
    # delta: 32 rows; dk, dv: 64 keys of each key/value head; dq: 64 rows of each head.
    assert grids == [2 * 16 * 32, 2 * 4 * 32, 2 * 16 * 16]


def test_the_example_has_the_same_code():
    shown = KERNEL.example(PROBLEM)
    assert shown.op == "bwd"
    for one, other in zip(
        KERNEL.functions(shown, CONFIG), KERNEL.functions(PROBLEM, CONFIG), strict=True
    ):
        assert (one.signature, one.constexprs) == (other.signature, other.constexprs)


def test_the_pipeline_is_told_for_each_part():
    lines = KERNEL.pipeline(PROBLEM, CONFIG)
    assert [line.split(":")[0] for line in lines] == ["delta, lse", "dk, dv", "dq"]
    assert "8 warps for 64 keys, 32 query rows a step, 2 stages of" in lines[1]


def test_sizes_by_hand():
    # 64 keys of 128 + 64 sums, and twice 64 x 32 scores, over 256 threads.
    assert accumulator_registers(CONFIG, "DKDV", PROBLEM, H100) == 64
    assert accumulator_registers(CONFIG, "DQ", PROBLEM, H100) == 64 * (128 + 64) / 128
    # The keys' own, and two stages of rows, of 192 numbers of 2 bytes.
    assert shared_bytes(CONFIG, "DKDV", PROBLEM, H100) == (64 + 2 * 32) * 384
    assert shared_bytes(CONFIG, "DKDV", PROBLEM, A100) == 2 * 32 * 384
