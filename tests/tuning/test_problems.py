"""Problems from flags, files and models' config.json."""

import dataclasses
import json
import logging

import pytest

from autoflash.errors import InvalidInputError, StoreError
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.settings import settings
from autoflash.store.layers import Layers
from autoflash.store.missed import append, missed_path
from autoflash.store.record import Measurement, MissedCalls, Provenance, TuningRecord
from autoflash.store.shipped import all_shipped_records
from autoflash.store.store import Store
from autoflash.target import named_target
from autoflash.tuning.problems import expand, from_file, from_missed, from_model_config, unique


def problem(**changes):
    fields = {
        "batch": 1, "heads": 16, "kv_heads": 16, "seqlen_q": 1024, "seqlen_k": 1024,
        "head_dim": 64, "head_dim_v": 64, "dtype": "bfloat16", "causal": False,
    }  # fmt: skip
    return Problem(**{**fields, **changes})


# --- flags


def test_one_mapping_is_one_problem():
    assert expand({"batch": 1, "heads": "16", "seqlen": "1k", "head_dim": 64}) == [problem()]


def test_lists_stand_for_each_of_their_values():
    found = expand(
        {
            "batch": ["1", "8"],
            "heads": 16,
            "seqlen": ["1k", "4k"],
            "head_dim": ("64",),
            "causal": [False, True],
        }
    )
    assert found == [
        problem(batch=batch, seqlen_q=length, seqlen_k=length, causal=causal)
        for batch in (1, 8)
        for length in (1024, 4096)
        for causal in (False, True)
    ]


def test_lists_of_heads_and_kv_heads_are_combined():
    found = expand({"batch": 1, "heads": [8, 16], "kv_heads": [1, 8], "seqlen": 4, "head_dim": 8})
    assert [(p.heads, p.kv_heads) for p in found] == [(8, 1), (8, 8), (16, 1), (16, 8)]


@pytest.mark.parametrize("fields", [5, "heads: 16", ["heads"], None])
def test_a_problem_is_a_mapping(fields):
    with pytest.raises(InvalidInputError) as caught:
        expand(fields)
    assert str(caught.value) == f"a problem must be a mapping of fields, not {str(fields)!r}"


def test_one_bad_value_of_a_list_is_refused():
    with pytest.raises(InvalidInputError, match=r"^seqlen_[qk]='4x': must be a whole number"):
        expand({"batch": 1, "heads": 16, "seqlen": ["4k", "4x"], "head_dim": 64})


def test_unique_keeps_the_order():
    one, two = problem(), problem(batch=2)
    assert unique([two, one, two, one]) == [two, one]


# --- files


FILES = {
    "list.yaml": """
        - {batch: 1, heads: 16, seqlen: 1k, head_dim: 64}
        - batch: [1, 8]
          heads: 16
          seqlen: 4k
          head_dim: 64
          causal: true
    """,
    "mapping.yml": """
        # a comment
        problems:
          - {batch: 1, heads: 16, seqlen: 1024, head_dim: 64, dtype: bf16}
          - {batch: [1, 8], heads: 16, seqlen: 4096, head_dim: 64, causal: true}
    """,
    "list.json": json.dumps(
        [
            {"batch": 1, "heads": 16, "seqlen": "1k", "head_dim": 64},
            {"batch": [1, 8], "heads": 16, "seqlen": 4096, "head_dim": 64, "causal": True},
        ]
    ),
    "mapping.json": json.dumps(
        {
            "problems": [
                {"batch": 1, "heads": 16, "seqlen": "1k", "head_dim": 64},
                {"batch": [1, 8], "heads": 16, "seqlen": 4096, "head_dim": 64, "causal": True},
                {"batch": 1, "heads": 16, "seqlen": "1k", "head_dim": 64},
            ]
        }
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_from_file(tmp_path, name):
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    long = {"seqlen_q": 4096, "seqlen_k": 4096, "causal": True}
    assert from_file(path) == [problem(), problem(**long), problem(batch=8, **long)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.yaml", "", "{path}: expected a list of problems, or 'problems:' with a list"),
        ("none.yaml", "[]", "{path}: expected a list of problems, or 'problems:' with a list"),
        ("one.yaml", "{batch: 1}", "{path}: expected a list of problems, or 'problems:' with a"),
        ("text.yaml", "hello", "{path}: expected a list of problems, or 'problems:' with a list"),
        ("null.json", '{"problems": null}', "{path}: expected a list of problems, or"),
        ("entry.yaml", "[3]", "a problem must be a mapping of fields, not '3'"),
        ("field.yaml", "- {head: 3}", "unknown problem field 'head': known are batch,"),
        ("value.yaml", "- {batch: 1, heads: 16, seqlen: 1k, head_dim: 300}", "head_dim=300: the"),
        ("broken.yaml", "a: [", "{path} is not valid: while parsing a flow"),
        ("tag.yaml", "!!python/object/apply:os.getcwd []", "{path} is not valid: could not"),
        ("broken.json", "[1,", "{path} is not valid: Expecting value"),
        ("yaml.json", "- {batch: 1}", "{path} is not valid: "),
        ("deep.json", "[" * 100_000, "{path} is not valid: "),
    ],
)
def test_files_that_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError) as caught:
        from_file(path)
    assert str(caught.value).startswith(message.format(path=path))
    assert len(str(caught.value)) < len(str(path)) + 300


