"""Where problems come from: flags, a YAML or JSON file, a Hugging Face model's config.json, and
calls that were served untuned."""

import functools
import itertools
import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.problem import OPS, Bucket, Problem
from autoflash.runtime.choose import Lookup, is_tuned
from autoflash.store.layers import Layers
from autoflash.store.missed import merged, read
from autoflash.target import Target

logger = logging.getLogger(__name__)

# Model types of encoders, whose attention is not causal (unless they say is_decoder).
_ENCODER_TYPES = {
    "albert", "bert", "big_bird", "camembert", "clip_vision_model", "convbert", "deberta",
    "deberta-v2", "deit", "dinov2", "distilbert", "electra", "ernie", "esm", "flaubert", "funnel",
    "layoutlm", "longformer", "modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert",
    "roberta", "siglip", "siglip_vision_model", "squeezebert", "vit", "xlm", "xlm-roberta",
    "xlm-roberta-xl",
}  # fmt: skip


def expand(fields: Mapping[str, Any]) -> list[Problem]:
    """The problems of one mapping: a field that is a list stands for each of its values."""
    if not isinstance(fields, Mapping):
        raise InvalidInputError(f"a problem must be a mapping of fields, not {str(fields)[:80]!r}")
    names = list(fields)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise InvalidInputError(f"problem field {odd[0]!r}: a field's name is text")
    choices = [v if isinstance(v, list | tuple) else [v] for v in fields.values()]
    for name, values in zip(names, choices, strict=True):
        if not values:
            raise InvalidInputError(f"problem field {name!r} has no value")
    return [
        Problem.parse(dict(zip(names, values, strict=True)))
        for values in itertools.product(*choices)
    ]


def from_file(path: Path) -> list[Problem]:
    """The problems of a YAML or JSON file: a list of mappings, or ``problems:`` with one."""
    data = _read(path)
    if isinstance(data, Mapping) and "problems" in data:
        data = data["problems"]
    if not isinstance(data, list) or not data:
        raise InvalidInputError(f"{path}: expected a list of problems, or 'problems:' with a list")
    return unique([problem for entry in data for problem in expand(entry)])


def from_model_config(
    path: Path,
    seqlens: Sequence[int | str],
    batches: Sequence[int | str],
    types: Mapping[str, Sequence[str]] | None = None,
    causal: bool | None = None,
) -> list[Problem]:
    """The attention problems of a Hugging Face model: each length with each batch, as prefill; with
    each of ``types`` (values of dtype, kv_dtype, scales ...), in the model's own dtype without one.

    Reads heads, key/value heads and head dims (also of multi-head latent attention, where q and k
    have nope + rope dims) from config.json; ``path`` is the file or its folder.
    """
    if path.is_dir():
        path = path / "config.json"
    data = _read(path)
    if not isinstance(data, Mapping):
        raise InvalidInputError(f"{path}: a model's config.json is a JSON object")
    # Multimodal models keep the language model's numbers one level down.
    inner = data.get("text_config")
    config = {**data, **(inner if isinstance(inner, Mapping) else {})}
    heads = _number(path, config, "num_attention_heads", "n_head", "num_heads")
    head_dim, head_dim_v = _head_dims(path, config, heads)
    kv_heads = _kv_heads(path, config, heads)
    fields = {
        "batch": list(batches),
        "seqlen": list(seqlens),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": _dtype(config),
        "causal": _is_causal(config) if causal is None else causal,
        **(types or {}),
    }
    return unique(expand(fields))


def from_missed(
    path: Path, target: Target, layers: Layers, ops: Collection[str] = OPS
) -> list[Problem]:
    """The problems of ``ops`` that were called untuned on ``target``, by the file of missed calls
    at ``path``, and that ``layers`` still have no record for; the most called first.

    Those of one bucket share its records: the most called stands for them all. Lines and problems
    that can't be tuned cost a warning each. Raises StoreError if the file can't be read.
    """
    noted, refusals = read(path)
    for refusal in refusals:
        logger.warning("%s: %s", path, refusal)
    lookup = functools.cache(layers.lookup)
    calls: Counter[Bucket] = Counter()
    first: dict[Bucket, Problem] = {}
    for missed in merged(noted):
        problem, bucket = missed.problem, Bucket.of(missed.problem)
        if missed.target.identity != target.identity or problem.op not in ops:
            continue
        # Asking takes milliseconds, and free-form lengths fill a bucket with thousands.
        if bucket in first or _is_untuned(problem, target, lookup):
            calls[bucket] += missed.calls
            first.setdefault(bucket, problem)
    return [first[bucket] for bucket, _ in calls.most_common()]


def _is_untuned(problem: Problem, target: Target, lookup: Lookup) -> bool:
    try:
        return not is_tuned(problem, target, lookup)
    except UnsupportedError as error:
        logger.warning("left out: %s", error)
        return False


def unique(problems: Sequence[Problem]) -> list[Problem]:
    """``problems`` without repeats, in their order."""
    return list(dict.fromkeys(problems))


def _kv_heads(path: Path, config: Mapping[str, Any], heads: int) -> int:
    # Latent attention expands its keys to all heads. Falcon's first models are multi-query without
    # a count; its later ones say how many heads share.
    if "qk_nope_head_dim" in config:
        return heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if all(config.get(name) is None for name in names):
        return heads
    return _number(path, config, *names)


def _head_dims(path: Path, config: Mapping[str, Any], heads: int) -> tuple[int, int]:
    if "qk_nope_head_dim" in config:
        query = _number(path, config, "qk_nope_head_dim") + _number(
            path, config, "qk_rope_head_dim"
        )
        return query, _number(path, config, "v_head_dim")
    if config.get("head_dim"):
        head_dim = _number(path, config, "head_dim")
        return head_dim, head_dim
    hidden = _number(path, config, "hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise InvalidInputError(f"{path}: hidden size {hidden} is not a multiple of {heads} heads")
    return hidden // heads, hidden // heads


def _number(path: Path, config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise InvalidInputError(f"{path}: no positive whole number under {' or '.join(names)}")


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    # Weights stored in fp32 are run in 16 bits where attention kernels matter.
    return "bfloat16" if dtype == "float32" else dtype


def _is_causal(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    masked = isinstance(names, list) and any(str(name).endswith("ForMaskedLM") for name in names)
    encoder = masked or str(config.get("model_type")) in _ENCODER_TYPES
    return not encoder or config.get("is_decoder") is True


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from error
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    # PyYAML's constructors let whatever a bad scalar causes through.
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"{path} is not valid: {str(error)[:200]}") from error
