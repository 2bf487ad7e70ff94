"""Ahead-of-time compilation of a rendered kernel, for a GPU that may not be present.

Serving, tuning and offline ranking all compile here, with the same signature and attributes, so
that Triton's disk cache answers the second time.
"""

import re
import subprocess
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.errors import TritonError

from autoflash.codegen.render import Source, render
from autoflash.codegen.source_cache import load_device
from autoflash.errors import CompileError
from autoflash.kernels.kernel import Access, Function, Kernel
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

# What an aligned call promises: pointers at multiples of 16 bytes, strides at multiples of 8
# elements, which is 16 bytes for 16-bit types.
_POINTER_DIVISIBILITY = 16
_STRIDE_DIVISIBILITY = 8


def gpu_target(target: Target) -> GPUTarget:
    """Triton's name for ``target``."""
    if target.vendor == "nvidia":
        return GPUTarget("cuda", target.capability, target.warp_size)
    return GPUTarget("hip", target.arch, target.warp_size)


def compile_config(
    kernel: Kernel, problem: Problem, config: Config, access: Access, target: Target
) -> tuple[CompiledKernel, ...]:
    """The binaries of ``config``, one for each function. Raises CompileError with the reason."""
    source = render(kernel, problem, config)
    functions = kernel.functions(problem, config)
    return tuple(compile_function(source, kernel, f, access, target) for f in functions)


def compile_function(
    source: Source, kernel: Kernel, function: Function, access: Access, target: Target
) -> CompiledKernel:
    """The binary of one function of a Source. Raises CompileError."""
    code = getattr(load_device(source), function.name)
    signature, constexprs = function.signature, function.constexprs
    names = list(code.arg_names)
    source_type, kinds = ASTSource, dict(signature)
    if function.language == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
        kinds = {name: _with_layout(kind) for name, kind in signature.items()}
    ast_source = source_type(
        code,
        kinds | dict.fromkeys(constexprs, "constexpr"),
        {(names.index(name),): value for name, value in constexprs.items()},
        _attributes(function, names) if access.aligned else {},
    )
    options = dict(function.options)
    try:
        return triton.compile(ast_source, target=gpu_target(target), options=options)
    # ptxas's crashes and MLIR pass failures arrive as bare RuntimeErrors and process errors.
    except (
        TritonError, RuntimeError, subprocess.SubprocessError, ValueError, IndexError, OSError,
        AssertionError,
    ) as error:  # fmt: skip
        name = binary_name(source, function)
        raise CompileError(f"{name} for {target.arch}: {_reason(error)}") from error


def binary_name(source: Source, function: Function) -> str:
    """What messages call the binary of one function: of a chain they name the function too."""
    return source.name if function.name == source.kernel else f"{source.name}, {function.name}"


def _with_layout(kind: str) -> str:
    """A descriptor's type with the layout of its block in shared memory, which Gluon wants said.

    It is the layout that the copy engine and the matrix unit agree on, swizzled as far as the row
    allows, and none for a row of numbers. Other types stay as they are.
    """
    match = re.fullmatch(r"tensordesc<(fp16|bf16|fp32|fp8e4nv)\[([\d, ]+)\]>", kind)
    if match is None:
        return kind
    from triton.experimental.gluon import language as gl

    element = {
        "fp16": gl.float16,
        "bf16": gl.bfloat16,
        "fp32": gl.float32,
        "fp8e4nv": gl.float8e4nv,
    }[match[1]]
    block = [int(size) for size in match[2].split(",")]
    if len(block) == 1:
        bits = element.primitive_bitwidth
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=1)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return f"{kind[:-1]},{layout!r}>"


def _attributes(function: Function, names: list[str]) -> dict[tuple[int], Any]:
    divisibility = {"*": _POINTER_DIVISIBILITY, "i64": _STRIDE_DIVISIBILITY}
    attributes = {}
    for name, kind in function.signature.items():
        factor = divisibility.get("*" if kind.startswith("*") else kind, 1)
        factor = function.divisible.get(name, factor)
        if factor > 1:
            attributes[(names.index(name),)] = [["tt.divisibility", factor]]
    return attributes


def _reason(error: BaseException) -> str:
    """The innermost message on one line: of a function that calls the one with the error Triton
    says only where. Its messages hold the source first: their reason stands apart."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error).strip() or type(error).__name__
    return " ".join(str(text).split())[-400:]
