"""Bad inputs: damaged masters without loss."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from hostile.case import DOWN, UP, Case, Stored
from hostile.masters import MANIFEST, ONLY_SHARD, damaged, flip, forged, overwrite, restored, set_json, settings

CODED, LENGTHS = UP + "_coded", UP + "_lengths"
Tensors = dict[str, Stored]


def part(name: str, change: Callable[[Tensors], Any], *fragments: str) -> Case:
    """Other stored tensors than those that the configuration implies, with a manifest that does not know them."""
    return damaged(f"native-{name}", restored(change), verify=(MANIFEST,), export=fragments)


def lengths(name: str, *numbers: int) -> Case:
    def change(tensors: Tensors) -> None:
        tensors[LENGTHS] = ("I32", [2], struct.pack("<2i", *numbers))

    return part(name, change, LENGTHS, "expected lengths from 1 on whose sum is")


def put(tensor: str, dtype: str, shape: list[int], data: bytes) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(tensor, (dtype, shape, data))


def chunk(name: str, at: int, data: bytes) -> Case:
    """Bytes of the first chunk, whose hash in the manifest is theirs."""
    return damaged(
        f"native-{name}", forged(overwrite(ONLY_SHARD, CODED, at=at, data=data)), export=(ONLY_SHARD, CODED, "chunk 0")
    )


SETTINGS = ("config.json", "quantization_config")
CASES: list[Case] = [
    damaged("native-coded-flipped", flip(ONLY_SHARD, CODED), both=(ONLY_SHARD, CODED, "blake3_of_pieces")),
    damaged("native-length-flipped", flip(ONLY_SHARD, LENGTHS), both=(ONLY_SHARD, LENGTHS, "blake3_of_pieces")),
    chunk("kind-stored", 0, b"\x00"),
    chunk("symbols-beyond-a-byte", 1, b"\xff\xff"),
    chunk("frequencies-of-zero", 3, bytes(100)),
    lengths("length-0", 0, 1),
    part("coded-of-floats", put(CODED, "F32", [4], bytes(16)), CODED, "expected U8"),
    part("lengths-of-64-bits", put(LENGTHS, "I64", [2], bytes(16)), LENGTHS, "expected I32 [2]", "found I64 [2]"),
    part("another-tensor", put("model.other.weight", "F32", [2], bytes(8)), "model.other.weight"),
    settings("native-source-of-another-tool", "source", to={"quant_method": "quark"}, export=("source", "quark")),
    settings("native-source-missing", "source", to=None, export=("config.json", "expected source and coded")),
    settings(
        "native-coded-of-no-tensor", "coded", to={"other": {"dtype": "BF16", "shape": [4]}}, export=("coded", "'other'")
    ),
    settings("native-bits-other", "overrides", UP, "bits", to=3.5, export=(UP, "bits", "found")),
    settings("native-shape-missing", "overrides", UP, to={}, export=(UP, "shape")),
    settings("native-shape-empty", "overrides", UP, "shape", to=[0, 5], export=(UP, "shape")),
    settings("native-shape-beyond-memory", "overrides", UP, "shape", to=[10**9, 10**9], export=(UP, "1000000000")),
    settings("native-dtype-unknown", "overrides", DOWN, "dtype", to="BF17", export=(DOWN, "BF17")),
    damaged(
        "native-manifest-with-an-error",
        set_json(MANIFEST, "tensors", 0, "relative_mse", to=0.5),
        verify=(MANIFEST,),
        inspect=(MANIFEST, "relative_mse of 0"),
    ),
]
