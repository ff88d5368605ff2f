"""The safetensors dtypes: their sizes, and exact or correctly rounded conversions between the floating-point dtypes."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

# Bits per element, as in the safetensors format; most readers do not know F4, F6 and C64 yet.
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

FLOAT8_DTYPES = ("F8_E4M3", "F8_E5M2")
# The dtypes that `convert` reads. It writes all of them but those of 8 bits.
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", *FLOAT8_DTYPES)

# Types of blocks in GGUF files; their names begin with the bits of a code.
_GGUF_BLOCKS = (
    *("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_1", "Q4_K", "Q4_0", "Q3_K", "Q2_K", "Q2_0", "Q1_0", "TQ2_0", "TQ1_0"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
# The formats of several tensors that weights in a source may have, by the names that they get as dtypes: the bits of a
# code, and what users call the format.
PACKED_DTYPES = {
    "MXFP4": (4, "MXFP4"),
    "NVFP4": (4, "NVFP4"),
    **{f"INT{bits}": (bits, "compressed-tensors") for bits in (2, 3, 4, 8)},
    **{f"GPTQ{bits}": (bits, "GPTQ") for bits in (2, 3, 4, 8)},
    "AWQ4": (4, "AWQ"),
    **{f"MLX{bits}": (bits, "MLX") for bits in (1, 2, 3, 4, 5, 6, 8)},
    **{f"AO{bits}": (bits, "torchao") for bits in (4, 8)},
    **{name: (bits, "bitsandbytes") for name, bits in (("NF4", 4), ("FP4", 4), ("SCB8", 8))},
    **{name: (int(name.strip("ITQ")[0]), "GGUF") for name in _GGUF_BLOCKS},
}

# Values of the 4-bit float E2M1 by code (OCP microscaling formats specification 1.0, table 5).
FLOAT4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)

# The smallest and largest finite values of a dtype, as float32.
_LARGEST = {"BF16": np.float32(3.3895313892515355e38), "F16": np.float32(65504), "F32": np.finfo(np.float32).max}
FINITE_RANGES = {dtype: (-largest, largest) for dtype, largest in _LARGEST.items()}


def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype with whole bytes."""
    return DTYPE_BITS[dtype] // 8


@functools.cache
def float8_table(dtype: str) -> npt.NDArray[np.float32]:
    """Return the 256 values of F8_E4M3 (no infinities, NaN at 0x7f and 0xff), F8_E5M2 (as IEEE) or F8_E8M0 (2**n).

    OCP 8-bit floating point specification 1.0; OCP microscaling formats specification 1.0 for E8M0.
    """
    byte = np.arange(256)
    if dtype == "F8_E8M0":
        values = np.ldexp(1.0, byte - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    mantissa_bits, bias = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15)}[dtype]
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent = (byte & 0x7F) >> mantissa_bits
    mantissa = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    if dtype == "F8_E4M3":
        magnitude[(byte & 0x7F) == 0x7F] = np.nan
    else:
        magnitude[(byte & 0x7F) == 0x7C] = np.inf
        magnitude[(byte & 0x7F) > 0x7C] = np.nan
    return (sign * magnitude).astype(np.float32)


def to_float32(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """Convert raw bytes of a floating-point dtype to float32: exact, except that F64 is rounded to nearest even."""
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    if dtype == "F64":
        with np.errstate(over="ignore", invalid="ignore"):  # signalling NaNs raise the invalid flag
            return raw.view(np.float64).astype(np.float32)
    return float8_table(dtype)[raw]


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """Convert float32 to raw bytes of F32, F16, BF16 or F64.

    Values are rounded to nearest even, NaN stays NaN, and overflow is infinite.
    """
    values = np.ascontiguousarray(values)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
        return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        target = {"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]
        return values.astype(target).view(np.uint8)


def convert(raw: npt.NDArray[np.uint8], source: str, target: str) -> npt.NDArray[np.uint8]:
    """Convert raw bytes of one floating-point dtype to those of another, through float32."""
    if source == target:
        return raw
    values = to_float32(raw, source)
    return values.view(np.uint8) if target == "F32" else from_float32(values, target)
