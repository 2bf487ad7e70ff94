"""The Jinja environment of the kernel templates."""

import functools
import importlib.resources
from pathlib import Path

import jinja2

TEMPLATES_PACKAGE = "autoflash_templates"


@functools.cache
def environment(folder: Path | None = None) -> jinja2.Environment:
    """One strict environment: an undefined name is an error, block lines leave no blank lines.

    A template that isn't in ``folder`` is one of those that ship.
    """
    shipped = importlib.resources.files(TEMPLATES_PACKAGE)
    folders = [str(shipped)] if folder is None else [str(folder), str(shipped)]
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