def test_files_that_can_not_be_read(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(InvalidInputError) as caught:
            from_file(path)
        assert str(caught.value).startswith(f"{path} can't be read: ")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="can't be read: 'utf-8' codec"):
        from_file(binary)


# --- models


# What the attention of each reads from its config.json; the other fields are left out.
MODELS = {
    "llama 3.1 8B": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
         "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"},
        {"heads": 32, "kv_heads": 8, "head_dim": 128, "head_dim_v": 128, "causal": True},
    ),
    "gemma 2 9B": (
        {"architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584, "head_dim": 256,
         "num_attention_heads": 16, "num_key_value_heads": 8, "torch_dtype": "float32"},
        {"heads": 16, "kv_heads": 8, "head_dim": 256, "head_dim_v": 256, "causal": True},
    ),
    "phi 2": (
        {"architectures": ["PhiForCausalLM"], "hidden_size": 2560, "num_attention_heads": 32,
         "num_key_value_heads": None, "head_dim": None, "torch_dtype": "float16"},
        {"heads": 32, "kv_heads": 32, "head_dim": 80, "head_dim_v": 80, "causal": True,
         "dtype": "float16"},
    ),
    "gpt 2": (
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_head": 12, "n_embd": 768},
        {"heads": 12, "kv_heads": 12, "head_dim": 64, "head_dim_v": 64, "causal": True},
    ),
    "starcoder": (
        {"architectures": ["GPTBigCodeForCausalLM"], "n_head": 48, "n_embd": 6144,
         "multi_query": True, "torch_dtype": "float32"},
        {"heads": 48, "kv_heads": 1, "head_dim": 128, "head_dim_v": 128, "causal": True},
    ),
    "deepseek v3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
         "num_attention_heads": 128, "num_key_value_heads": 128, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
         "torch_dtype": "bfloat16"},
        {"heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128, "causal": True},
    ),
    # num_key_value_heads says nothing of latent attention.
    "latent attention": (
        {"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
         "num_attention_heads": 16, "num_key_value_heads": 2, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64},
        {"heads": 16, "kv_heads": 16, "head_dim": 192, "head_dim_v": 128, "causal": True},
    ),
    "gemma 3 4B": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
         "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152,
                                                      "num_attention_heads": 16},
         "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "head_dim": 256,
                         "num_attention_heads": 8, "num_key_value_heads": 4}},
        {"heads": 8, "kv_heads": 4, "head_dim": 256, "head_dim_v": 256, "causal": True},
    ),
    "bert base": (
        {"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 768,
         "num_attention_heads": 12},
        {"heads": 12, "kv_heads": 12, "head_dim": 64, "head_dim_v": 64, "causal": False},
    ),
    "bert without a head": (
        {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 1024,
         "num_attention_heads": 16, "dtype": "float16"},
        {"heads": 16, "kv_heads": 16, "head_dim": 64, "head_dim_v": 64, "causal": False,
         "dtype": "float16"},
    ),
    "an mpt": (
        {"architectures": ["MPTForCausalLM"], "d_model": 4096, "num_heads": 32},
        {"heads": 32, "kv_heads": 32, "head_dim": 128, "head_dim_v": 128, "causal": True},
    ),
}  # fmt: skip


def write_config(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path, name):
    config, expected = MODELS[name]
    path = write_config(tmp_path, config)
    found = from_model_config(path, ["1k", 4096], ["1", 8])
    lengths = [(batch, length) for batch in (1, 8) for length in (1024, 4096)]
    assert found == [
        problem(batch=batch, seqlen_q=length, seqlen_k=length, **expected)
        for batch, length in lengths
    ]
    assert from_model_config(tmp_path, ["1k", 4096], ["1", 8]) == found


