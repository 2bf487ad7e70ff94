"""What a deployment's problems are served by: ``db coverage`` shows it, ``lock`` freezes it."""

import functools
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autoflash.cli_problems import (
    BatchOption,
    CausalOption,
    DtypeOption,
    FileOption,
    HeadDimOption,
    HeadDimVOption,
    HeadsOption,
    KvDtypeOption,
    KvHeadsOption,
    ModelConfigOption,
    OpOption,
    OutDtypeOption,
    ScalesOption,
    SeqlenKOption,
    SeqlenOption,
    SeqlenQOption,
    SeqlensOption,
    VLayoutOption,
    given,
    ops_of,
    problems_given,
    split,
)
from autoflash.errors import InvalidInputError, MissingRecordError, StoreError
from autoflash.problem import OPS, Problem
from autoflash.settings import Settings, settings
from autoflash.terminal import JsonFlag, StoreOption, complain, console, say, store_place

RequireOption = Annotated[
    str, typer.Option(help="The least level: exact, neighbour, predicted or missing (none).")
]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="Of gradients, those that repeat bit for bit.")
]


def coverage(
    context: typer.Context,
    # problems_given reads these, down to seqlens, from the context.
    batch: BatchOption = "1",
    heads: HeadsOption = None,
    kv_heads: KvHeadsOption = None,
    seqlen: SeqlenOption = None,
    seqlen_q: SeqlenQOption = None,
    seqlen_k: SeqlenKOption = None,
    head_dim: HeadDimOption = None,
    head_dim_v: HeadDimVOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    out_dtype: OutDtypeOption = None,
    scales: ScalesOption = None,
    v_layout: VLayoutOption = None,
    causal: CausalOption = None,
    op: OpOption = None,
    file: FileOption = None,
    model_config: ModelConfigOption = None,
    seqlens: SeqlensOption = "1k,4k,16k",
    target: Annotated[
        str | None, typer.Option(help="'h100,h200', or names; default: those in the store.")
    ] = None,
    require: RequireOption = "exact",
    deterministic: DeterministicOption = False,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What serves each problem on each GPU: exact, neighbour (with what that is expected to lose),
    predicted or missing. Exit code 1: something is below --require."""
    from autoflash.coverage import (
        check_level,
        cover,
        named_targets,
        problems_of,
        reaches,
        stored_records,
        targets_of,
    )
    from autoflash.report_coverage import coverage_as_dict, coverage_table
    from autoflash.store.layers import SureLayers

    check_level(require)
    problems = problems_given(context)
    ops = OPS if op is None else ops_of(op)
    snapshot = _snapshot(db)
    own, shipped = stored_records(snapshot)
    # What ships is of GPUs that a team may never see.
    of_store = own or shipped
    targets = named_targets(split(target), [*own, *shipped]) if target else targets_of(of_store)
    problems = problems or [p for p in problems_of(of_store) if p.op in ops]
    if not problems or not targets:
        raise InvalidInputError(
            "nothing to cover: the store has no records that name problems and GPUs; give "
            "problems (such as --model-config) and --target"
        )
    cells = cover(problems, targets, SureLayers(snapshot), deterministic=deterministic)
    met = all(reaches(cell.level, require) for cell in cells)
    if as_json:
        typer.echo(json.dumps(coverage_as_dict(cells, require, met), indent=1))
    else:
        console.print(coverage_table(cells))
    if not met:
        raise typer.Exit(1)


def lock(
    context: typer.Context,
    to: Annotated[Path | None, typer.Argument(help="The file; default: standard output.")] = None,
    # problems_given reads these, down to seqlens, from the context.
    batch: BatchOption = "1",
    heads: HeadsOption = None,
    kv_heads: KvHeadsOption = None,
    seqlen: SeqlenOption = None,
    seqlen_q: SeqlenQOption = None,
    seqlen_k: SeqlenKOption = None,
    head_dim: HeadDimOption = None,
    head_dim_v: HeadDimVOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    out_dtype: OutDtypeOption = None,
    scales: ScalesOption = None,
    v_layout: VLayoutOption = None,
    causal: CausalOption = None,
    op: OpOption = None,
    file: FileOption = None,
    model_config: ModelConfigOption = None,
    seqlens: SeqlensOption = "1k,4k,16k",
    target: Annotated[
        str | None, typer.Option(help="'h100,h200', or names; default: the GPU that is here.")
    ] = None,
    require: RequireOption = "exact",
    deterministic: DeterministicOption = False,
    add: Annotated[
        Path | None, typer.Option("--add", help="Add to this lock what it lacks.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Check this lock against this install; 1: it doesn't hold."),
    ] = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Freeze the configs that serve now, of the problems given or of all that the store has for the
    GPU, into a lock file for AUTOFLASH_LOCK."""
    from autoflash import locking
    from autoflash.coverage import check_level
    from autoflash.store.untrusted import write_text

    check_level(require)
    if sum(place is not None for place in (to, add, check)) > 1:
        raise InvalidInputError("give one of: a file to write, --add, --check")
    problems = problems_given(context)
    if check is not None:
        if odd := given(context, ["require", "db"]):
            raise InvalidInputError(f"--check looks at the lock alone: leave out --{odd[0]}")
        _check(check, problems, target, deterministic, as_json=as_json)
        return
    if as_json and to is None and add is None:
        raise InvalidInputError("--json prints what was written where: name a file to lock to")
    entries = _entries(problems, op, target, require, deterministic, db)
    text, count = locking.add(add, entries) if add else locking.lock_text(entries)
    path = to or add
    if path is None:
        typer.echo(text, nl=False)
        return
    write_text(path, text)
    digest = json.loads(text.partition("\n")[0])["digest"]
    if as_json:
        typer.echo(json.dumps({"path": str(path), "locked": count, "digest": digest}, indent=1))
    else:
        say(f"{path}: {count} entries {'added' if add else 'locked'}, digest {digest[:12]}")


def _entries(
    problems: list[Problem],
    op: str | None,
    target: str | None,
    require: str,
    deterministic: bool,
    db: str | None,
) -> list[Any]:
    """What serves now, of ``problems`` or of the records of each target."""
    from autoflash.coverage import named_targets, stored_records
    from autoflash.locking import freeze
    from autoflash.store.layers import SureLayers
    from autoflash.tuning.tune import target_to_tune

    ops = OPS if op is None else ops_of(op)
    snapshot = _snapshot(db)
    records = [record for side in stored_records(snapshot) for record in side]
    lookup = functools.cache(SureLayers(snapshot).lookup)
    targets = named_targets(split(target), records) if target else [target_to_tune(None)]
    entries, below = [], []
    for gpu in targets:
        own = [r.problem for r in records if r.target.identity == gpu.identity]
        asked = problems or [p for p in own if p.op in ops]
        frozen = freeze(asked, gpu, lookup, require, deterministic=deterministic)
        entries += frozen.entries
        below += frozen.below
    if problems and below:
        more = f" (and {len(below) - 1} more)" if len(below) > 1 else ""
        raise MissingRecordError(f"nothing is locked: {below[0]}{more}")
    for reason in below:
        complain(f"left out: {reason}")
    if not entries:
        names = " and ".join(gpu.name for gpu in targets) or "no GPU"
        raise MissingRecordError(
            f"nothing to lock: the store has no record of {names} that is {require}; name problems "
            "(such as --model-config), or `autoflash tune` them first"
        )
    return entries


def _snapshot(db: str | None) -> Settings:
    """The settings, with the store that --db names. Raises StoreError if that is a file that isn't
    there."""
    where = store_place(db)
    if db is not None and isinstance(where, Path) and not where.exists():
        raise StoreError(f"{where}: is not there")
    return settings().at(where)


def _check(
    path: Path, problems: list[Problem], target: str | None, deterministic: bool, *, as_json: bool
) -> None:
    from autoflash.coverage import named_targets, targets_of
    from autoflash.locking import faults, lacking
    from autoflash.store.lock import load

    found = load(path)
    known = found.entries
    targets = named_targets(split(target), known) if target else targets_of(known)
    reasons = [*faults(found), *lacking(found, problems, targets, deterministic=deterministic)]
    if as_json:
        told = {"path": str(path), "entries": len(known), "digest": found.digest}
        told |= {"versions": dict(found.versions), "faults": reasons}
        typer.echo(json.dumps(told, indent=1))
    else:
        for reason in reasons:
            complain(f"{path}: {reason}")
        say(f"{path}: {len(known)} entries, digest {found.digest[:12]}")
    if reasons:
        raise typer.Exit(1)
