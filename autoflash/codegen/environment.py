"""The Jinja environment of the kernel templates."""

import functools
import importlib.resources

import jinja2

TEMPLATES_PACKAGE = "autoflash_templates"


@functools.cache
def environment() -> jinja2.Environment:
    """One strict environment: an undefined name is an error, block lines leave no blank lines."""
    folder = importlib.resources.files(TEMPLATES_PACKAGE)
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(folder)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
