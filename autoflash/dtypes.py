"""The dtypes of q, k, v and out, by torch's names."""

from autoflash.errors import InvalidInputError

FP8 = "float8_e4m3fn"
HALF_DTYPES = ("float16", "bfloat16")
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, FP8: 1}
_ALIASES = {
    **{"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"},
    **{"fp8": FP8, "e4m3": FP8},
}


def canonical_dtype(name: object) -> str:
    """'bf16' or 'torch.bfloat16' to 'bfloat16'; InvalidInputError if it is no dtype of ours."""
    text = str(name).removeprefix("torch.").lower()
    text = _ALIASES.get(text, text)
    if text not in DTYPE_BYTES:
        raise InvalidInputError(f"dtype={name!r}: must be one of {', '.join(DTYPE_BYTES)}")
    return text


def kindred_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes, ``dtype`` among them, whose kernels want the same configs."""
    return HALF_DTYPES if dtype in HALF_DTYPES else (dtype,)


def default_out(dtype: str) -> str:
    """The dtype of out for q's."""
    return "bfloat16" if dtype == FP8 else dtype
