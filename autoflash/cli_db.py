"""``autoflash db``: records between hosts, as files that git and people can read; what is done to
databases alone is in cli_databases.py."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autoflash.errors import InvalidInputError
from autoflash.report_db import (
    difference_as_dict,
    differences_table,
    side_as_dict,
    stats_as_dict,
    stats_table,
)
from autoflash.settings import Place, place_of
from autoflash.terminal import JsonFlag, StoreOption, complain, console, say, store_place

app = typer.Typer(
    help="Exchange records between hosts, merge them by evidence, check them.",
    no_args_is_help=True,
)
Files = Annotated[list[Path], typer.Argument(help="Exchange files (JSON Lines).", metavar="FILE…")]
SignOption = Annotated[
    Path | None, typer.Option("--sign", help="Sign with this private key (`db keygen`).")
]
SignedByOption = Annotated[
    Path | None,
    typer.Option("--require-signed-by", help="Refuse what this public key didn't sign."),
]


@app.command("export")
def export_records(
    to: Annotated[Path | None, typer.Argument(help="The file; default: standard output.")] = None,
    target: Annotated[str | None, typer.Option(help="Only this GPU: 'h200' or its name.")] = None,
    shipped: Annotated[bool, typer.Option(help="The records that ship with AutoFlash.")] = False,
    sign: SignOption = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the records of the store as an exchange file: sorted, with digests."""
    from autoflash.store.collecting import paused_collector
    from autoflash.store.shipped import all_shipped_records

    if as_json and to is None:
        raise InvalidInputError("--json prints what was written where: name a file to export to")
    if shipped:
        return _write(_of_target(all_shipped_records(), target), to, sign, as_json=as_json)
    with paused_collector():
        side = _read(store_place(db))
        _complain(side)
        _write(_of_target(side.records, target), to, sign, as_json=as_json)
    exit_unless(side.clean)


