"""The options that say which problems a command is about, and the problems that they say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autoflash.errors import InvalidInputError
from autoflash.problem import FP8_FIELDS, OPS, Problem

BatchOption = Annotated[str, typer.Option(help="Batch sizes: '1' or '1,8'.")]
HeadsOption = Annotated[str | None, typer.Option(help="Query heads.")]
KvHeadsOption = Annotated[str | None, typer.Option(help="Key/value heads; default: heads.")]
SeqlenOption = Annotated[str | None, typer.Option(help="Both lengths: '4096', '1k,4k'.")]
SeqlenQOption = Annotated[str | None, typer.Option(help="Query length.")]
SeqlenKOption = Annotated[str | None, typer.Option(help="Key length.")]
HeadDimOption = Annotated[str | None, typer.Option(help="Head dim of q and k.")]
HeadDimVOption = Annotated[str | None, typer.Option(help="Head dim of v; default: same.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="Of q: bfloat16 (default), float16, fp8 or 'fp16,bf16'.")
]
KvDtypeOption = Annotated[
    str | None, typer.Option(help="Of k and v; default: as q. 'fp8' beside 16 bits is mixed.")
]
OutDtypeOption = Annotated[
    str | None, typer.Option(help="Of out, where q is fp8: bfloat16 (default), float16.")
]
ScalesOption = Annotated[
    str | None, typer.Option(help="Granularity of fp8's scales: tensor, head (default), block.")
]
VLayoutOption = Annotated[
    str | None, typer.Option(help="How an fp8 v lies: rows (default), columns, permuted.")
]
CausalOption = Annotated[
    bool | None, typer.Option("--causal/--no-causal", help="Bottom-right causal mask.")
]
FileOption = Annotated[Path | None, typer.Option(help="Problems from a YAML or JSON file.")]
ModelConfigOption = Annotated[
    Path | None, typer.Option(help="Problems of a Hugging Face model's config.json.")
]
SeqlensOption = Annotated[str, typer.Option(help="Lengths for --model-config.")]
OpOption = Annotated[
    str | None, typer.Option(help="'fwd', 'bwd' or 'fwd,bwd'; default: fwd, or as the file says.")
]

_SIZES = ("heads", "kv_heads", "seqlen", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
# What says which problems are meant. --op does too, but goes with every source.
_OF_PROBLEMS = (
    *("batch", *_SIZES, "dtype", *FP8_FIELDS, "causal"),
    *("file", "model_config", "seqlens"),
)


def options_given(context: typer.Context) -> list[str]:
    """The options above that stand on the command line."""
    return given(context, _OF_PROBLEMS)


def given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Those of the options ``names`` that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def problems_given(
    context: typer.Context, *, needed: bool = False, others: Sequence[str] = ()
) -> list[Problem]:
    """The problems of the command's options; without any, none if they aren't ``needed``.

    ``others`` are further options that say which problems are meant. Raises InvalidInputError.
    """
    values = context.params
    sizes = {name: split(values[name]) for name in _SIZES if values[name] is not None}
    file, model_config = values["file"], values["model_config"]
    if not needed and not options_given(context):
        return []
    if sum([bool(sizes), file is not None, model_config is not None]) != 1:
        known = ("flags (--heads 16 --seqlen 4k --head-dim 128)", "--file", "--model-config")
        raise InvalidInputError(f"give one of: {', '.join((*known, *others))}")
    return _of_ops(values["op"], _read(values, sizes, file, model_config))


def ops_of(text: str) -> list[str]:
    """What --op names. Raises InvalidInputError."""
    ops = split(text)
    if not ops or not set(ops) <= set(OPS):
        raise InvalidInputError(f"--op {text!r}: must name fwd, bwd or both")
    return ops


def split(text: str) -> list[str]:
    """The parts of a value with commas."""
    return [part for part in text.split(",") if part]


def _read(
    values: Mapping[str, Any],
    sizes: dict[str, list[str]],
    file: Path | None,
    model_config: Path | None,
) -> list[Problem]:
    from autoflash.tuning.problems import expand, from_file, from_model_config, unique

    batches, causal = split(values["batch"]), values["causal"]
    names = ("dtype", *FP8_FIELDS)
    types = {name: split(values[name]) for name in names if values[name] is not None}
    if file is not None:
        return from_file(Path(file))
    if model_config is not None:
        lengths = split(values["seqlens"])
        return from_model_config(Path(model_config), lengths, batches, types, causal)
    return unique(expand({**sizes, "batch": batches, "causal": bool(causal), **types}))


def _of_ops(text: str | None, problems: list[Problem]) -> list[Problem]:
    """Each problem with each op of ``text``; as they are without one (a file may name ops)."""
    if text is None:
        return problems
    found = [replace(problem, op=op) for problem in problems for op in ops_of(text)]
    return list(dict.fromkeys(found))
