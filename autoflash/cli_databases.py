"""``autoflash db``: what is done to databases alone; the rest is in cli_db.py."""

import json
from pathlib import Path
from typing import Annotated

import typer

from autoflash.cli_db import app, exit_unless
from autoflash.cli_deployment import coverage
from autoflash.report import ProgressListener
from autoflash.report_db import revalidated_as_dict, revalidated_table
from autoflash.settings import Place, place_of
from autoflash.terminal import (
    JsonFlag,
    StoreOption,
    complain,
    console,
    errors,
    say,
    store_place,
)

__all__ = ["app"]

app.command()(coverage)


@app.command()
def push(
    to: Annotated[str, typer.Argument(help="The database: a file or a PostgreSQL URL.")],
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Add to another database what it lacks of the store's records and trials."""
    _bring(store_place(db), place_of(to), as_json=as_json)


@app.command()
def pull(
    source: Annotated[str, typer.Argument(help="The database: a file or a PostgreSQL URL.")],
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Add to the store what it lacks of another database's records and trials."""
    _bring(place_of(source), store_place(db), as_json=as_json)


@app.command()
def prune(
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it nothing is.")] = False,
    backup: Annotated[
        Path | None, typer.Option(help="Where they are kept; default: beside the store.")
    ] = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete what its own origin has superseded, never a record that could stand in some merge."""
    from autoflash.store.opening import beside, open_store
    from autoflash.store.prune import prune as delete
    from autoflash.store.prune import superseded
    from autoflash.store.record import time_stamp

    where = store_place(db)
    store = open_store(where, read_only=not yes, spooled=False)
    stamp = "".join(c for c in time_stamp()[:19] if c.isalnum())
    backup = backup or beside(where, f"pruned-{stamp}.jsonl")
    count = delete(store, backup) if yes else len(superseded(store))
    kept = str(backup) if yes and count else None
    if as_json:
        typer.echo(json.dumps({"superseded": count, "deleted": yes, "backup": kept}, indent=1))
    elif kept:
        say(f"{store.name}: {count} deleted; `autoflash db import {kept}` brings them back")
    else:
        say(f"{store.name}: {count} superseded{'; --yes deletes them' if count else ''}")


@app.command()
def revalidate(
    everything: Annotated[
        bool, typer.Option("--all", help="Also where a record has the present versions.")
    ] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds per bucket (60).")] = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """After an upgrade: check and time the stored winners and runners-up again, on the GPU that is
    here. Nothing is deleted. Exit code 1: a stored winner failed."""
    from autoflash.store.opening import open_store
    from autoflash.tuning.revalidate import revalidate as run

    listener = ProgressListener(errors, quiet=as_json)
    with listener:
        found = run(
            store=open_store(store_place(db)),
            budget_s=budget,
            listener=listener,
            everything=everything,
        )
    if as_json:
        typer.echo(json.dumps([revalidated_as_dict(one) for one in found], indent=1))
    else:
        for one in found:
            for trial in one.fallen:
                told = f"{trial.kernel}, {trial.problem.label()}: {trial.status}: {trial.reason}"
                complain(f"a stored winner failed: {told}")
        console.print(revalidated_table(found))
    exit_unless(not any(one.fallen for one in found))


def _bring(source: Place, to: Place, *, as_json: bool) -> None:
    from autoflash.store.opening import open_store
    from autoflash.store.transfer import bring

    # Opened first: for one that isn't there no other is made.
    giving = open_store(source, read_only=True)
    taking = open_store(to, spooled=False)
    found = bring(giving, taking)
    if as_json:
        brought = {name: vars(rows) for name, rows in found.items()}
        typer.echo(json.dumps({"from": giving.name, "to": taking.name} | brought, indent=1))
    else:
        for name, rows in found.items():
            for reason in rows.refusals:
                complain(f"{giving.name}: {reason}")
            told = f"{rows.added} {name} added, {rows.known} known already, {rows.refused} refused"
            say(f"{taking.name}: {told}")
    exit_unless(not any(rows.refused for rows in found.values()))
