"""The ``autoflash`` command: tune, show, list, bench, doctor; lock is cli_deployment.py's, and db's
commands are cli_databases.py's."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from autoflash import cli_databases, cli_deployment
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
    OutDtypeOption,
    ScalesOption,
    SeqlenKOption,
    SeqlenOption,
    SeqlenQOption,
    SeqlensOption,
    VLayoutOption,
    ops_of,
    options_given,
    problems_given,
)
from autoflash.errors import AutoFlashError, InvalidInputError, StoreError
from autoflash.problem import OPS, Problem
from autoflash.report import (
    ProgressListener,
    doctor_table,
    record_as_dict,
    records_table,
    result_as_dict,
    results_table,
    trials_table,
)
from autoflash.settings import place_of
from autoflash.terminal import JsonFlag, StoreOption, complain, console, errors, say, store_place

app = typer.Typer(
    help="Tune attention kernels, keep the winners, look at them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_databases.app, name="db")
app.command()(cli_deployment.lock)

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command; an AutoFlashError becomes one line and exit code 2, Ctrl-C 130."""
    try:
        # Typer turns Exit, and Ctrl-C into 130, into what it returns.
        code = app(standalone_mode=False) or 0
    except AutoFlashError as error:
        complain(f"error: {error}")
        code = 2
    except Exception as error:
        # click's usage errors carry their own message and code; anything else is a bug.
        if not hasattr(error, "exit_code") or not hasattr(error, "show"):
            raise
        error.show()
        code = error.exit_code
    if code == _INTERRUPTED:
        complain("interrupted; what was found is kept, run again to go on")
    sys.exit(code)


