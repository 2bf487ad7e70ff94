"""flash_bwd_split's declaration against its template, and its space, defaults and model."""

import ast
import dataclasses

import pytest
from hypothesis import assume, example, given, settings

from autoflash.codegen.render import render
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.flash_bwd_split_space import (
    dkdv_shared,
    dq_shared,
    group_heads,
    keys_owned,
    paired,
)
from autoflash.kernels.flash_bwd_ws_space import lead_rows, padded_rows
from autoflash.kernels.kernel import ALIGNED, TENSORS, Access, Call, Descriptor, Pointer
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from tests.kernels.test_flash_fwd import problems as forward_problems

KERNEL = KERNELS["flash_bwd_split"]
SPACE = KERNEL.space
A100, H100, B200 = (NAMED_TARGETS[name] for name in ("a100", "h100", "b200"))
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=1001, seqlen_k=2000, head_dim=96, head_dim_v=96,
    dtype="bfloat16", causal=True, op="bwd",
)  # fmt: skip
WIDE = {"head_dim": 192, "head_dim_v": 192}
CONFIG = Config(
    DKDV_BLOCK_M=64, DKDV_STAGES=2, DP_EARLY=False, DQ_BLOCK_N=32, DQ_SLOTS=4, GROUP_MB=1
)  # fmt: skip
NAMES = ["flash_bwd_split_prepare", "flash_bwd_split_dkdv", "flash_bwd_split_dq"]
EACH = pytest.mark.parametrize("name", NAMES)
EACH_WIDTH = pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])


def config_of(**changes) -> Config:
    return Config(**{**CONFIG, **changes})


def problem_of(**changes) -> Problem:
    return dataclasses.replace(PROBLEM, **changes)


