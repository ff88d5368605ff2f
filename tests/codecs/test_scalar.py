"""The scalar codec on whole weights: the error that it promises and reports, and masters that mix codecs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import helpers
import independent_reader
import independent_writer
import numpy as np
import pytest
from blocks import DTYPES, examples, same_bits
from calls import export, quantize
from hypothesis import given
from hypothesis import strategies as st
from scalar import encode_scalar, encode_scalar_blocks, exponent_of

from pqweights.codecs import CODECS, polar
from pqweights.codecs.scalar import SIGNED_HADAMARD
from pqweights.errors import SourceError
from pqweights.options import ExportOptions
from pqweights.planning.recipe import parse_recipe
from pqweights.rewrite.results.inspect import inspect
from pqweights.rewrite.results.verify import verify

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

BITS = range(2, 9)
CODEC = CODECS["hadamard-lloyd-max"]

FAMILIES = helpers.block_families()
FAMILIES["all kinds in one weight"] = np.concatenate([values[:3] for values in FAMILIES.values()])
FAMILIES["constant and noise"] = 0.02 + helpers.gaussian(48, 128, seed=6, scale=0.002)  # one large rotated coordinate

each = pytest.mark.parametrize("bits", BITS)


def encode(values, bits, *, dtype="F32"):
    """Encode a whole weight, with all passes."""
    return encode_scalar(helpers.raw_bytes(values, dtype), dtype, values.shape, CODEC, bits)


def encode_blocks(values, bits, *, rotation=None, exponent=0, dtype="F32"):
    """Encode blocks [n, 128] in one pass. rotation: by default the first one of the codec."""
    rotation = rotation or CODEC.rotations[0]
    return encode_scalar_blocks(CODEC, helpers.raw_bytes(values, dtype), dtype, bits, rotation, exponent)


# Reported errors


def assert_errors_are_those_of_the_decoded(values, bits, *, dtype="F32", rounding=0.0):
    """Check the measured energy and error of a whole weight, and return the encoding and what was measured.

    rounding: relative error from rounding z and the decoded values, if errors of both signs do not cancel it
    """
    weight, measured = encode(values, bits, dtype=dtype)
    kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    exact = helpers.as_float32((dtype, helpers.raw_bytes(values, dtype).view(kind))).astype(np.float64)
    decoded = weight.decode_blocks(0, len(weight.codes), "F32").view(np.float32)[: exact.size].astype(np.float64)
    energy, error = (exact**2).sum(), ((decoded - exact) ** 2).sum()
    assert measured.energy == pytest.approx(energy, rel=1e-6, abs=0)
    assert abs(measured.error - error) <= 1e-5 * error + 2 * rounding * math.sqrt(error * energy) + rounding**2 * energy
    assert (weight.norms & 0x7FFF < 0x7C00).all()
    assert measured.norm_exponent == exponent_of(measured)
    return weight, measured


@each
def test_reported_errors_match_the_decoded_weights(bits):
    for dtype in DTYPES:
        assert_errors_are_those_of_the_decoded(helpers.gaussian(512, 128, seed=3, scale=0.05), bits, dtype=dtype)
    for family in ("heavy-tailed", "with blocks of zeros"):
        assert_errors_are_those_of_the_decoded(FAMILIES[family], bits)
    for family in ("few distinct values", "Walsh-aligned", "constant and noise"):
        assert_errors_are_those_of_the_decoded(FAMILIES[family], bits, rounding=2.0**-21)


@each
def test_zeros_are_exact_and_have_no_norms(bits):
    for values in (np.zeros((3, 128), np.float32), np.full((2, 128), -0.0, np.float32), np.zeros((2, 0), np.float32)):
        weight, measured = encode(values, bits)
        assert not weight.norms.any() and not weight.decode().view(np.float32).any()
        assert (measured.relative_mse, measured.norm_exponent, measured.energy) == (0, 0, 0)
        assert (measured.smallest_norm, measured.largest_norm) == (math.inf, 0.0)
        assert (independent_reader.unpack(weight.codes, bits) == 2 ** (bits - 1)).all()


@each
@pytest.mark.parametrize("scale", [2.0**-141, 1e-38, 1e-20, 1e20, 1e36])
def test_relative_error_does_not_depend_on_scale(bits, scale):
    """Weights from subnormal to huge; a power of two gives the same codes, other scales round the norms differently."""
    plain = helpers.gaussian(64, 128, seed=7, scale=1.0)
    values = (plain.astype(np.float64) * scale).astype(np.float32)
    weight, measured = encode(values, bits)
    assert weight.norm_exponent != 0 and np.isfinite(weight.decode().view(np.float32)).all()
    assert (weight.norms & 0x7FFF < 0x7C00).all() and (weight.norms & 0x7FFF >= 0x0400).all()
    if scale >= 1e-38:
        _, at_one = encode(plain, bits)
        assert measured.relative_mse == pytest.approx(at_one.relative_mse, rel=0.01)  # norms are rounded elsewhere
    power, at_power = encode(plain * np.float32(2.0**-60), bits)
    assert same_bits(power.codes, encode(plain, bits)[0].codes)
    assert at_power.norm_exponent < 0


@each
def test_constant_blocks_have_a_small_error(bits):
    """A constant is the worst case of the rotation, which the signed rotation rescues."""
    for constant in (0.0125, -3.0, 2.0**-10):
        values = np.full((5, 128), constant, np.float32)
        weight, _ = assert_errors_are_those_of_the_decoded(values, bits, rounding=2.0**-22)
        assert weight.rotation == SIGNED_HADAMARD


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_first_block_that_is_not_finite_is_reported(bad, dtype):
    """It is not among the first blocks that are encoded together, and the other blocks are encoded as usual."""
    values = helpers.gaussian(2100, 128, seed=1)
    clean = encode_blocks(values, 4, dtype=dtype)
    assert clean.stats.first_bad_block == -1
    broken = values.copy()
    broken[2051, 127] = broken[2060, 0] = broken[1500, 64] = bad
    raw = helpers.raw_bytes(np.nan_to_num(broken, nan=0, posinf=0, neginf=0), dtype)
    word = {"BF16": helpers.bf16, "F16": helpers.f16, "F32": helpers.f32}[dtype](np.float32([bad]))[1]
    words = raw.view(word.dtype).reshape(-1, 128)
    words[2051, 127] = words[2060, 0] = words[1500, 64] = word[0]
    before = raw.copy()
    found = encode_scalar_blocks(CODEC, raw, dtype, 4, CODEC.rotations[0])
    assert same_bits(raw, before)
    assert found.stats.first_bad_block == 1500
    rest = np.delete(np.arange(2100), [1500, 2051, 2060])
    assert same_bits(found.codes[rest], clean.codes[rest]) and same_bits(found.norms[rest], clean.norms[rest])
    with pytest.raises(SourceError, match="block 1500"):
        encode_scalar(raw, dtype, (2100, 128), CODEC, 4)


def test_output_does_not_depend_on_how_blocks_are_split_into_calls():
    values = np.concatenate([helpers.gaussian(2000, 128, seed=2), *(v[:4] for v in FAMILIES.values())])
    for rotation in CODEC.rotations:
        whole = encode_blocks(values, 5, rotation=rotation, exponent=140)
        for step in (1, 700, 1024, 1025):
            starts = range(0, len(values), step) if step > 1 else (0, 1, 1023, 1024, 2000, 2050)
            for first in starts:
                part = encode_blocks(values[first : first + step], 5, rotation=rotation, exponent=140)
                for field in ("codes", "norms", "energies", "errors"):
                    assert same_bits(getattr(part, field), getattr(whole, field)[first : first + step])


@given(st.integers(0, 2**32 - 1))
@examples(30)
def test_column_butterfly_and_sum_match_the_format(seed):
    values = np.random.default_rng(seed).standard_normal((5, 128)).astype(np.float32)
    turned = polar.hadamard(np.ascontiguousarray(values.T))
    assert same_bits(np.ascontiguousarray(turned.T), independent_reader.hadamard(values))
    assert same_bits(polar.tree_sum(values.T.copy()), independent_writer.tree(values))


# Whole checkpoints

MIXED = """
name: mixed
codec: hadamard-lloyd-max
bits: 4
rules:
  - {name: "*.up_proj.weight", bits: 5}
  - {name: "*.down_proj.weight", codec: polar}
  - {name: "*.gate_proj.weight", codec: hadamard-trellis, bits: 3}
  - {name: "*.q_proj.weight", bits: 8}
