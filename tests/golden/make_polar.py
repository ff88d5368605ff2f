"""The golden master of format version 3: weights of polar, made by the command from exact sources.

    PYTHONPATH=tests:tests/support python -m golden.make_polar

writes `polar/` and `polar.json` anew. Its bytes follow from docs/format.md, so they change only with the format.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import helpers
import independent_reader
import numpy as np
import polar_decoder
from golden.make import HERE, mixed_scales, weights, write_by_command, write_golden

MASTER = HERE / "polar"
EXPECTED = HERE / "polar.json"

RECIPE = """
name: golden-polar
description: Sizes, dtypes, exponents and rotations of polar, and weights of the other versions.
codec: polar
rules:
  - {name: "*.scalar.weight", codec: hadamard-lloyd-max, bits: 3}
  - {name: "*.trellis.weight", codec: hadamard-trellis, bits: 2.5}
"""


def source() -> dict[str, helpers.Tensor]:
    """Return the tensors of the source."""
    return {
        "model.layers.rows.weight": helpers.bf16(weights(12, 256, seed=41)),
        "model.layers.flat.weight": helpers.f32(weights(17, 130, seed=42)),
        "model.layers.half.weight": helpers.f16(weights(3, 129, seed=43)),
        "model.layers.mixed.weight": helpers.f32(mixed_scales(44)),
        "model.layers.tiny.weight": helpers.f32(weights(4, 128, seed=45, exponent=-130)),
        "model.layers.huge.weight": helpers.f32(weights(4, 128, seed=46, exponent=110)),
        "model.layers.constant.weight": helpers.bf16(np.full((15, 128), 0.0125, np.float32)),
        "model.layers.zero.weight": helpers.bf16(np.zeros((2, 128), np.float32)),
        "model.layers.wide.weight": ("F64", weights(2, 70, seed=47).astype(np.float64) / 3),
        "model.layers.scalar.weight": helpers.bf16(weights(2, 128, seed=48)),
        "model.layers.trellis.weight": helpers.bf16(weights(3, 128, seed=49)),
        "model.norm.weight": helpers.bf16(1 + weights(9, seed=50)),
    }


def write_source(folder: Path) -> Path:
    """Write the source checkpoint."""
    return helpers.write_checkpoint(folder, source(), config={"model_type": "golden"})


def write_master(source: Path, out: Path, threads: int = 1) -> None:
    """Quantize the source with the golden recipe, by the command."""
    write_by_command(source, out, RECIPE, threads)


def read_master(folder: Path) -> Iterator[independent_reader.Tensor]:
    """Every weight of polar in a master of version 3, by the independent decoder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (config["quant_method"], config["format_version"], config["block_size"]) == ("pqweights", 3, 128)
    for path in sorted(folder.glob("*.safetensors")):
        stored = independent_reader.read_safetensors(path)
        for name, angles in stored.items():
            if name.endswith("_angles") and name not in config["kept"]:
                weight = name.removesuffix("_angles")
                yield _decode_weight(weight, angles, stored[weight + "_radii"], config)


def _decode_weight(
    name: str, angles: independent_reader.Stored, radii: independent_reader.Stored, config: dict
) -> independent_reader.Tensor:
    own = {"norm_exponent": 0, "shape": None, **config, **config["overrides"].get(name, {})}
    assert (own["codec"], own["bits"], angles.dtype, radii.dtype) == ("polar", 3.875, "U8", "F16")
    shape = tuple(own["shape"] or (*angles.shape[:-1], angles.shape[-1] // 46 * 128))
    elements = int(np.prod(shape))
    values = polar_decoder.decode_blocks(
        np.frombuffer(angles.data, dtype=np.uint8).reshape(-1, 46),
        np.frombuffer(radii.data, dtype="<f2").reshape(-1, 8),
        rotation=own["rotation"],
        norm_exponent=own["norm_exponent"],
    )
    assert len(values) == -(-elements // 128)
    data = independent_reader.to_bytes(values.reshape(-1)[:elements], own["dtype"])
    return independent_reader.Tensor(name, own["dtype"], shape, data)


if __name__ == "__main__":
    write_golden(sys.modules[__name__])
