"""The golden master of format version 2: weights of hadamard-trellis, made by the command from exact sources.

    PYTHONPATH=tests:tests/support python -m golden.make_trellis

writes `trellis/` and `trellis.json` anew. Do so when the encoder chooses other bytes on purpose. A change of the
decoder would change the format: the old master has to be decoded to the old values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import helpers
import independent_reader
import numpy as np
import numpy.typing as npt
import trellis_decoder
from golden.make import HERE, mixed_scales, weights, write_by_command, write_golden

MASTER = HERE / "trellis"
EXPECTED = HERE / "trellis.json"

RECIPE = """
name: golden-trellis
description: Several rates, sizes, dtypes and rotations of hadamard-trellis, and a weight of another codec.
codec: hadamard-trellis
bits: 2.125
rules:
  - {name: "*.least.weight", bits: 1.5}
  - {name: "*.middle.weight", bits: 4.38}
  - {name: "*.most.weight", bits: 8}
  - {name: "*.aligned.weight", bits: 8}
  - {name: "*.scalar.weight", codec: hadamard-lloyd-max, bits: 3}
"""


def source() -> dict[str, helpers.Tensor]:
    """Return the tensors of the source."""
    return {
        "model.layers.least.weight": helpers.bf16(weights(60, 1664, seed=31)),  # 780 blocks: two superblocks
        "model.layers.middle.weight": helpers.f32(weights(17, 130, seed=32)),
        "model.layers.most.weight": helpers.f16(weights(3, 129, seed=33)),
        "model.layers.mixed.weight": helpers.f32(mixed_scales(34)),
        "model.layers.one.weight": helpers.bf16(weights(1, 7, seed=35)),
        "model.layers.constant.weight": helpers.bf16(np.full((15, 128), 0.0125, np.float32)),
        "model.layers.aligned.weight": helpers.f32(weights(8, 1, seed=39) + weights(8, 128, seed=40, exponent=-17)),
        "model.layers.zero.weight": helpers.bf16(np.zeros((2, 128), np.float32)),
        "model.layers.wide.weight": ("F64", weights(2, 70, seed=36).astype(np.float64) / 3),
        "model.layers.scalar.weight": helpers.bf16(weights(2, 128, seed=37)),
        "model.norm.weight": helpers.bf16(1 + weights(9, seed=38)),
    }


def write_source(folder: Path) -> Path:
    """Write the source checkpoint."""
    return helpers.write_checkpoint(folder, source(), config={"model_type": "golden"})


def write_master(source: Path, out: Path, threads: int = 1) -> None:
    """Quantize the source with the golden recipe, by the command."""
    write_by_command(source, out, RECIPE, threads)


def read_master(folder: Path) -> Iterator[independent_reader.Tensor]:
    """Every tensor of a master of version 2, by the independent decoders."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (config["quant_method"], config["format_version"], config["block_size"]) == ("pqweights", 2, 128)
    stored: dict[str, independent_reader.Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= independent_reader.read_safetensors(path)
    for name, entry in stored.items():
        if name in config["kept"]:
            yield independent_reader.Tensor(name, entry.dtype, entry.shape, entry.data)
        elif name.endswith("_codes"):
            weight = name.removesuffix("_codes")
            yield independent_reader.decode_weight(weight, entry, stored[weight + "_norms"], None, config)
        elif name.endswith("_trellis"):
            yield _decode_weight(name.removesuffix("_trellis"), entry, config)


def _decode_weight(name: str, entry: independent_reader.Stored, config: dict) -> independent_reader.Tensor:
    own = {**config, **config["overrides"][name]}
    assert own["codec"] == "hadamard-trellis" and entry.dtype == "U8"
    elements = int(np.prod(own["shape"]))
    cut = trellis_decoder.cut(elements, own["bits"])
    assert tuple(entry.shape) == (cut.superblocks, cut.size)
    rows: npt.NDArray[np.uint8] = np.frombuffer(entry.data, dtype=np.uint8).reshape(entry.shape)
    values = trellis_decoder.decode(rows, cut.blocks, signed=own["rotation"] == "signed-hadamard")
    data = independent_reader.to_bytes(values.reshape(-1)[:elements], own["dtype"])
    return independent_reader.Tensor(name, own["dtype"], tuple(own["shape"]), data)


if __name__ == "__main__":
    write_golden(sys.modules[__name__])
