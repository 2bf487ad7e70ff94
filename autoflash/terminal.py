"""What the command's parts share: the consoles, and options that mean the same everywhere."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from autoflash.settings import Place, place_of, settings

# Piped output has no width of its own; tables need one.
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, nothing else.")]
StoreOption = Annotated[
    str | None,
    typer.Option("--db", help="The store: a file or a PostgreSQL URL; default: AUTOFLASH_DB."),
]


def store_place(db: str | None) -> Place:
    """Where the store that --db, or else the settings, name lies. Raises InvalidInputError."""
    return settings().db if db is None else place_of(db)


def complain(text: str) -> None:
    """One line of standard error."""
    # Brackets in a path are no markup, and a script reads one line.
    errors.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of standard output."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