@app.command()
def tune(
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
    op: Annotated[
        str | None, typer.Option(help="'fwd' (default; --missed: both), 'bwd' or 'fwd,bwd'.")
    ] = None,
    file: FileOption = None,
    model_config: ModelConfigOption = None,
    seqlens: SeqlensOption = "1k,4k,16k",
    missed: Annotated[
        bool, typer.Option("--missed", help="What was called untuned (AUTOFLASH_NOTE_MISSED=1).")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="A GPU that need not be there: a100, h100, mi300x, …")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds per problem (60).")] = None,
    trials: Annotated[int | None, typer.Option(help="At most so many trials.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="'all', or '0,1': GPUs that share the problems.")
    ] = None,
    require_idle: Annotated[
        bool, typer.Option("--require-idle", help="Refuse to start while others use a GPU.")
    ] = False,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Search the best kernel of each problem and store it. Ctrl-C keeps what was found."""
    if missed:
        if given := options_given(context):
            raise InvalidInputError(
                "--missed takes the problems that were called untuned: "
                f"leave out --{given[0].replace('_', '-')}"
            )
        problems = _missed(op, target, db, quiet=as_json)
        if not problems:
            return
    else:
        problems = problems_given(context, needed=True, others=["--missed"])
    from autoflash.tuning.tune import tune as run

    listener = ProgressListener(errors, quiet=as_json)
    try:
        with listener:
            run(
                problems,
                target=target,
                budget_s=budget,
                trials=trials,
                store=_open_store(db),
                listener=listener,
                gpus=gpus,
                require_idle=require_idle,
            )
    finally:
        if as_json:
            typer.echo(json.dumps([result_as_dict(r) for r in listener.results], indent=1))
        elif listener.results:
            for result in listener.results:
                console.print(trials_table(result))
            console.print(results_table(listener.results))
    if any(result.record is None for result in listener.results):
        raise typer.Exit(1)


@app.command("list")
def list_records(
    target: Annotated[str | None, typer.Option(help="Only this GPU: 'h200' or its name.")] = None,
    db: StoreOption = None,
    shipped: Annotated[bool, typer.Option(help="The records that ship with AutoFlash.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """The records of the store."""
    records = _records(db, shipped, target)
    if as_json:
        typer.echo(json.dumps([record_as_dict(r) for r in records], indent=1))
    else:
        console.print(records_table(records))


@app.command()
def show(
    seqlen: Annotated[str | None, typer.Option(help="Only this query length.")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Only this head dim.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal")] = None,
    dtype: Annotated[str | None, typer.Option(help="Only this dtype.")] = None,
    target: Annotated[str | None, typer.Option(help="Only this GPU.")] = None,
    db: StoreOption = None,
    shipped: Annotated[bool, typer.Option(help="The records that ship with AutoFlash.")] = False,
    source: Annotated[bool, typer.Option(help="Print the emitted file's text too.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Records in full: problem, config, pipeline, time, evidence and the emitted file."""
    from autoflash.dtypes import canonical_dtype
    from autoflash.problem import parse_length
    from autoflash.report import record_panel
    from autoflash.tuning.progress import emitted_path

    wanted: dict[str, Any] = {"causal": causal}
    wanted["seqlen_q"] = seqlen and parse_length("seqlen", seqlen)
    wanted["head_dim"] = head_dim and parse_length("head_dim", head_dim)
    wanted["dtype"] = dtype and canonical_dtype(dtype)
    records = [
        record
        for record in _records(db, shipped, target)
        if all(v is None or getattr(record.problem, k) == v for k, v in wanted.items())
    ]
    if not records:
        raise InvalidInputError("no record matches: see `autoflash list`")
    if as_json:
        found = [record_as_dict(r) | {"path": str(emitted_path(r))} for r in records]
        typer.echo(json.dumps(found, indent=1))
        return
    for record in records:
        path = emitted_path(record)
        console.print(record_panel(record, path))
        if source and path is not None:
            typer.echo(path.read_text(encoding="utf-8"))


@app.command()
def bench(
    batch: Annotated[str, typer.Option(help="Batch size.")] = "4",
    heads: Annotated[str, typer.Option(help="Query heads.")] = "16",
    kv_heads: Annotated[str | None, typer.Option(help="Key/value heads.")] = None,
    seqlen: Annotated[str, typer.Option(help="Length.")] = "4096",
    head_dim: Annotated[str, typer.Option(help="Head dim.")] = "128",
    dtype: Annotated[str, typer.Option(help="Of q: float16, bfloat16 or fp8.")] = "bfloat16",
    kv_dtype: KvDtypeOption = None,
    out_dtype: OutDtypeOption = None,
    scales: ScalesOption = None,
    v_layout: VLayoutOption = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal")] = False,
    op: Annotated[str, typer.Option(help="'fwd', or 'bwd' for the gradients.")] = "fwd",
    as_json: JsonFlag = False,
) -> None:
    """Time the kernel that serves a problem here, interleaved with torch's own attention."""
    from autoflash.report import bench_table
    from autoflash.tuning.bench import bench_problem

    fields = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen": seqlen}
    fields |= {"head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype, "out_dtype": out_dtype}
    fields |= {"scales": scales, "v_layout": v_layout}
    given = {k: v for k, v in fields.items() if v is not None}
    problem = Problem.parse({**given, "causal": causal, "op": op})
    result = bench_problem(problem)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        console.print(bench_table(problem, result))


@app.command()
def doctor(db: StoreOption = None, as_json: JsonFlag = False) -> None:
    """GPU, driver, versions, store and what is missing. Exit code 1 if something is."""
    from autoflash.diagnosis import diagnose

    findings = diagnose(None if db is None else place_of(db))
    if as_json:
        typer.echo(json.dumps([vars(f) for f in findings], indent=1))
    else:
        console.print(doctor_table(findings))
    if any(finding.state == "error" for finding in findings):
        raise typer.Exit(1)


def _missed(op: str | None, target: str | None, db: str | None, *, quiet: bool) -> list[Problem]:
    """What is still untuned of what was called beside the store; says how much that is."""
    from autoflash.settings import settings
    from autoflash.store.layers import Layers
    from autoflash.store.missed import compact, missed_path
    from autoflash.tuning.problems import from_missed
    from autoflash.tuning.tune import target_to_tune

    ops = OPS if op is None else ops_of(op)
    gpu = target_to_tune(target)
    snapshot = settings().at(store_place(db))
    path = missed_path(snapshot.db_path)
    problems = from_missed(path, gpu, Layers(snapshot), ops)
    if problems:
        text = f"called untuned on {gpu.name}, the most called first: {len(problems)} to tune"
    elif path.exists():
        text = f"nothing to tune: {path} has no calls on {gpu.name} that are still untuned"
    else:
        text = f"nothing was missed: no {path}; serving writes it with AUTOFLASH_NOTE_MISSED=1"
    if not quiet:
        say(text)
    elif not problems:
        typer.echo("[]")
    try:
        compact(path)
    except StoreError as error:
        complain(f"warning: {error}")
    return problems


def _open_store(db: str | None) -> Any:
    from autoflash.store.opening import open_store

    return open_store(store_place(db))


def _records(db: str | None, shipped: bool, target: str | None) -> list[Any]:
    from autoflash.store.opening import open_store
    from autoflash.store.shipped import all_shipped_records
    from autoflash.target import NAMED_TARGETS

    if shipped:
        records = all_shipped_records()
    else:
        where = store_place(db)
        if isinstance(where, Path) and not where.exists():
            return []
        records = open_store(where, read_only=True).records()
    if target is None:
        return records
    named = NAMED_TARGETS.get(target.lower())
    name = named.name if named else target
    return [record for record in records if record.target.name == name]
