"""The golden masters of other codecs: weights of hadamard-trellis, made by the command, of
hadamard-trellis-columns, of ready codes, and of native, made by the command without a recipe.

`trellis/` has the same step in all blocks of a superblock and errors of least squares, as the first masters.

    PYTHONPATH=tests:tests/support python -m golden.make_codecs

writes `trellis/`, `steps/`, `columns/`, `native/`, `stacks/` and what they decode to anew. Do so when the
encoder of the trellis chooses other bytes on purpose. A change of a decoder would change the format: these masters
have to be decoded to the same values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import column_decoder
import column_writer
import helpers
import independent_reader
import native_decoder
import numpy as np
import trellis_decoder
from calls import quantize
from commands import done
from golden.make import HERE, mixed_scales, weights, write_by_command, write_golden
from independent_reader import Stored, Tensor

from pqweights.convert.ready import CodeMeasures, ReadyWeights, write_ready
from pqweights.formats.lloyd_max import LloydMax
from pqweights.formats.trellis import Trellis
from pqweights.planning.recipe import parse_recipe
from pqweights.targets.master import Learned

Sources = dict[str, helpers.Tensor]


def trellis_source() -> Sources:
    """Several sizes, dtypes and rotations."""
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


TRELLIS_RECIPE = """
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


def columns_source() -> Sources:
    """Weights for ready codes of several sizes and dtypes, and weights of the other codecs."""
    return {
        "model.layers.strips.weight": helpers.bf16(weights(130, 5, seed=51)),
        "model.layers.superblocks.weight": helpers.f16(weights(3, 770, seed=52)),
        "model.layers.one.weight": helpers.f32(weights(1, 1, seed=53)),
        "model.layers.zero.weight": helpers.bf16(np.zeros((2, 17), np.float32)),
        "model.layers.huge.weight": helpers.f32(weights(4, 3, seed=54, exponent=110)),
        "model.layers.scalar.weight": helpers.bf16(weights(2, 128, seed=55)),
        "model.layers.trellis.weight": helpers.bf16(weights(3, 128, seed=56)),
        "model.norm.weight": helpers.bf16(1 + weights(9, seed=58)),
    }


COLUMNS_RECIPE = """
name: golden-columns
description: The weights that were not calibrated have the other codecs.
codec: hadamard-trellis
bits: 2.5
rules:
  - {name: "*.scalar.weight", codec: hadamard-lloyd-max, bits: 3}
"""


def native_source() -> Sources:
    """Weights of every dtype, also of FP8 with scales, MXFP4 and values that no other codec takes."""
    float8 = np.where(weights(64, 128, seed=61) < 0, 0x80, 0) + 0x30 + np.abs(weights(64, 128, seed=62) * 512) % 8
    packed = (8 * (weights(2, 32, 2, 16, seed=63) > 0.01) + 3).astype(np.uint8)
    odd = weights(40, 70, seed=64)
    odd[3, :4] = [np.nan, np.inf, -np.inf, -0.0]
    return {
        "model.layers.rows.weight": helpers.bf16(weights(66, 1000, seed=60)),  # two chunks
        "model.layers.half.weight": helpers.f16(weights(30, 129, seed=65)),
        "model.layers.single.weight": helpers.f32(odd),
        "model.layers.zero.weight": helpers.bf16(np.zeros((20, 128), np.float32)),
        "model.layers.short.weight": helpers.bf16(weights(2, 70, seed=66)),
        "model.layers.wide.weight": ("F64", weights(2, 70, seed=67).astype(np.float64) / 3),
        "model.layers.float8.weight": ("F8_E4M3", float8.astype(np.uint8)),
        "model.layers.float8.weight_scale_inv": helpers.f32(np.array([[0.0123]], np.float32)),
        "model.layers.mlp.experts.down_proj_blocks": ("U8", packed),
        "model.layers.mlp.experts.down_proj_scales": ("U8", np.arange(64, 192, dtype=np.uint8).reshape(2, 32, 2)),
        "model.norm.weight": helpers.bf16(1 + weights(900, seed=68)),
    }