def test_flags_go_before_the_config(tmp_path):
    path = write_config(tmp_path, MODELS["llama 3.1 8B"][0])
    (found,) = from_model_config(path, ["1k"], [1], {"dtype": ["fp16"]}, False)
    assert (found.dtype, found.causal) == ("float16", False)
    path = write_config(tmp_path, MODELS["bert base"][0])
    assert from_model_config(path, ["1k"], [1], causal=True)[0].causal is True


def test_the_same_length_twice_is_one_problem(tmp_path):
    path = write_config(tmp_path, MODELS["gpt 2"][0])
    assert len(from_model_config(path, ["1k", 1024], [1])) == 1


def without(name, *fields):
    return {key: value for key, value in MODELS[name][0].items() if key not in fields}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            without("llama 3.1 8B", "num_attention_heads"),
            "{path}: no positive whole number under num_attention_heads or n_head or num_heads",
        ),
        (
            without("llama 3.1 8B", "hidden_size"),
            "{path}: no positive whole number under hidden_size or n_embd or d_model",
        ),
        (
            without("deepseek v3", "v_head_dim"),
            "{path}: no positive whole number under v_head_dim",
        ),
        (
            without("deepseek v3", "qk_rope_head_dim"),
            "{path}: no positive whole number under qk_rope_head_dim",
        ),
        (
            {"num_attention_heads": "32", "hidden_size": 4096},
            "{path}: no positive whole number under num_attention_heads or n_head or num_heads",
        ),
        (
            {"num_attention_heads": 0, "hidden_size": 4096},
            "{path}: no positive whole number under num_attention_heads or n_head or num_heads",
        ),
        (
            {"num_attention_heads": 12, "hidden_size": 1000},
            "{path}: hidden size 1000 is not a multiple of 12 heads",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 5, "hidden_size": 768},
            "heads=12 is not a multiple of kv_heads=5: each key/value head must serve the same "
            "number of query heads",
        ),
        (
            {"num_attention_heads": 8, "head_dim": 512, "hidden_size": 4096},
            "head_dim=512: the largest that is served is 256",
        ),
        (
            {"num_attention_heads": 8, "hidden_size": 512, "torch_dtype": "int8"},
            "dtype='int8': must be one of float16, bfloat16, float32, float8_e4m3fn",
        ),
        ([1, 2], "{path}: a model's config.json is a JSON object"),
    ],
)
def test_configs_that_are_refused(tmp_path, config, message):
    path = write_config(tmp_path, config)
    with pytest.raises(InvalidInputError) as caught:
        from_model_config(path, ["1k"], [1])
    assert str(caught.value) == message.format(path=path)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(InvalidInputError, match=r"config\.json can't be read: "):
        from_model_config(tmp_path, ["1k"], [1])


@pytest.mark.parametrize("value", ["eight", [8], {"a": 1}, 2.5, True, -8])
def test_kv_heads_of_a_wrong_type(tmp_path, value):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": value})
    )
    with pytest.raises(InvalidInputError):
        from_model_config(path, [1024], [1])


@pytest.mark.parametrize(
    "extra",
    [{"text_config": None}, {"text_config": [1]}, {"architectures": 5}, {"model_type": []}],
)
def test_odd_fields_that_say_nothing_are_passed_over(tmp_path, extra):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_attention_heads": 8, "hidden_size": 512, **extra}))
    (problem,) = from_model_config(path, [1024], [1])
    assert (problem.heads, problem.head_dim, problem.causal) == (8, 64, True)


def test_falcon_40b(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "falcon",
                "architectures": ["FalconForCausalLM"],
                "hidden_size": 8192,
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "multi_query": True,
                "new_decoder_architecture": True,
            }
        )
    )
    assert from_model_config(path, [1024], [1])[0].kv_heads == 8


def test_a_decoder_with_a_classification_head_is_causal(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForSequenceClassification"],
                "hidden_size": 4096,
                "num_attention_heads": 32,
            }
        )
    )
    assert from_model_config(path, [1024], [1])[0].causal is True


@pytest.mark.parametrize(
    "kind",
    ["xlm-roberta", "distilbert", "electra", "deberta-v2", "siglip_vision_model", "nomic_bert"],
)
def test_other_encoders(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": kind,
                "architectures": ["XModel"],
                "hidden_size": 768,
                "num_attention_heads": 12,
            }
        )
    )
    assert from_model_config(path, [1024], [1])[0].causal is False


