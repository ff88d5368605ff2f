"""Bad inputs: damaged masters with weights of hadamard-trellis-columns."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from hostile.case import DOWN, UP, Case, Stored
from hostile.masters import MANIFEST, ONLY_SHARD, damaged, flip, forged, overwrite, restored, set_json, settings

CODEC = "hadamard-trellis-columns"
TRELLIS, LENGTHS, ROWS, COLUMNS = (UP + part for part in ("_trellis", "_lengths", "_row_scales", "_column_scales"))
Tensors = dict[str, Stored]


def lengths(name: str, *fragments: str, first: int | None = None, more: int = 0) -> Case:
    """A first length that is another, with a manifest that agrees. more: what is added to the second"""

    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors[LENGTHS]
        numbers = list(struct.unpack("<4i", data))
        numbers[0], numbers[1] = numbers[0] if first is None else first, numbers[1] + more
        tensors[LENGTHS] = (dtype, shape, struct.pack("<4i", *numbers))

    return damaged(f"columns-{name}", restored(change), verify=(MANIFEST,), export=(LENGTHS, *fragments))


def part(name: str, change: Callable[[Tensors], Any], *fragments: str) -> Case:
    """Other stored tensors than those that the configuration implies, without a manifest."""
    return damaged(f"columns-{name}", restored(change), verify=(MANIFEST,), export=fragments)


def put(tensor: str, dtype: str, shape: list[int], data: bytes) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(tensor, (dtype, shape, data))


def transposed(tensors: Tensors) -> None:
    """Lengths of the same bytes in another shape."""
    dtype, _, data = tensors[LENGTHS]
    tensors[LENGTHS] = (dtype, [4], data)


def shortened(tensors: Tensors) -> None:
    dtype, (total,), data = tensors[TRELLIS]
    tensors[TRELLIS] = (dtype, [total - 1], data[:-1])


def of_stack(name: str, tensor: str, dtype: str, shape: list[int], expected: str) -> Case:
    """A stored tensor of zeros in a stack, in the place of another."""
    data = bytes(int(np.prod(shape)) * (4 if dtype == "I32" else 1))
    change = restored(put(tensor, dtype, shape, data))
    return damaged(f"stacks-{name}", change, verify=(MANIFEST,), export=(tensor, f"expected {expected}"))


STACKS: list[Case] = [
    damaged("stacks-length-flipped", flip(ONLY_SHARD, LENGTHS), both=(ONLY_SHARD, LENGTHS, "blake3_of_pieces")),
    damaged(
        "stacks-length-6",
        forged(overwrite(ONLY_SHARD, DOWN + "_lengths", at=28, data=b"\6\0\0\0")),
        export=(DOWN, "expected 7 to", "found 6 at [1, 1, 1]"),
    ),
    of_stack("lengths-of-one", LENGTHS, "I32", [2, 2], "I32 [2, 2, 2]"),
    of_stack("lengths-of-three", LENGTHS, "I32", [3, 2, 2], "I32 [2, 2, 2]"),
    of_stack("row-scales-of-one", ROWS, "U8", [130], "U8 [2, 130]"),
    of_stack("row-scales-flat", ROWS, "U8", [260], "U8 [2, 130]"),
    of_stack("column-scales-fewer", COLUMNS, "U8", [2, 799], "U8 [2, 800]"),
    settings("stacks-not-turned", "overrides", DOWN, "transposed", to=lambda _: None, export=(DOWN, "transposed")),
    settings("stacks-of-more", "overrides", UP, "shape", to=[3, 130, 800], export=(UP, "expected I32 [3, 2, 2]")),
    settings("stacks-of-none", "overrides", UP, "shape", to=[0, 130, 800], export=(UP, "shape")),
    settings("stacks-beyond-memory", "overrides", UP, "shape", to=[10**9, 130, 10**9], export=(UP, "1000000000")),
    damaged(
        "stacks-manifest-not-transposed",
        set_json(MANIFEST, "tensors", 1, "transposed", to=None),
        verify=(MANIFEST,),
        inspect=(MANIFEST, "transposed"),
    ),
]

CASES: list[Case] = [
    *(
        damaged(name, flip(ONLY_SHARD, tensor), both=(ONLY_SHARD, tensor, "blake3_of_pieces"))
        for name, tensor in {
            "columns-step-flipped": TRELLIS,
            "columns-length-flipped": LENGTHS,
            "columns-row-scale-flipped": ROWS,
            "columns-column-scale-flipped": COLUMNS,
        }.items()
    ),
    damaged(
        "columns-erased",
        forged(overwrite(ONLY_SHARD, TRELLIS, at=0, data=b"\xff" * 7)),
        export=(ONLY_SHARD, UP, "block 0", "its header is not one that an encoder writes"),
    ),
    lengths("length-0", "expected 7 to", "found 0 at [0, 0]", first=0),
    lengths("lengths-of-more", "expected lengths whose sum is", more=1),
    part("trellis-missing", lambda tensors: tensors.pop(TRELLIS), UP),
    *(
        part(f"{name}-missing", lambda tensors, tensor=tensor: tensors.pop(tensor), tensor, "no such tensor")
        for name, tensor in {"lengths": LENGTHS, "row-scales": ROWS, "column-scales": COLUMNS}.items()
    ),
    part("trellis-shorter", shortened, "config.json", UP, "bits"),
    part("trellis-of-floats", put(TRELLIS, "F32", [4], bytes(16)), TRELLIS, "expected U8"),
    part("lengths-flat", transposed, LENGTHS, "expected I32 [2, 2]", "found I32 [4]"),
    part("column-scales-signed", put(COLUMNS, "I8", [800], bytes(800)), COLUMNS, "expected U8 [800]", "found I8"),
    part("scaled", put(UP + "_awq_scale", "F16", [800], bytes(1600)), UP + "_awq_scale", "expected no scales"),
    settings("columns-bits-zero", "overrides", UP, "bits", to=0, export=(UP, "bits", "found 0")),
    settings("columns-shape-missing", "overrides", UP, to={}, export=(UP, "shape")),
    settings(
        "columns-transposed-false", "overrides", UP, "transposed", to=False, export=(UP, "expected true or nothing")
    ),
    settings("columns-shape-empty", "overrides", UP, "shape", to=[130, 0], export=(UP, "shape")),
    settings("columns-shape-of-another", "overrides", UP, "shape", to=[800, 130], export=(UP, "[800, 130]")),
    settings("columns-shape-beyond-memory", "overrides", UP, "shape", to=[10**9, 10**9], export=(UP, "1000000000")),
    *STACKS,
]
