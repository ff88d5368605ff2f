"""Codes of four bits with a table of numbers, of bitsandbytes (QLoRA: Dettmers et al., arXiv:2305.14314): only read.

Weights follow one after the other, in blocks that do not end with rows. Their scales may be quantized themselves: a
number of a table of 256 times a scale for each block of them, plus one offset for all.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from pqweights.checkpoint.header import StoredTensor, read_stored
from pqweights.common.documents import Number, Size, read_document
from pqweights.common.strict_json import MAX_ELEMENTS
from pqweights.errors import SourceError
from pqweights.formats.packed import QuantizedTensor, Source, unlike, weight_of
from pqweights.formats.packing import CODES, SCALES, TABLE, PackedFormat, StoredPart
from pqweights.kernels.groups import FloatRule

MOST_JSON_BYTES = 1 << 16
QUANT_STATE = ".quant_state.bitsandbytes__"
# Two codes in a byte, the first one in the upper bits.
TABLE_LAYOUT = (
    StoredPart(CODES, "{weight}", "U8", order=(1, 0)),
    StoredPart(SCALES, "{weight}.absmax", "F32"),
    StoredPart(TABLE, "{weight}.quant_map", "F32", shape=(16,)),
)
NESTED_LAYOUT = (
    StoredPart(CODES, "{weight}.absmax", "U8"),
    StoredPart(SCALES, "{weight}.nested_absmax", "F32"),
    StoredPart(TABLE, "{weight}.nested_quant_map", "F32", shape=(256,)),
)


Positive = Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)]


class _QuantState(msgspec.Struct, frozen=True, kw_only=True):
    """What bitsandbytes states of a weight in 4 bits (functional.QuantState.as_dict)."""

    blocksize: Positive
    dtype: str
    shape: tuple[Size, ...]
    nested_blocksize: Positive = 1
    nested_offset: Number = 0.0


def find_table(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `X` in bytes with `X.absmax`, `X.quant_map` and the JSON of its quant_state."""
    if not name.endswith(".weight"):
        return None
    states = (source.stored.get(f"{name}{QUANT_STATE}{kind}") for kind in ("nf4", "fp4"))
    state = next((stored for stored in states if stored is not None), None)
    if state is None:
        return None
    if state.byte_count > MOST_JSON_BYTES:
        raise unlike(state, "JSON", f"at most {MOST_JSON_BYTES} bytes")
    place = f"{state.file}: tensor {state.name!r}"
    raw = read_stored(source.storage, state).tobytes()
    about = read_document(raw, _QuantState, lambda problem: SourceError(f"{place}: {problem}"))
    count = math.prod(about.shape)
    if not 0 < count <= MAX_ELEMENTS:
        raise SourceError(f"{place}: expected the shape of a weight, found {list(about.shape)}")
    if codes.byte_count != -(-count // 2):
        raise unlike(codes, "codes", f"{-(-count // 2)} bytes for {list(about.shape)}")
    blocks = -(-count // about.blocksize)
    is_nested = f"{name}.nested_absmax" in source.stored
    scales = source.part(codes, f"{name}.absmax", ("U8",) if is_nested else ("F32",), (blocks,))
    table, nested = source.part(codes, f"{name}.quant_map", ("F32",), (16,)), None
    if is_nested:
        of_scales = {
            CODES: scales,
            SCALES: source.part(codes, f"{name}.nested_absmax", ("F32",), (-(-blocks // about.nested_blocksize),)),
            TABLE: source.part(codes, f"{name}.nested_quant_map", ("F32",), (256,)),
        }
        how = PackedFormat(FloatRule("table", 8, about.nested_blocksize), NESTED_LAYOUT, 1.0, about.nested_offset)
        nested = weight_of(source, scales.name, (blocks,), "F32", how, of_scales, matrix=(1, blocks))
    dtype = state.name.removeprefix(f"{name}{QUANT_STATE}").upper()
    how = PackedFormat(FloatRule("table", 4, about.blocksize), TABLE_LAYOUT)
    return weight_of(
        source,
        name,
        about.shape,
        dtype,
        how,
        {CODES: codes, SCALES: scales, TABLE: table},
        plain_dtype={"float16": "F16", "float32": "F32"}.get(about.dtype, "BF16"),
        others=(*(() if nested is None else nested.parts[1:]), state),
        matrix=(1, count),
        nested=nested,
    )
