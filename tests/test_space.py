"""Config and SearchSpace: equality to the letter, and what a stranger's config may say."""

import itertools
import random

import pytest

from autoflash.errors import ConfigError
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import named_target

PROBLEM = Problem(
    batch=1, heads=2, kv_heads=2, seqlen_q=64, seqlen_k=64, head_dim=64, head_dim_v=64,
    dtype="float16",
)  # fmt: skip
A100 = named_target("a100")


def not_both_large(config, problem, target):
    if config.integer("rows") * config.integer("keys") > problem.seqlen_q * 4:
        return f"{config['rows']} x {config['keys']} is too much"
    return None


def no_copy_engine(config, problem, target):
    return None if config["load"] == "pointer" or target.has_tma else f"{target.arch} has none"


SPACE = SearchSpace(
    params=(
        Param(name="rows", choices=(8, 16, 32), doc="rows"),
        Param(name="keys", choices=(8, 32), doc="keys"),
        Param(name="load", choices=("pointer", "tma"), doc="loads"),
        Param(name="flag", choices=(False, True), doc="a flag"),
    ),
    constraints=(
        Constraint(name="size", why_not=not_both_large),
        Constraint(name="load path", why_not=no_copy_engine),
    ),
)
GOOD = {"rows": 16, "keys": 8, "load": "pointer", "flag": True}


# --- Config


def test_config_is_a_mapping_in_the_order_of_names():
    config = Config(b=2, a=1, c="x")
    assert dict(config) == {"a": 1, "b": 2, "c": "x"}
    assert list(config) == ["a", "b", "c"]
    assert len(config) == 3
    assert config["c"] == "x"
    assert config.to_json() == '{"a":1,"b":2,"c":"x"}'
    assert config.label() == "a=1 b=2 c=x"
    assert repr(config) == "Config(a=1, b=2, c='x')"
    with pytest.raises(KeyError):
        config["d"]


def test_config_equality_ignores_the_order_given():
    assert Config(a=1, b=2) == Config(b=2, a=1)
    assert hash(Config(a=1, b=2)) == hash(Config(b=2, a=1))
    assert {Config(a=1, b=2): "x"}[Config(b=2, a=1)] == "x"


@pytest.mark.parametrize(
    ("one", "two"), [({"a": 1}, {"a": True}), ({"a": 0}, {"a": False}), ({"a": 1}, {"a": "1"})]
)
def test_config_equality_sees_types(one, two):
    assert Config(**one) != Config(**two)
    assert hash(Config(**one)) != hash(Config(**two))
    assert len({Config(**one), Config(**two)}) == 2


def test_config_differs_from_other_mappings():
    assert Config(a=1) != {"a": 1}
    assert Config(a=1) != Config(a=1, b=1)
    assert Config(a=1) != Config(a=2)


def test_config_can_not_be_changed():
    config = Config(a=1)
    with pytest.raises(TypeError):
        config["a"] = 2
    with pytest.raises(AttributeError):
        config.b = 2
    assert dict(config) == {"a": 1}


def test_integer():
    assert Config(a=3).integer("a") == 3
    with pytest.raises(AssertionError, match="a"):
        Config(a="x").integer("a")


# --- SearchSpace.parse


def test_parse_takes_a_config_of_the_space():
    assert SPACE.parse(GOOD) == Config(rows=16, keys=8, load="pointer", flag=True)
    assert SPACE.parse(Config(**GOOD)) == Config(**GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 64}, "rows='64': must be one of [8, 16, 32]"),
        ({"rows": "16"}, "rows='16': must be one of [8, 16, 32]"),
        ({"rows": 16.0}, "rows='16.0': must be one of [8, 16, 32]"),
        ({"rows": None}, "rows='None': must be one of [8, 16, 32]"),
        ({"rows": [16]}, "rows='[16]': must be one of [8, 16, 32]"),
        ({"flag": 1}, "flag='1': must be one of [False, True]"),
        ({"flag": 0}, "flag='0': must be one of [False, True]"),
        ({"load": "TMA"}, "load='TMA': must be one of ['pointer', 'tma']"),
    ],
)
def test_parse_refuses_a_value(changes, message):
    with pytest.raises(ConfigError) as caught:
        SPACE.parse({**GOOD, **changes})
    assert str(caught.value) == message


def test_parse_refuses_true_for_one():
    space = SearchSpace(params=(Param(name="n", choices=(1, 2), doc=""),), constraints=())
    assert space.parse({"n": 1}) == Config(n=1)
    with pytest.raises(ConfigError, match=r"^n='True': must be one of \[1, 2\]$"):
        space.parse({"n": True})


@pytest.mark.parametrize(
    ("values", "off"),
    [
        ({k: v for k, v in GOOD.items() if k != "keys"}, "['keys']"),
        ({**GOOD, "extra": 1}, "['extra']"),
        ({**GOOD, 3: 1}, "[3]"),
        ({}, "['flag', 'keys', 'load', 'rows']"),
    ],
)
def test_parse_refuses_other_names(values, off):
    with pytest.raises(ConfigError) as caught:
        SPACE.parse(values)
    expected = f"config must name exactly ['flag', 'keys', 'load', 'rows']; off: {off}"
    assert str(caught.value) == expected


def test_parse_keeps_a_strangers_text_short():
    with pytest.raises(ConfigError) as caught:
        SPACE.parse({**GOOD, "load": "x" * 10_000})
    assert len(str(caught.value)) < 200
    with pytest.raises(ConfigError) as caught:
        SPACE.parse({**GOOD, "y" * 10_000: 1})
    assert len(str(caught.value)) < 400


