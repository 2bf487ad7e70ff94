"""Rendering: (kernel, problem, config) to a Source. Pure: no files, no clock, no GPU."""

import functools
import hashlib
import json
import pprint
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoflash.codegen.environment import environment
from autoflash.kernels.kernel import Function, Kernel
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.version import VERSION


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rendered text of one kernel file. ``kernel_hash`` covers the device code alone (what is
    compiled), ``name`` is a readable slug with 8 digits of the whole text's hash."""

    kernel: str
    name: str
    text: str
    kernel_hash: str


def render(kernel: Kernel, problem: Problem, config: Config) -> Source:
    """The Source of ``config``. The same arguments give the same text, anywhere and at any time."""
    variant = kernel.variant(problem, config)
    slug = f"{kernel.name}_{variant.slug(problem)}"
    functions = kernel.functions(problem, config)
    context = {
        "slug": slug,
        "version": VERSION,
        "template": kernel.template,
        "constexprs": {f.name: _literal(dict(f.constexprs)) for f in functions},
        "options": {f.name: _literal(dict(f.options)) for f in functions},
        "problem": _literal(kernel.example(problem).as_dict()),
        "flops": kernel.example(problem).flops,
        **variant.template_context(),
    }
    template = environment(kernel.template_folder).get_template(kernel.template)
    text = template.render(context)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Source(
        kernel=kernel.name,
        name=f"{slug}_{digest[:8]}",
        text=text,
        kernel_hash=_kernel_hash(text),
    )


def compiled_hash(kernel: Kernel, problem: Problem, config: Config) -> str:
    """Hash of all that the compiler is given of ``config``, in 16 hexadecimal digits: the device
    code and, of each function, signature, constexprs and options. The same for all problems of a
    bucket."""
    parts = [
        (f.name, f.language, [list(x.items()) for x in _compiled(f)])
        for f in kernel.functions(problem, config)
    ]
    text = json.dumps([render(kernel, problem, config).kernel_hash, parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compiled(function: Function) -> list[Mapping[str, Any]]:
    parts: list[Mapping[str, Any]] = [function.signature, function.constexprs, function.options]
    # Hashes from before there was any stay what they are.
    return [*parts, function.divisible] if function.divisible else parts


@functools.lru_cache(maxsize=1024)
def _kernel_hash(text: str) -> str:
    """Hash of the device code: what stands between the header and the footer."""
    body = text.split("\nCONSTEXPRS = ", 1)[0].split("\n", _HEADER_LINES)[-1]
    return hashlib.sha256(body.encode()).hexdigest()[:16]


_HEADER_LINES = 3


def _literal(value: object) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False)