@app.command("import")
def import_records(
    files: Files,
    require_signed_by: SignedByOption = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Add to the store what it lacks. Bad lines are refused one by one: exit code 1."""
    from autoflash.store.digest import unique
    from autoflash.store.lacking import add_lacking_records
    from autoflash.store.opening import open_store

    # All are read before anything is written: a file that is refused as a whole stops the rest.
    sides = _read_files(files, require_signed_by)
    store = open_store(store_place(db), spooled=False)
    offered = unique([record for side in sides for record in side.records])
    added = add_lacking_records(store, offered.values())
    if as_json:
        outcome = {"added": added, "known": len(offered) - added}
        typer.echo(json.dumps(outcome | {"files": [side_as_dict(s) for s in sides]}, indent=1))
    else:
        _tell(sides)
        say(f"{store.name}: {added} added, {len(offered) - added} known already")
    exit_unless(all(side.clean for side in sides))


@app.command("merge")
def merge_sides(
    sources: Annotated[
        list[str], typer.Argument(help="Exchange files or databases.", metavar="SOURCE…")
    ],
    to: Annotated[Path, typer.Option("--to", help="The file that is written.")],
    require_signed_by: SignedByOption = None,
    sign: SignOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Merge files and databases into a file, with every record of each: in any order, the same."""
    from autoflash.store.merge import merged

    sides = [_read(place_of(source), require_signed_by) for source in sources]
    if not as_json:
        _tell(sides)
    _write(merged(*(side.records for side in sides)), to, sign, as_json=as_json, sides=sides)
    exit_unless(all(side.clean for side in sides))


@app.command()
def diff(
    theirs: Annotated[str, typer.Argument(help="An exchange file or a database.")],
    ours: Annotated[
        str | None, typer.Argument(help="What it is compared with; default: the store.")
    ] = None,
    require_signed_by: SignedByOption = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Who would win and why if THEIRS were merged; nothing is written. Exit code 1: they differ."""
    from autoflash.store.diff import differences

    if ours is not None and db is not None:
        raise InvalidInputError("give OURS or --db, not both")
    left = _read(store_place(ours or db))
    right = _read(place_of(theirs), require_signed_by)
    found = differences(left.records, right.records)
    if as_json:
        typer.echo(json.dumps([difference_as_dict(d) for d in found], indent=1))
    else:
        _tell([left, right])
        console.print(differences_table(found))
    exit_unless(not found)


@app.command()
def verify(
    sources: Annotated[
        list[str] | None, typer.Argument(help="Files or databases; default: the store.")
    ] = None,
    require_signed_by: SignedByOption = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check digests, signatures, and records against the spaces. Exit code 1: something is off."""
    from autoflash.store.sides import misfits

    if sources and db is not None:
        raise InvalidInputError("give files and databases or --db, not both")
    places = [place_of(source) for source in sources or []] or [store_place(db)]
    sides = [_read(place, require_signed_by) for place in places]
    for side in sides:
        side.faults += misfits(side.records)
    if as_json:
        typer.echo(json.dumps([side_as_dict(side) for side in sides], indent=1))
    else:
        _tell(sides)
    exit_unless(all(side.clean for side in sides))


@app.command()
def stats(
    source: Annotated[
        str | None, typer.Argument(help="A file or database; default: the store.")
    ] = None,
    db: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """How many records, of what, from where, and how many of them stand."""
    if source is not None and db is not None:
        raise InvalidInputError("give a file or database or --db, not both")
    side = _read(store_place(source or db))
    if as_json:
        typer.echo(json.dumps(stats_as_dict(side), indent=1))
    else:
        console.print(stats_table(side))


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="The private key; the public one is PATH.pub.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a key pair for --sign and --require-signed-by."""
    from autoflash.store.signing import make_keys, public_path

    name = make_keys(path)
    if as_json:
        made = {"private": str(path), "public": str(public_path(path)), "fingerprint": name}
        typer.echo(json.dumps(made, indent=1))
    else:
        say(f"{path}: private, keep it; {public_path(path)}: give it away; fingerprint {name}")


def _read(where: Place, signed_by: Path | None = None) -> Any:
    from autoflash.store.sides import read_side

    return read_side(where, _public(signed_by))


def _read_files(paths: list[Path], signed_by: Path | None) -> list[Any]:
    from autoflash.store.sides import read_file

    key = _public(signed_by)
    return [read_file(path, key) for path in paths]


def _public(path: Path | None) -> Any:
    from autoflash.store.signing import load_public

    return None if path is None else load_public(path)


def _of_target(records: list[Any], target: str | None) -> list[Any]:
    from autoflash.target import NAMED_TARGETS

    if target is None:
        return records
    named = NAMED_TARGETS.get(target.lower())
    return [r for r in records if r.target.name == (named.name if named else target)]


def _write(
    records: list[Any],
    to: Path | None,
    sign: Path | None,
    *,
    as_json: bool,
    sides: list[Any] | None = None,
) -> None:
    from autoflash.store.jsonl import dump
    from autoflash.store.signing import load_private
    from autoflash.store.untrusted import write_text

    text = dump(records, None if sign is None else load_private(sign))
    if to is None:
        typer.echo(text, nl=False)
        return
    write_text(to, text)
    header = json.loads(text.partition("\n")[0])
    signed_by = header.get("signature", {}).get("key", "")
    if not as_json:
        say(f"{to}: {header['count']} records{signed_by and f', signed by {signed_by}'}")
        return
    written = {"path": str(to), "records": header["count"], "digest": header["digest"]}
    read = {} if sides is None else {"files": [side_as_dict(side) for side in sides]}
    typer.echo(json.dumps(written | {"signed_by": signed_by} | read, indent=1))


def _tell(sides: list[Any]) -> None:
    for side in sides:
        _complain(side)
        signed = f", signed by {side.signed_by}" if side.signed_by else ""
        signed += " (not checked)" if signed and not side.verified else ""
        say(f"{side.where}: {len(side.records)} records, {side.refused} refused{signed}")


def _complain(side: Any) -> None:
    for warning in side.warnings:
        complain(f"warning: {warning}")
    for reason in [*side.faults, *side.refusals]:
        complain(f"{side.where}: {reason}")
    more = side.refused - len(side.refusals)
    if more:
        complain(f"{side.where}: {more} more are refused")


def exit_unless(good: bool) -> None:
    """Exit code 1 if something was refused, is at fault or differs."""
    if not good:
        raise typer.Exit(1)