"""
CODEC_OF = {
    "up_proj": ("hadamard-lloyd-max", 5),
    "down_proj": ("polar", 3.875),
    "gate_proj": ("hadamard-trellis", 3),
    "q_proj": ("hadamard-lloyd-max", 8),
    "k_proj": ("hadamard-lloyd-max", 4),
    "embed_tokens": ("hadamard-lloyd-max", 4),
}


def mixed_checkpoint(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    weights = {
        "model.embed_tokens.weight": helpers.gaussian(40, 130, seed=1),
        "model.layers.0.self_attn.q_proj.weight": 0.02 + helpers.gaussian(64, 128, scale=0.002),  # to be rescued
        "model.layers.0.self_attn.k_proj.weight": helpers.gaussian(64, 128, seed=3, scale=1e-7),
        "model.layers.0.mlp.up_proj.weight": helpers.gaussian(96, 128, seed=4),
        "model.layers.0.mlp.gate_proj.weight": helpers.gaussian(96, 128, seed=5),
        "model.layers.0.mlp.down_proj.weight": helpers.gaussian(64, 256, seed=6),
    }
    tensors = {name: helpers.bf16(values) for name, values in weights.items()}
    tensors["model.norm.weight"] = helpers.bf16(helpers.gaussian(128, seed=7))
    exact = {name: helpers.as_float32(tensors[name]) for name in weights}
    return helpers.write_checkpoint(folder, tensors, config={"model_type": "llama"}), exact


def codec_of(name: str) -> tuple[str, float]:
    return next(found for part, found in CODEC_OF.items() if part in name)


def test_one_recipe_can_mix_codecs(tmp_path: Path) -> None:
    source, exact = mixed_checkpoint(tmp_path / "model")
    out = tmp_path / "out"
    quantize(source, out, parse_recipe(MIXED, "mixed.yaml"), threads=2)
    result = verify(out, threads=2)
    assert result.ok, result.problems
    found = {tensor["name"]: tensor for tensor in inspect(out).to_json()["tensors"]}
    export(out, tmp_path / "plain", "bf16", ExportOptions(), threads=2)
    plain = helpers.read_all(tmp_path / "plain")
    for name, values in exact.items():
        codec, bits = codec_of(name)
        entry, decoded = found[name], helpers.as_float32(plain[name])
        assert (entry["codec"], entry["bits"]) == (codec, bits)
        assert (entry["rotation"] == SIGNED_HADAMARD) == ("q_proj" in name)
        error = ((decoded.astype(np.float64) - values) ** 2).sum() / (values.astype(np.float64) ** 2).sum()
        # Rounding to BF16 adds some 2**-18.
        assert error == pytest.approx(entry["relative_mse"], rel=0.02, abs=8e-6), name
        assert not entry["exceeds"]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["codec"], config["bits"], config["rotation"]) == ("hadamard-lloyd-max", 4, "hadamard")
    assert config["format_version"] == 3 and set(config["levels"]) == {"hadamard-lloyd-max"}
