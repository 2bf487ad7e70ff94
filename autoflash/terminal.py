"""What the command's parts share: the consoles, and options that mean the same everywhere."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# Piped output has no width of its own; tables need one.
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, nothing else.")]
StoreOption = Annotated[
    Path | None, typer.Option("--db", help="The store's file; default: AUTOFLASH_DB.")
]


def complain(text: str) -> None:
    """One line of standard error."""
    # Brackets in a path are no markup, and a script reads one line.
    errors.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of standard output."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