def stacks_source() -> Sources:
    """Stacks and transposed weights for ready codes, and weights of the other codecs."""
    return {
        "model.layers.stack.weight": helpers.bf16(weights(3, 130, 5, seed=71)),
        "model.layers.turned.weight": helpers.f16(weights(2, 770, 131, seed=72)),
        "model.layers.single.weight": helpers.f32(weights(7, 129, seed=73)),
        "model.layers.strips.weight": helpers.bf16(weights(130, 5, seed=74)),
        "model.layers.one.weight": helpers.f32(weights(1, 1, 1, seed=75)),
        "model.layers.scalar.weight": helpers.bf16(weights(2, 128, seed=78)),
        "model.layers.trellis.weight": helpers.bf16(weights(3, 128, seed=76)),
        "model.norm.weight": helpers.bf16(1 + weights(9, seed=77)),
    }


# The ready weights, each with about how many bits its blocks take; and those of them that are transposed.
READY = {"strips": 2.0, "superblocks": 1.0, "one": 3.0, "zero": 1.0, "huge": 4.0}
READY_STACKS = {"stack": 2.0, "turned": 1.0, "single": 2.0, "strips": 2.0, "one": 3.0}
TRANSPOSED = ("turned", "single")


@dataclass(frozen=True)
class Golden:
    """A golden master.

    name: of its folder, and of the file with what it decodes to
    first_parts: the suffixes of the weights in that file, which has the kept tensors if it has all weights
    is_first: whether all blocks of a superblock have one step, and errors of least squares
    """

    name: str
    source: Sources
    recipe: str
    first_parts: tuple[str, ...]
    is_first: bool = False

    @property
    def MASTER(self) -> Path:
        return HERE / self.name

    @property
    def EXPECTED(self) -> Path:
        return HERE / f"{self.name}.json"

    def write_source(self, folder: Path) -> Path:
        return helpers.write_checkpoint(folder, self.source, config={"model_type": "golden"})

    def write_master(self, source: Path, out: Path, threads: int = 1) -> None:
        power, most = (0, 0) if self.is_first else (Trellis.first_step_power, Trellis.most_gained)
        trellis = mock.patch.multiple(Trellis, first_step_power=power, most_gained=most)
        with trellis, mock.patch.object(LloydMax, "gained", () if self.is_first else LloydMax.gained):
            write_by_command(source, out, self.recipe, threads)

    def read_master(self, folder: Path) -> Iterator[Tensor]:
        """The tensors that the file has, by the independent decoders."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        assert (config["quant_method"], config["format_version"], config["block_size"]) == (
            "pqweights", 1, 128,
        )  # fmt: skip
        stored: dict[str, Stored] = {}
        for path in sorted(folder.glob("*.safetensors")):
            stored |= independent_reader.read_safetensors(path)
        for name, entry in stored.items():
            weight, _, part = name.rpartition("_")
            if name in config["kept"]:
                if "codes" in self.first_parts:
                    yield Tensor(name, entry.dtype, entry.shape, entry.data)
            elif part in self.first_parts:
                yield DECODERS[part](weight, stored, config)


@dataclass(frozen=True)
class GoldenOfReadyCodes(Golden):
    """A golden master of which some weights have ready codes. ready: these, as READY"""

    ready: Mapping[str, float] = field(default_factory=lambda: READY)

    def write_master(self, source: Path, out: Path, threads: int = 1) -> None:
        folder = source.parent / "ready"
        for seed, (short, rate) in enumerate(self.ready.items()):
            name = f"model.layers.{short}.weight"
            exact = helpers.as_float32(self.source[name])
            codes = column_writer.encoded(exact, rate, seed=seed, transposed=short in TRANSPOSED)
            measured = CodeMeasures(relative_mse=0.1, energy=float((exact.astype(np.float64) ** 2).sum()))
            write_ready(folder / f"{short}.safetensors", {name: (codes, measured)})
        recipe, ready = parse_recipe(self.recipe, "golden"), ReadyWeights.open(folder)
        quantize(source, out, recipe, threads=threads, learned=Learned(ready=ready))


@dataclass(frozen=True)
class GoldenWithoutLoss(Golden):
    """A golden master of the source's own numbers; what is read of it are the stored tensors of the source."""

    def write_master(self, source: Path, out: Path, threads: int = 1) -> None:
        done("quantize", source, out, "--lossless", "--threads", threads, "--max-shard-size", "5GB")

    def read_master(self, folder: Path) -> Iterator[Tensor]:
        """The stored tensors of the source, by the independent decoder."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        assert (config["format_version"], config["block_size"], config["source"]) == (1, 65536, {})
        stored: dict[str, Stored] = {}
        for path in sorted(folder.glob("*.safetensors")):
            stored |= independent_reader.read_safetensors(path)
        for name, entry in stored.items():
            whole = name.removesuffix("_coded")
            if whole == name and not name.endswith("_lengths"):
                yield Tensor(name, entry.dtype, entry.shape, entry.data)
            elif whole != name:
                own = config["coded"].get(whole) or {"dtype": config["dtype"], **config["overrides"][whole]}
                dtype, shape = own["dtype"], tuple(own["shape"])
                yield Tensor(whole, dtype, shape, native_decoder.decode(
                    entry.data, stored[f"{whole}_lengths"].data, dtype, shape
                ))  # fmt: skip


def _scalar(name: str, stored: Mapping[str, Stored], config: dict) -> Tensor:
    return independent_reader.decode_weight(name, stored[name + "_codes"], stored[name + "_norms"], None, config)


def _trellis(name: str, stored: Mapping[str, Stored], config: dict) -> Tensor:
    own, entry = {**config, **config["overrides"][name]}, stored[name + "_trellis"]
    if own["codec"] == "hadamard-trellis-columns":
        return _columns(name, stored, own)
    assert own["codec"] == "hadamard-trellis" and entry.dtype == "U8"
    cut = trellis_decoder.cut(int(np.prod(own["shape"])), own["bits"])
    assert tuple(entry.shape) == (cut.superblocks, cut.size)
    rows = np.frombuffer(entry.data, dtype=np.uint8).reshape(entry.shape)
    signed, step_power = own["rotation"] == "signed-hadamard", own.get("step_power", 0)
    values = trellis_decoder.decode(rows, cut.blocks, signed=signed, step_power=step_power)
    return _rounded(name, values, own["shape"], own["dtype"])


def _columns(name: str, stored: Mapping[str, Stored], own: Mapping[str, Any]) -> Tensor:
    trellis, lengths, rows, columns = (
        stored[f"{name}_{part}"] for part in ("trellis", "lengths", "row_scales", "column_scales")
    )
    shape, transposed = tuple(own["shape"]), own.get("transposed", False)
    assert [entry.dtype for entry in (trellis, lengths, rows, columns)] == ["U8", "I32", "U8", "U8"]
    scaled = [(*shape[:-2], shape[-1]), shape[:-1]]
    assert [columns.shape, rows.shape] == (scaled[::-1] if transposed else scaled)
    assert own["bits"] == column_decoder.bits(shape, len(trellis.data), transposed=transposed)
    values = column_decoder.decode(
        trellis.data,
        np.frombuffer(lengths.data, dtype="<i4").reshape(lengths.shape),
        np.frombuffer(rows.data, dtype=np.uint8).reshape(rows.shape),
        np.frombuffer(columns.data, dtype=np.uint8).reshape(columns.shape),
        transposed=transposed,
    )
    return _rounded(name, values, shape, own["dtype"])


def _rounded(name: str, values: np.ndarray, shape: Any, dtype: str) -> Tensor:
    data = independent_reader.to_bytes(values.reshape(-1)[: int(np.prod(shape))], dtype)
    return Tensor(name, dtype, tuple(shape), data)


DECODERS = {"codes": _scalar, "trellis": _trellis}
TRELLIS = Golden("trellis", trellis_source(), TRELLIS_RECIPE, ("codes", "trellis"), is_first=True)
STEPS = Golden("steps", trellis_source(), TRELLIS_RECIPE, ("codes", "trellis"))
COLUMNS = GoldenOfReadyCodes("columns", columns_source(), COLUMNS_RECIPE, ("codes", "trellis"))
NATIVE = GoldenWithoutLoss("native", native_source(), "", ())
STACKS = GoldenOfReadyCodes("stacks", stacks_source(), COLUMNS_RECIPE, ("codes", "trellis"), ready=READY_STACKS)

if __name__ == "__main__":
    write_golden(TRELLIS)
    write_golden(STEPS)
    write_golden(COLUMNS)
    write_golden(NATIVE)
    write_golden(STACKS)