def problems():
    """Of each length, dtype and number of heads, with the head dims that are served."""

    def served(problem):
        dim = -(-problem.head_dim // 8) * 8
        return dataclasses.replace(problem, op="bwd", head_dim=dim, head_dim_v=dim)

    return forward_problems().map(served)


def functions(problem=PROBLEM, config=CONFIG):
    return {function.name: function for function in KERNEL.functions(problem, config)}


# -- drift between the template and the declaration ------------------------------------------------


def device_function(name: str, problem: Problem) -> ast.FunctionDef:
    tree = ast.parse(render(KERNEL, problem, CONFIG).text)
    (found,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name)
    return found


@EACH
@EACH_WIDTH
def test_arguments_are_those_of_the_template(name, changes):
    problem = problem_of(**changes)
    function, declared = device_function(name, problem), functions(problem)[name]
    plain = [a.arg for a in function.args.args if a.annotation is None]
    constexprs = [a.arg for a in function.args.args if a.annotation is not None]
    assert [a.arg for a in function.args.args] == plain + constexprs
    assert list(declared.signature) == plain
    assert list(declared.constexprs) == constexprs
    (decorator,) = function.decorator_list
    assert ast.unparse(decorator) == f"{declared.language}.jit"


@EACH_WIDTH
def test_one_template_has_two_ways(changes):
    text = render(KERNEL, problem_of(**changes), CONFIG).text
    assert ("def add_values(" in text) == paired(problem_of(**changes)) == bool(changes)
    assert ("def step(" in text) != ("def add_values(" in text)


@pytest.mark.parametrize("param", SPACE.params, ids=lambda param: param.name)
def test_each_choice_changes_what_is_run(param):
    def everything(config):
        problem = problem_of(seqlen_q=4000)
        found = [(f.name, f.constexprs, f.options) for f in KERNEL.functions(problem, config)]
        heads = [group_heads(config, problem, n) for n in (8, 32)]
        return str((found, heads))

    found = {everything(config_of(**{param.name: choice})) for choice in param.choices}
    assert len(found) == len(param.choices)


def test_each_function_names_its_results():
    results = [f.results for f in functions().values()]
    assert results == [{"dq", "dk", "dv"}, {"dk", "dv"}, {"dq"}]


STRIDES = {
    name: (1000 * i + 16, 1000 * i + 160, 1000 * i + 320)
    for i, name in enumerate(("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
}
CALL = Call(problem=PROBLEM, scale=0.5, strides=STRIDES, given=frozenset(TENSORS["bwd"]))


@EACH
def test_what_is_bound_fits_the_signature(name):
    function = functions()[name]
    for argument, value in zip(function.signature, function.bind(CALL), strict=True):
        kind = function.signature[argument]
        if argument.endswith("_ptr"):
            assert value == Pointer(tensor=argument.removesuffix("_ptr"))
            assert kind == ("*bf16" if value.tensor in ("out", "dout") else "*fp32")
        elif argument.endswith("_desc"):
            assert isinstance(value, Descriptor)
            assert value.tensor == argument.removesuffix("_desc")
            dtype = "bf16" if value.dtype is None else "fp32"
            assert kind == f"tensordesc<{dtype}{list(value.block)}>"
        elif argument.startswith("stride_"):
            tensor = {"o": "out", "do": "dout"}[argument.removeprefix("stride_")[:-1]]
            assert (value, kind) == (STRIDES[tensor]["bhm".index(argument[-1])], "i64")
        else:
            assert kind == ("fp32" if isinstance(value, float) else "i32")


def test_heads_and_grids_by_hand():
    bound = {n: dict(zip(f.signature, f.bind(CALL), strict=True)) for n, f in functions().items()}
    dkdv, dq = bound["flash_bwd_split_dkdv"], bound["flash_bwd_split_dq"]
    assert (dkdv["kv_heads"], dkdv["group"], dkdv["batch_heads"]) == (4, 4, 8)
    assert (dq["heads"], dq["group"], dq["batch_heads"]) == (16, 4, 32)
    assert dkdv["padded"] == dq["padded"] == padded_rows(PROBLEM) == 1132
    assert dkdv["lead"] == dq["lead"] == lead_rows(PROBLEM)
    # 128 keys, or 64 of wide heads; 128 rows.
    assert functions()["flash_bwd_split_dkdv"].grid(PROBLEM, H100) == 8 * 16
    wide = problem_of(**WIDE)
    assert functions(wide)["flash_bwd_split_dkdv"].grid(wide, H100) == 8 * 32
    assert functions()["flash_bwd_split_dq"].grid(PROBLEM, H100) == 32 * 8


# -- constraints -----------------------------------------------------------------------------------

REJECTED = [
    ("hardware", A100, {}, {}, ["sm_80", "flash_bwd serves"]),
    ("hardware", B200, {}, {}, ["sm_100", "flash_bwd serves"]),
    ("hardware", H100, {"dtype": "float32"}, {}, ["float32", "float16 or bfloat16"]),
    ("hardware", H100, {"head_dim_v": 64}, {}, ["96", "64", "equal"]),
    ("hardware", H100, {"head_dim": 60, "head_dim_v": 60}, {}, ["60", "16 bytes"]),
    ("hardware", H100, {"batch": 2**17, "seqlen_q": 1024}, {}, ["2^31"]),
    ("order of products", H100, WIDE, {"DP_EARLY": True}, ["pair"]),
    ("registers", H100, {}, {"DKDV_BLOCK_M": 128}, ["dk, dv", "328", "240"]),
    ("registers", H100, WIDE, {"DQ_BLOCK_N": 128}, ["dq", "328", "240"]),
    ("shared memory", H100, WIDE, {"DKDV_STAGES": 3}, ["dk, dv", str(227 * 1024)]),
    ("registers", H100, WIDE, {"DQ_BLOCK_N": 64}, ["dq", "64 keys", "336"]),
    ("shared memory", H100, {}, {"DQ_BLOCK_N": 128, "DQ_SLOTS": 6}, ["dq", str(227 * 1024)]),
    ("keys", H100, {"seqlen_k": 40}, {"DQ_BLOCK_N": 128}, ["128", "40 keys"]),
    ("tile order", H100, {"seqlen_q": 100_000}, {"GROUP_MB": 8}, ["1 heads", "as 1"]),
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
    assert constraint.why_not(CONFIG, PROBLEM, H100) is None


def test_served_beside_the_others():
    names = [kernel.name for kernel in kernels_for(PROBLEM, H100)]
    assert names == ["flash_bwd", "flash_bwd_ws", "flash_bwd_split"]
    names = [kernel.name for kernel in kernels_for(problem_of(**WIDE), H100)]
    assert names == ["flash_bwd", "flash_bwd_split"]


def test_repeatable_and_in_parts():
    for access in (ALIGNED, Access(aligned=True, tma=True, whole=False, repeatable=True)):
        assert KERNEL.adapt(CONFIG, access) == CONFIG
    assert KERNEL.adapt(CONFIG, Access(aligned=True, tma=False)) is None


# -- defaults, example, pipeline, model ------------------------------------------------------------


@given(problems())
@example(problem_of(seqlen_q=1, seqlen_k=1, head_dim=8, head_dim_v=8))
@example(problem_of(batch=1, heads=1, kv_heads=1, seqlen_q=100_000, **WIDE))
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
    assert 0 < len(allowed) < 2000
    for config in allowed:
        for parts in (dkdv_shared(config, problem), dq_shared(config, problem)):
            assert sum(parts.values()) <= H100.shared_memory


def test_sizes_by_hand():
    wide = problem_of(head_dim=256, head_dim_v=256)
    assert dkdv_shared(CONFIG, wide) == {
        "k, v": 65536, "q, dout": 131072, "statistics": 1024, "P": 16384, "barriers": 2048,
    }  # fmt: skip
    assert dq_shared(CONFIG, wide) == {"q, dout": 131072, "k, v": 65536, "barriers": 2048}
    assert (keys_owned(wide), keys_owned(PROBLEM)) == (64, 128)


@EACH_WIDTH
def test_the_example_has_the_same_code(changes):
    problem = problem_of(**changes)
    shown = KERNEL.example(problem)
    for one, other in zip(
        KERNEL.functions(shown, CONFIG), KERNEL.functions(problem, CONFIG), strict=True
    ):
        assert (one.signature, one.constexprs) == (other.signature, other.constexprs)


def test_the_pipeline_is_told():
    lines = KERNEL.pipeline(problem_of(head_dim=256, head_dim_v=256), CONFIG)
    assert lines == [
        "dk, dv: 1 warp loads, one of 2 consumers dv, the other dk; ring of 2 blocks of 64 query "
        "rows",
        "shared memory: k, v 64 KiB, q, dout 128 KiB, statistics 1 KiB, P 16 KiB, barriers 2 KiB",
        "dq: 1 warp loads, 2 consumers of 64 query rows; ring of 4 blocks of 32 keys",
        "shared memory: q, dout 128 KiB, k, v 64 KiB, barriers 2 KiB",
    ]
    assert "each of 2 consumers both" in KERNEL.pipeline(PROBLEM, CONFIG)[0]


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_models_rank_the_three(dim, causal):
    heads = 2048 // dim
    problem = problem_of(
        batch=4, heads=heads, kv_heads=heads, seqlen_q=4096, seqlen_k=4096, head_dim=dim,
        head_dim_v=dim, causal=causal,
    )  # fmt: skip
    times = {}
    for kernel in kernels_for(problem, H100):
        config = kernel.default(problem, H100)
        blocks = kernel.estimate_blocks_per_sm(problem, config, H100)
        times[kernel.name] = kernel.estimate_ms(problem, config, H100, blocks)
    assert times["flash_bwd_split"] < times["flash_bwd"]
    if dim <= 128:
        assert times["flash_bwd_ws"] < times["flash_bwd_split"]