@pytest.mark.parametrize(
    "text",
    [
        "- {1: 2, a: 3}",
        "- {batch: 1, heads: 2, seqlen: 4, head_dim: 8, dtype: [[bf16]]}",
        "- {batch: 1, heads: 2, seqlen: 4, head_dim: 8, op: {a: 1}}",
        "- {batch: 1, heads: 2, seqlen: 4, head_dim: 8, op: [[fwd]]}",
        "a: &a [*a]",
        "- {batch: [], heads: 2, seqlen: 4, head_dim: 8}",
        "- 2025-13-45",
        "- {batch: !!timestamp x}",
        "? [a]\n: b",
    ],
)
def test_odd_files(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError):
        from_file(path)


# --- calls that were served untuned

H100, H200 = named_target("h100"), named_target("h200")
DATE = "2025-03-01T12:30:00+00:00"


@pytest.fixture
def note():
    """Notes problems, each with how often it was called."""

    def note(*counted, target=H200):
        noted = [MissedCalls(problem=p, target=target, calls=n, noted_at=DATE) for p, n in counted]
        append(missed_path(settings().db_path), noted)

    return note


def missed(target=H200, **options):
    return from_missed(missed_path(settings().db_path), target, Layers(), **options)


def tune_by_hand(problem, target=H200, kind="measured"):
    kernel = KERNELS["flash_fwd" if problem.op == "fwd" else "flash_bwd"]
    time = Measurement(
        median_ms=1.0, p20_ms=1.0, p80_ms=1.0, repeats=9, noisy=False,
        method="events" if kind == "measured" else "model",
    )  # fmt: skip
    Store(settings().db_path).add_record(
        TuningRecord(
            problem=problem, target=target, kernel=kernel.name, measurement=time, kind=kind,
            config=kernel.default(problem, target), provenance=Provenance(created_at=DATE),
        )
    )  # fmt: skip


def test_nothing_was_missed():
    assert missed() == []
    assert not settings().db_path.exists()


def test_the_most_called_comes_first(note):
    few, some, many = problem(head_dim=32), problem(op="bwd"), problem(causal=True)
    note((few, 3), (some, 4), (many, 2))
    note((many, 5))
    note((few, 100), target=H100)
    assert missed() == [many, some, few]
    assert missed(target=H100) == [few]
    assert missed(target=named_target("a100")) == []
    assert missed(ops=["fwd"]) == [many, few]
    assert missed(ops=("bwd",)) == [some]


def test_a_bucket_is_tuned_once_by_its_most_called_problem(note):
    lengths = [problem(seqlen_k=length) for length in (900, 901, 1024)]
    other = problem(seqlen_k=4096)
    note(*zip(lengths, (3, 4, 2), strict=True), (other, 8))
    assert missed() == [lengths[1], other]


def test_what_was_tuned_since_is_left_out(note):
    first, second, third = problem(), problem(causal=True), problem(op="bwd")
    note((first, 9), (second, 5), (third, 7))
    tune_by_hand(first, H100)
    tune_by_hand(second, kind="predicted")
    assert missed() == [first, third, second]
    # Another of its bucket.
    tune_by_hand(dataclasses.replace(first, seqlen_k=1000))
    assert missed() == [third, second]
    tune_by_hand(third)
    tune_by_hand(second)
    assert missed() == []


def test_what_ships_tuned_is_left_out(note, monkeypatch):
    shipped = all_shipped_records()[0]
    note((shipped.problem, 3), target=shipped.target)
    assert missed(target=shipped.target) == [shipped.problem]
    monkeypatch.setenv("AUTOFLASH_SHIPPED_DB", "1")
    assert missed(target=shipped.target) == []


def test_what_can_not_be_tuned_costs_a_warning_each(note, caplog):
    single = problem(dtype="float32")
    note((single, 9), (problem(), 1))
    path = missed_path(settings().db_path)
    with path.open("a") as file:
        file.write("hello\n{}\n")
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        assert missed() == [problem()]
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == (f"{path}: line 3 refused: not JSON: Expecting value: line 1 column 1 (char 0)")
    assert second == f"{path}: line 4 refused: missed calls: field 'calls' is missing"
    assert third.startswith(f"left out: no kernel serves {single.label()} on NVIDIA H200: ")


def test_missed_calls_that_can_not_be_read():
    missed_path(settings().db_path).mkdir()
    with pytest.raises(StoreError, match="is not a file: move it away"):
        missed()
