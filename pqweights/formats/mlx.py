"""The modes of mlx.core.quantize, affine integers and short floats: how MLX stores them.

mlx-lm stacks experts when it converts a model (its models/*.py, `sanitize`), and sources are read as the single experts
of the published model. The bytes of one expert lie together, so that each part of it is a stored tensor of its own.
Only of some types is that all that it changes, see Trait.STACKED_BY_MLX.
"""

from __future__ import annotations

import math
import re

from pqweights.checkpoint.header import StoredTensor
from pqweights.errors import SourceError
from pqweights.formats.packed import SCALE_DTYPES, QuantizedTensor, Source, is_one_of, unlike, weight_of
from pqweights.formats.packing import CODES, OFFSETS, SCALES, PackedFormat, StoredPart
from pqweights.kernels.groups import BEST, FLOAT_CODES, FloatRule, GroupRule

# The widths of codes that are read; the first of a mode is the one that it has by default.
READ_BITS = {"affine": (4, 1, 2, 3, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
AFFINE = (
    StoredPart(CODES, "{weight}", "U32"),
    StoredPart(SCALES, "{module}.scales", "BF16"),
    StoredPart(OFFSETS, "{module}.biases", "BF16"),
)
FLOATS = (StoredPart(CODES, "{weight}", "U32"), StoredPart(SCALES, "{module}.scales", "U8"))
STACK = re.compile(r"(.*)\.(?:switch_mlp|experts)\.((?:gate|up|down)_proj)\.(weight|scales|biases)")
SINGLE = re.compile(r"(.*)\.experts\.\d+\.(\w+)")
# What published models call the matrices of experts below block_sparse_moe.
NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MOST_EXPERTS = 1 << 14  # of a layer
BESIDE_NUMBERED = "block_sparse_moe"


def mlx_format(mode: str, bits: int, size: int, *, name: str = BEST, scale_dtype: str = "BF16") -> PackedFormat:
    """Return the format of a mode. name: how scales are chosen"""
    if mode != "affine":
        return PackedFormat(FloatRule(mode, bits, size, name), FLOATS)
    rule = GroupRule(bits=bits, group_size=size, symmetric=False, middle=False, rule=name, scale_dtype=scale_dtype)
    return PackedFormat(rule, AFFINE)


def find(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `M.weight` in U32 with `M.scales`, of any mode of MLX."""
    module = name.removesuffix(".weight")
    if module == name or codes.dtype != "U32":
        return None
    if STACK.fullmatch(name):
        raise SourceError(
            f"{codes.file}: tensor {name!r}: a stack of experts of MLX, in a model that mlx-lm changes in other "
            "ways, too; give the original checkpoint"
        )
    own = next((of for path in (module, *stacks_of(module)) if (of := source.settings.get(path))), None)
    settings = {**source.settings, **own} if isinstance(own, dict) else source.settings
    mode, size = settings.get("mode", "affine"), settings.get("group_size")
    widths = READ_BITS.get(mode, ()) if isinstance(mode, str) else ()
    bits = settings.get("bits", widths[0]) if mode == "affine" else (*widths, 0)[0]
    if not is_one_of(bits, widths) or not isinstance(size, int) or size < 1:
        found = f"mode {mode!r}, bits {bits!r}, group_size {size!r}"
        raise SourceError(f"config.json: quantization of {module!r}: expected a mode of MLX, found {found}")
    rows, columns = codes.shape[0] if codes.shape else 0, codes.shape[-1] * 32 // bits if codes.shape else 0
    is_whole = columns * bits == codes.shape[-1] * 32 and columns % size == 0 if codes.shape else False
    if len(codes.shape) != 2 or not math.prod(codes.shape) or not is_whole:
        raise unlike(codes, "codes", f"U32 [rows, words] of {bits} bits in groups of {size}")
    of_groups = (rows, columns // size)
    scales = source.part(codes, f"{module}.scales", SCALE_DTYPES if mode == "affine" else ("U8",), of_groups)
    stored = {CODES: codes, SCALES: scales}
    if mode == "affine":
        stored[OFFSETS] = source.part(codes, f"{module}.biases", (scales.dtype,), of_groups)
    how = mlx_format(mode, bits, size, scale_dtype=scales.dtype)
    dtype = f"MLX{bits}" if mode == "affine" else FLOAT_CODES[mode]
    plain = scales.dtype if scales.dtype in ("F16", "F32") else "BF16"
    return weight_of(source, name, (rows, columns), dtype, how, stored, plain_dtype=plain)


def with_single_experts(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensors with the parts of single experts in the place of those of stacks."""
    result = {}
    for name, tensor in stored.items():
        match = STACK.fullmatch(name)
        if match is None or len(tensor.shape) != 3 or not tensor.byte_count or tensor.shape[0] > MOST_EXPERTS:
            result[name] = tensor
            continue
        path, matrix, part = match.groups()
        matrix = NUMBERED[matrix] if path.endswith(BESIDE_NUMBERED) else matrix
        size = tensor.byte_count // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            single = f"{path}.experts.{expert}.{matrix}.{part}"
            offset = tensor.offset + expert * size
            result[single] = StoredTensor(single, tensor.dtype, tensor.shape[1:], tensor.file, offset, size)
    return result


def stacks_of(module: str) -> tuple[str, ...]:
    """Return what a stack may be called that an expert's matrix was a part of."""
    match = SINGLE.fullmatch(module)
    if match is None:
        return ()
    matrix = next((name for name, number in NUMBERED.items() if number == match[2]), match[2])
    return tuple(f"{match[1]}.{stack}.{matrix}" for stack in ("switch_mlp", "experts"))