# --- enumeration


def test_all_configs_is_the_product_in_declaration_order():
    configs = list(SPACE.all_configs())
    assert len(configs) == len(set(configs)) == SPACE.size == 3 * 2 * 2 * 2
    assert configs[0] == Config(rows=8, keys=8, load="pointer", flag=False)
    assert configs[1] == Config(rows=8, keys=8, load="pointer", flag=True)
    assert configs[-1] == Config(rows=32, keys=32, load="tma", flag=True)


def test_why_not_gives_the_first_reason():
    both_wrong = Config(rows=32, keys=32, load="tma", flag=False)
    assert SPACE.why_not(both_wrong, PROBLEM, A100) == "size: 32 x 32 is too much"
    one_wrong = Config(rows=8, keys=8, load="tma", flag=False)
    assert SPACE.why_not(one_wrong, PROBLEM, A100) == "load path: sm_80 has none"
    assert SPACE.why_not(one_wrong, PROBLEM, named_target("h100")) is None


def test_configs_are_those_that_the_constraints_let_through():
    # 8x8, 8x32, 16x8, 32x8 are at most 256; twice for the flag, and A100 has no copy engine.
    assert SPACE.configs(PROBLEM, A100) == [
        Config(rows=r, keys=k, load="pointer", flag=f)
        for r, k in [(8, 8), (8, 32), (16, 8), (32, 8)]
        for f in (False, True)
    ]
    assert len(SPACE.configs(PROBLEM, named_target("h100"))) == 16


# --- enumeration of large spaces


def test_constraints_that_say_what_they_read_change_nothing_but_the_work():
    asked = []

    def no_tma(config, problem, target):
        asked.append(dict(config))
        return None if config["load"] == "pointer" or target.has_tma else "none here"

    def no_large(config, problem, target):
        asked.append(dict(config))
        return not_both_large(config, problem, target)

    quick = SearchSpace(
        params=SPACE.params,
        constraints=(
            Constraint(name="load path", why_not=no_tma, reads=("load",)),
            Constraint(name="size", why_not=no_large, reads=("keys", "rows")),
        ),
    )
    for target in (A100, named_target("h100")):
        assert quick.configs(PROBLEM, target) == SPACE.configs(PROBLEM, target)
    # Each is asked as soon as it can be, about no more than is set by then.
    assert {len(config) for config in asked} == {2, 3}


def test_a_constraint_that_reads_no_param_is_asked_first():
    asked = []

    def never(config, problem, target):
        asked.append(config)
        return "not here"

    space = SearchSpace(
        params=SPACE.params, constraints=(Constraint(name="never", why_not=never, reads=()),)
    )
    assert space.configs(PROBLEM, A100) == []
    assert len(asked) == len(SPACE.params[0].choices)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_configs_are_what_asking_every_constraint_lets_through(kernel):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    lot = random.Random(seed)
    h100 = named_target("h100")
    for _ in range(6):
        group = lot.choice([1, 2, 3, 8])
        length = lot.choice([1, 50, 64, 200, 4096])
        problem = Problem(
            batch=lot.choice([1, 4]), heads=2 * group, kv_heads=2, seqlen_q=length,
            seqlen_k=lot.choice([length, 1000]), head_dim=lot.choice([64, 96, 192, 256]),
            head_dim_v=lot.choice([64, 96, 256]), dtype="float16", causal=lot.random() < 0.5,
        )  # fmt: skip
        allowed = set(kernel.space.configs(problem, h100))
        for _ in range(3000):
            config = Config(**{p.name: lot.choice(p.choices) for p in kernel.space.params})
            fits = kernel.space.why_not(config, problem, h100) is None
            assert fits == (config in allowed), (problem.label(), config)
        for config in allowed:
            assert kernel.space.why_not(config, problem, h100) is None


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_a_constraint_reads_no_more_than_it_says(kernel):
    problem = Problem.parse({"batch": 4, "heads": 16, "seqlen": 4096, "head_dim": 64})
    for constraint in kernel.space.constraints:
        if constraint.reads is None:
            continue
        choices = [p.choices for p in kernel.space.params if p.name in constraint.reads]
        names = [p.name for p in kernel.space.params if p.name in constraint.reads]
        assert len(names) == len(constraint.reads), constraint.name
        for values in itertools.product(*choices):
            # A KeyError if it looks at anything else.
            config = Config(**dict(zip(names, values, strict=True)))
            constraint.why_not(config, problem, named_target("h100"))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_every_config_of_a_kernel_survives_json(kernel):
    import json

    lot = random.Random(0)
    for _ in range(2000):
        config = Config(**{p.name: lot.choice(p.choices) for p in kernel.space.params})
        assert kernel.space.parse(json.loads(config.to_json())) == config


def test_a_config_of_before_a_param_stands_for_one_of_its_choices():
    params = (
        Param(name="A", choices=(1, 2), doc=""),
        Param(name="B", choices=(False, True), doc="", before=False),
    )
    space = SearchSpace(params=params, constraints=())
    assert space.parse({"A": 2}) == space.parse({"A": 2, "B": False}) == Config(A=2, B=False)
    assert space.parse({"A": 2, "B": True})["B"] is True
    for values in ({"B": True}, {"A": 2, "C": 1}, {"A": 2, "B": 0}):
        with pytest.raises(ConfigError):
            space.parse(values)
