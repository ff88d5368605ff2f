"""The scalar codecs: their levels, the error that they promise, what they store, and the errors that they report.

The codecs for comparison are checked byte by byte against the independent writer, which follows docs/format.md, and
against a float64 reference in this file, which follows their definition with an explicit matrix.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from pathlib import Path

import helpers
import independent_reader
import independent_writer
import mpmath
import numpy as np
import pytest
import torch
from blocks import DTYPES, examples, same_bits
from calls import export, quantize
from hypothesis import given
from hypothesis import strategies as st
from pqweights_cli.main import app
from scalar import coding, encode_scalar, encode_scalar_blocks, exponent_of
from typer.testing import CliRunner

from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.codecs import CODECS, comparison, lloyd_max
from pqweights.codecs.scalar import HADAMARD, SIGNED_HADAMARD, UNROTATED, ScalarCodec
from pqweights.codecs.weight import add_in_order
from pqweights.errors import SourceError
from pqweights.exports.options import ExportOptions
from pqweights.kernels import SIGNS, load_backend, reference
from pqweights.planning.recipe import parse_recipe
from pqweights.results.inspect import inspect
from pqweights.results.verify import verify

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

COMPARED = ("absmax", "hadamard-absmax", "lloyd-max", "hadamard-lloyd-max-l2")
BITS = range(2, 9)
SCALAR = {name: codec for name, codec in CODECS.items() if isinstance(codec, ScalarCodec)}
EVERY = [(name, bits) for name, codec in SCALAR.items() for bits in codec.rates]
EVERY_COMPARED = [(name, bits) for name in COMPARED for bits in BITS]

FAMILIES = helpers.block_families()
FAMILIES["all kinds in one weight"] = np.concatenate([values[:3] for values in FAMILIES.values()])
FAMILIES["signed Walsh"] = SIGNS * FAMILIES["Walsh-aligned"]
FAMILIES["constant and noise"] = 0.02 + helpers.gaussian(48, 128, seed=6, scale=0.002)  # one large rotated coordinate

each = pytest.mark.parametrize(("name", "bits"), EVERY)
each_compared = pytest.mark.parametrize(("name", "bits"), EVERY_COMPARED)


def encode(name, values, bits, *, dtype="F32"):
    """Encode a whole weight, with all passes."""
    return encode_scalar(helpers.raw_bytes(values, dtype), dtype, values.shape, SCALAR[name], bits)


def encode_blocks(name, values, bits, *, rotation=None, exponent=0, dtype="F32"):
    """Encode blocks [n, 128] in one pass. rotation: by default the first one of the codec."""
    rotation = rotation or SCALAR[name].rotations[0]
    return encode_scalar_blocks(SCALAR[name], helpers.raw_bytes(values, dtype), dtype, bits, rotation, exponent)


def decode_blocks(name, encoded, bits, *, rotation):
    return decode(name, encoded, dtype="F32", bits=bits, rotation=rotation).view(np.float32).reshape(-1, 128)


def decode(name, encoded, *, dtype, bits, rotation, exponent=0):
    """Decode to raw bytes. rotation: None to leave blocks in the basis in which they are coded."""
    values = np.empty(len(encoded.codes) * 128 * (4 if dtype == "F32" else 2), np.uint8)
    load_backend("cpu").decode(
        (encoded.codes, encoded.norms), coding(SCALAR[name], bits, rotation, exponent), dtype, values
    )
    return values


def test_codecs_describe_their_rates_rotations_and_sizes():
    for name, codec in SCALAR.items():
        assert codec.name == name
        assert codec.rates == BITS
        assert set(codec.rotations) in ({HADAMARD, SIGNED_HADAMARD}, {UNROTATED})
        assert codec.rotations[0] in (HADAMARD, UNROTATED)
        for bits in codec.rates:
            assert [part.bytes_per_block for part in codec.coder(bits).parts] == [16 * bits, 2]
            assert codec.codebook(bits).levels.shape == (2**bits,)
    assert set(COMPARED) < set(SCALAR)


def test_docs_list_the_codecs_and_their_distortions():
    root = Path(__file__).parents[2]
    page = (root / "docs/format.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (`[^|]*`) \| [\w-]+ \| [\w ]+ \|$", page, re.MULTILINE)
    assert {name: tuple(re.findall(r"`([^`]+)`", cells)) for name, cells in rows} == {
        name: codec.rotations for name, codec in SCALAR.items()
    }
    text = re.sub(r"\s+", " ", page[page.index("Gaussian blocks of 128:") : page.index("**Levels.** Lloyd-Max")])
    stated = {int(bits): float(value) for bits, value in re.findall(r"(\d) bits (0\.\d+)", text)}
    assert stated == comparison.ABSMAX_DISTORTION
    recipes = (root / "recipes/README.md").read_text()
    assert set(re.findall(r"^\| `((?:\w+-)*(?:absmax|max|l2))` \|", recipes, re.MULTILINE)) == set(SCALAR)


def test_distortion_falls_with_the_bit_width():
    for codec in SCALAR.values():
        promised = [codec.distortion(bits) for bits in codec.rates]
        assert all(0 < fine < coarse / 3 for coarse, fine in itertools.pairwise(promised))


# Levels


@pytest.mark.parametrize("bits", BITS)
def test_uniform_levels_are_symmetric_multiples_of_a_step(bits):
    book, steps = SCALAR["absmax"].codebook(bits), 2 ** (bits - 1) - 1
    assert SCALAR["hadamard-absmax"].codebook(bits) is book
    assert book.levels.dtype == np.float32 and (np.diff(book.levels) > 0).all()
    expected = np.arange(-steps - 1, steps + 1) / steps * math.sqrt(128)
    assert np.allclose(book.levels, expected, rtol=2.0**-23, atol=0)
    assert book.levels[2 ** (bits - 1)] == 0 and np.array_equal(book.levels[1:], -book.levels[:0:-1])


@pytest.mark.parametrize("bits", BITS)
def test_other_codecs_share_the_lloyd_max_levels(bits):
    for name in ("lloyd-max", "hadamard-lloyd-max-l2", "hadamard-lloyd-max"):
        assert SCALAR[name].codebook(bits) is lloyd_max.codebook(bits)
        assert SCALAR[name].distortion(bits) == lloyd_max.DISTORTION[bits]


# Distortion


@pytest.mark.parametrize("bits", BITS)
def test_distortion_of_uniform_levels_matches_integration(bits):
    """Integrate over the maximum m of 128 magnitudes of N(0,1); the 127 other values lie in [-m, m] and are rounded."""
    steps = 2 ** (bits - 1) - 1
    nodes, weights = np.polynomial.legendre.leggauss(20)

    def density(x):
        return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def squared_error(m):
        """Return the squared error of a value in [-m, m], times the probability of lying there."""
        levels = np.arange(steps + 1) * m / steps
        low = np.maximum(levels - m / steps / 2, 0)
        high = np.minimum(levels + m / steps / 2, m)
        x = low[:, None] + (high - low)[:, None] * (nodes + 1) / 2
        return 2 * ((x - levels[:, None]) ** 2 * density(x) * weights * (high - low)[:, None] / 2).sum()

    total = probability = 0.0
    for low in np.arange(0, 9, 0.125):
        for node, weight in zip(low + 0.125 * (nodes + 1) / 2, weights * 0.125 / 2, strict=True):
            inside = math.erf(node / math.sqrt(2))
            of_maximum = 128 * 2 * density(node) * inside**126 * weight  # one factor `inside` is left to squared_error
            probability += of_maximum * inside
            total += of_maximum * squared_error(node)
    assert probability == pytest.approx(1, abs=1e-12)
    assert SCALAR["absmax"].distortion(bits) == pytest.approx(total * 127 / 128, rel=5e-9)
    assert SCALAR["hadamard-absmax"].distortion(bits) == SCALAR["absmax"].distortion(bits)


def test_distortion_of_uniform_levels_at_two_bits_matches_the_closed_form():
    """The levels are -m, 0 and m; the error within [0, m] comes from antiderivatives, in 30 digits."""
    with mpmath.workdps(30):

        def of_maximum(m):
            mass, square = mpmath.ncdf, lambda x: mpmath.ncdf(x) - x * mpmath.npdf(x)  # of 1 and of x**2
            error = square(m) - square(0)
            error += 2 * m * (mpmath.npdf(m) - mpmath.npdf(m / 2)) + m * m * (mass(m) - mass(m / 2))
            return 127 * 4 * mpmath.npdf(m) * mpmath.erf(m / mpmath.sqrt(2)) ** 126 * error

        exact = float(mpmath.quad(of_maximum, [0, 2, 2.5, 3, 4, 5, 9]))
    assert SCALAR["absmax"].distortion(2) == pytest.approx(exact, rel=5e-9)


@pytest.mark.parametrize("bits", BITS)
def test_distortion_of_uniform_levels_matches_random_blocks(bits):
    values = np.random.default_rng(bits).standard_normal((20_000, 128))
    step = np.abs(values).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    error = ((np.round(values / step) * step - values) ** 2).sum() / (values**2).sum()
    assert error == pytest.approx(SCALAR["absmax"].distortion(bits), rel=0.005)


@each
def test_gaussian_weights_have_the_promised_distortion(name, bits):
    """Absmax codecs are within 3 %; the norms of the others can only improve on the promise, by at most 6 %."""
    _, measured = encode(name, helpers.gaussian(2048, 128, seed=bits, scale=0.03), bits)
    ratio = measured.relative_mse / SCALAR[name].distortion(bits)
    assert 0.97 <= ratio <= 1.03 if "absmax" in name else 0.94 <= ratio <= 1.0


# Stored codes and norms


@functools.cache
def matrix():
    return helpers.sylvester() / math.sqrt(128)


def exact_encoding(name, blocks, bits):
    """Return codes and norms by definition, in float64, and where the code is not a near tie."""
    turned = blocks.astype(np.float64)
    if name.startswith("hadamard"):
        turned = turned @ matrix()
    if name.endswith("absmax"):
        steps = 2 ** (bits - 1) - 1
        norms = np.abs(turned).max(axis=1)
        levels = np.arange(-steps, steps + 1) / steps
        first, distance = 1, turned / norms[:, None]
    else:
        upper = np.array(lloyd_max.HALF_LEVELS[bits])
        levels, first = np.concatenate([-upper[::-1], upper]), 0
        norms = np.sqrt((turned**2).sum(axis=1))
        distance = turned / norms[:, None] * math.sqrt(128)
    nearest = np.abs(distance[:, :, None] - levels).argmin(axis=2)
    middles = (levels[:-1] + levels[1:]) / 2
    gap = np.abs(distance[:, :, None] - middles).min(axis=2)
    return first + nearest, norms, gap > 2e-5 * np.abs(levels).max()  # near ties are decided by rounding


@each_compared
def test_codes_and_norms_match_the_definition(name, bits):
    for family in ("gaussian", "heavy-tailed", "Walsh-aligned", "few distinct values"):
        values = FAMILIES[family]
        if not values.any(axis=1).all():
            values = values[values.any(axis=1)]
        encoded = encode_blocks(name, values, bits, exponent=-4)
        codes, norms, clear = exact_encoding(name, values, bits)
        assert clear.mean() > (0.98 if family in ("gaussian", "heavy-tailed") else 0)
        found = independent_reader.unpack(encoded.codes, bits)
        assert np.array_equal(found[clear], codes[clear]), family
        assert (np.abs(found - codes) <= 1).all(), family
        stored = encoded.norms.view(np.float16).astype(np.float64) / 16
        assert np.allclose(stored, norms, rtol=2.0**-11 * 1.001, atol=2.0**-29), family
        if name.endswith("absmax"):
            assert found.min() >= 1


@pytest.mark.parametrize("dtype", DTYPES)
@each_compared
def test_encoding_is_bit_identical_to_the_independent_writer(name, bits, dtype):
    """Includes the rotations that a weight does not need; the independent reader decodes the same values."""
    for family, values in FAMILIES.items():
        raw = helpers.raw_bytes(values, dtype)
        ours, measured = encode_scalar(raw, dtype, values.shape, SCALAR[name], bits)
        book = SCALAR[name].codebook(bits)
        theirs = independent_writer.encode(
            helpers.values_of(raw, dtype), book.levels, bits, SCALAR[name].distortion(bits), name
        )
        assert (ours.rotation, ours.norm_exponent) == (theirs.rotation, theirs.norm_exponent), family
        assert np.array_equal(ours.codes, theirs.codes), family
        assert np.array_equal(ours.norms, theirs.norms), family
        assert (measured.energy, measured.error) == (theirs.energy, theirs.squared_error), family
        decoded = independent_reader.decode_blocks(
            ours.codes, ours.norms.view(np.float16), book.levels, bits, ours.rotation, ours.norm_exponent
        )
        assert independent_reader.to_bytes(decoded, dtype) == ours.decode().tobytes(), family
        for rotation in SCALAR[name].rotations:  # whether it is needed or not
            theirs = independent_writer.encode_rotated(helpers.values_of(raw, dtype), book.levels, bits, rotation, name)
            found = encode_blocks(name, values, bits, rotation=rotation, exponent=theirs.norm_exponent, dtype=dtype)
            assert same_bits(found.codes, theirs.codes) and same_bits(found.norms, theirs.norms), (family, rotation)
            assert same_bits(found.energies, theirs.block_energy), (family, rotation)
            assert same_bits(found.errors, theirs.block_error), (family, rotation)


@pytest.mark.parametrize("name", SCALAR)
def test_signed_rotation_rescues_a_constant_with_noise(name):
    weight, measured = encode(name, FAMILIES["constant and noise"], 6)
    if len(SCALAR[name].rotations) > 1:
        assert weight.rotation == SIGNED_HADAMARD
    assert measured.relative_mse < 1.25 * SCALAR[name].distortion(6) or name == "lloyd-max"


@each_compared
def test_kernels_and_reference_decode_to_the_same_bytes(name, bits):
    codec = SCALAR[name]
    for values in (FAMILIES["gaussian"], FAMILIES["all kinds in one weight"]):
        encoded, _ = encode(name, values, bits)
        for rotation in (*codec.rotations, None):
            for dtype in DTYPES:
                ours = decode(name, encoded, dtype=dtype, bits=bits, rotation=rotation, exponent=encoded.norm_exponent)
                theirs = np.empty_like(ours)
                how = coding(codec, bits, rotation, encoded.norm_exponent)
                reference.decode((encoded.codes, encoded.norms), how, dtype, theirs)
                assert same_bits(ours, theirs), (rotation, dtype)


@pytest.mark.parametrize("name", COMPARED)
def test_decoding_without_the_rotation_gives_hadamard_coordinates(name):
    """A codec without a rotation gives the weight itself."""
    values = FAMILIES["gaussian"]
    encoded, rotation = encode_blocks(name, values, 6), SCALAR[name].rotations[0]
    decoded = decode_blocks(name, encoded, 6, rotation=rotation)
    as_coded = decode_blocks(name, encoded, 6, rotation=None)
    if rotation == UNROTATED:
        assert same_bits(as_coded, decoded)
    else:
        assert np.allclose(as_coded @ matrix(), decoded, atol=1e-6)
        assert np.abs(as_coded - decoded).max() > 0.01


# Reported errors


def assert_errors_are_those_of_the_decoded(name, values, bits, *, dtype="F32", rounding=0.0):
    """Check the measured energy and error of a whole weight, and return the encoding and what was measured.

    rounding: relative error from rounding z and the decoded values, if errors of both signs do not cancel it
    """
    weight, measured = encode(name, values, bits, dtype=dtype)
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
def test_reported_errors_match_the_decoded_weights(name, bits):
    for dtype in DTYPES:
        assert_errors_are_those_of_the_decoded(name, helpers.gaussian(512, 128, seed=3, scale=0.05), bits, dtype=dtype)
    for family in ("heavy-tailed", "with blocks of zeros"):
        assert_errors_are_those_of_the_decoded(name, FAMILIES[family], bits)
    for family in ("few distinct values", "Walsh-aligned", "constant and noise"):
        assert_errors_are_those_of_the_decoded(name, FAMILIES[family], bits, rounding=2.0**-21)


@pytest.mark.parametrize("count", [0, 1, 2, 1000, 8192])
def test_errors_are_added_one_after_the_other(count):
    """As Python adds floats, of all sizes and signs."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-8, 8, count)
    total = 0.1
    for value in values.tolist():
        total += value
    assert add_in_order(0.1, values) == total


@each
def test_padding_of_the_last_block_does_not_count(name, bits):
    values = helpers.gaussian(7, 91, seed=8)
    weight, measured = assert_errors_are_those_of_the_decoded(name, values, bits, rounding=2.0**-24)
    padded = np.zeros(640, np.float32)
    padded[:637] = values.reshape(-1)
    whole, of_whole = encode(name, padded, bits)
    assert np.array_equal(weight.codes, whole.codes) and np.array_equal(weight.norms, whole.norms)
    assert measured.energy == of_whole.energy
    alone, of_alone = assert_errors_are_those_of_the_decoded(name, np.float32([0.25]), bits, rounding=2.0**-24)
    assert alone.codes.shape == (1, 16 * bits) and of_alone.energy == 0.0625


@each
def test_zeros_are_exact_and_have_no_norms(name, bits):
    for values in (np.zeros((3, 128), np.float32), np.full((2, 128), -0.0, np.float32), np.zeros((2, 0), np.float32)):
        weight, measured = encode(name, values, bits)
        assert not weight.norms.any() and not weight.decode().view(np.float32).any()
        assert (measured.relative_mse, measured.norm_exponent, measured.energy) == (0, 0, 0)
        assert (measured.smallest_norm, measured.largest_norm) == (math.inf, 0.0)
        assert (independent_reader.unpack(weight.codes, bits) == 2 ** (bits - 1)).all()


@each
@pytest.mark.parametrize("scale", [2.0**-141, 1e-38, 1e-20, 1e20, 1e36])
def test_relative_error_does_not_depend_on_scale(name, bits, scale):
    """Weights from subnormal to huge; a power of two gives the same codes, other scales round the norms differently."""
    plain = helpers.gaussian(64, 128, seed=7, scale=1.0)
    values = (plain.astype(np.float64) * scale).astype(np.float32)
    weight, measured = encode(name, values, bits)
    assert weight.norm_exponent != 0 and np.isfinite(weight.decode().view(np.float32)).all()
    assert (weight.norms & 0x7FFF < 0x7C00).all() and (weight.norms & 0x7FFF >= 0x0400).all()
    if scale >= 1e-38:
        _, at_one = encode(name, plain, bits)
        assert measured.relative_mse == pytest.approx(at_one.relative_mse, rel=0.01)  # norms are rounded elsewhere
    power, at_power = encode(name, plain * np.float32(2.0**-60), bits)
    assert same_bits(power.codes, encode(name, plain, bits)[0].codes)
    assert at_power.norm_exponent < 0


@each
def test_constant_blocks_have_a_small_error(name, bits):
    """A constant is the worst case of the rotation, which the signed rotation rescues."""
    for constant in (0.0125, -3.0, 2.0**-10):
        values = np.full((5, 128), constant, np.float32)
        weight, measured = assert_errors_are_those_of_the_decoded(name, values, bits, rounding=2.0**-22)
        if name.endswith("absmax"):  # a single level, and a single coordinate
            assert weight.rotation == SCALAR[name].rotations[0]
            assert measured.relative_mse < 2.0**-22
        elif name == "lloyd-max":
            nearest = np.abs(SCALAR[name].codebook(bits).levels.astype(np.float64) - 1).min()
            assert math.sqrt(measured.relative_mse) == pytest.approx(nearest, abs=2.0**-10)
        else:
            assert weight.rotation == SIGNED_HADAMARD


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCALAR)
def test_first_block_that_is_not_finite_is_reported(name, bad, dtype):
    """It is not among the first blocks that are encoded together, and the other blocks are encoded as usual."""
    values = helpers.gaussian(2100, 128, seed=1)
    clean = encode_blocks(name, values, 4, dtype=dtype)
    assert clean.stats.first_bad_block == -1
    broken = values.copy()
    broken[2051, 127] = broken[2060, 0] = broken[1500, 64] = bad
    raw = helpers.raw_bytes(np.nan_to_num(broken, nan=0, posinf=0, neginf=0), dtype)
    word = {"BF16": helpers.bf16, "F16": helpers.f16, "F32": helpers.f32}[dtype](np.float32([bad]))[1]
    words = raw.view(word.dtype).reshape(-1, 128)
    words[2051, 127] = words[2060, 0] = words[1500, 64] = word[0]
    before = raw.copy()
    found = encode_scalar_blocks(SCALAR[name], raw, dtype, 4, SCALAR[name].rotations[0])
    assert same_bits(raw, before)
    assert found.stats.first_bad_block == 1500
    rest = np.delete(np.arange(2100), [1500, 2051, 2060])
    assert same_bits(found.codes[rest], clean.codes[rest]) and same_bits(found.norms[rest], clean.norms[rest])
    with pytest.raises(SourceError, match="block 1500"):
        encode_scalar(raw, dtype, (2100, 128), SCALAR[name], 4)


@pytest.mark.parametrize("name", SCALAR)
def test_encoding_does_not_write_to_its_input(name):
    """A single float32 block is its own transpose, so that a view could be written to by mistake."""
    for values in (np.zeros((1, 128), np.float32), np.full((1, 128), np.nan, np.float32)):
        values.flags.writeable = False
        raw = values.reshape(-1).view(np.uint8)
        encode_scalar_blocks(SCALAR[name], raw, "F32", 4, SCALAR[name].rotations[0])


@pytest.mark.parametrize("name", SCALAR)
def test_output_does_not_depend_on_how_blocks_are_split_into_calls(name):
    values = np.concatenate([helpers.gaussian(2000, 128, seed=2), *(v[:4] for v in FAMILIES.values())])
    for rotation in SCALAR[name].rotations:
        whole = encode_blocks(name, values, 5, rotation=rotation, exponent=140)
        for step in (1, 700, 1024, 1025):
            starts = range(0, len(values), step) if step > 1 else (0, 1, 1023, 1024, 2000, 2050)
            for first in starts:
                part = encode_blocks(name, values[first : first + step], 5, rotation=rotation, exponent=140)
                for field in ("codes", "norms", "energies", "errors"):
                    assert same_bits(getattr(part, field), getattr(whole, field)[first : first + step])


# Finding and packing codes


@given(st.integers(2, 8), st.integers(1, 9), st.integers(0, 2**32 - 1))
@examples(60)
def test_packed_codes_match_the_reference_and_the_independent_reader(bits, blocks, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (blocks, 128)).astype(np.uint8)
    packed = np.ascontiguousarray(comparison.pack(np.ascontiguousarray(codes.T), bits).T)
    assert packed.shape == (blocks, 16 * bits)
    assert np.array_equal(packed, reference.pack(torch.from_numpy(codes), bits).numpy())
    assert np.array_equal(independent_reader.unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("uniform", [False, True])
def test_code_is_the_number_of_thresholds_reached(uniform, bits):
    """At every threshold, just above and below it, at random values, and far outside."""
    thresholds = SCALAR["absmax" if uniform else "lloyd-max"].codebook(bits).thresholds
    rng = np.random.default_rng(bits)
    beside = [np.nextafter(thresholds, np.float32(limit)) for limit in (99, -99)]
    drawn = rng.standard_normal(100_000).astype(np.float32) * 3
    special = np.float32([-0.0, 0.0, 2.0**-149, -20, 20, -1e30, 1e30])
    z = np.concatenate([thresholds, *beside, drawn, special])
    expected = np.searchsorted(thresholds, z, side="right")
    assert np.array_equal(comparison.level_search(uniform, bits).codes(z), expected)


@given(st.integers(0, 2**32 - 1))
@examples(30)
def test_column_butterfly_and_sum_match_the_format(seed):
    values = np.random.default_rng(seed).standard_normal((5, 128)).astype(np.float32)
    columns = comparison.hadamard(np.ascontiguousarray(values.T))
    assert same_bits(np.ascontiguousarray(columns.T), independent_reader.hadamard(values))
    assert same_bits(comparison.tree_sum(values.T.copy()), independent_writer.tree(values))


# Whole checkpoints

MIXED = """
name: mixed
codec: absmax
bits: 4
rules:
  - {name: "*.up_proj.weight", codec: hadamard-lloyd-max, bits: 5}
  - {name: "*.down_proj.weight", codec: lloyd-max}
  - {name: "*.gate_proj.weight", codec: hadamard-lloyd-max-l2, bits: 3}
  - {name: "*.q_proj.weight", codec: hadamard-absmax, bits: 8}
"""
CODEC_OF = {
    "up_proj": ("hadamard-lloyd-max", 5),
    "down_proj": ("lloyd-max", 4),
    "gate_proj": ("hadamard-lloyd-max-l2", 3),
    "q_proj": ("hadamard-absmax", 8),
    "k_proj": ("absmax", 4),
    "embed_tokens": ("absmax", 4),
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


def codec_of(name: str) -> tuple[str, int]:
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
        assert entry["rotation"] in SCALAR[codec].rotations
        assert (entry["rotation"] == SIGNED_HADAMARD) == ("q_proj" in name)
        error = ((decoded.astype(np.float64) - values) ** 2).sum() / (values.astype(np.float64) ** 2).sum()
        # Rounding to BF16 adds some 2**-18.
        assert error == pytest.approx(entry["relative_mse"], rel=0.02, abs=8e-6), name
        assert not entry["exceeds"]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["codec"], config["bits"], config["rotation"]) == ("absmax", 4, "none")
    assert {(codec, int(bits)) for codec, table in config["levels"].items() for bits in table} == set(CODEC_OF.values())


def test_independent_reader_reads_mixed_codecs(tmp_path: Path) -> None:
    source, _ = mixed_checkpoint(tmp_path / "model")
    quantize(source, tmp_path / "out", parse_recipe(MIXED, "mixed.yaml"), threads=1)
    theirs = {tensor.name: tensor for tensor in independent_reader.read_master(tmp_path / "out")}
    count = 0
    for tensor in open_local(tmp_path / "out").tensors:
        if isinstance(tensor, EncodedTensor):
            raw = np.empty(math.prod(tensor.shape) * 2, np.uint8)
            tensor.read(0, math.prod(tensor.shape), "BF16", raw)
            assert raw.tobytes() == theirs[tensor.name].data, tensor.name
            assert theirs[tensor.name].shape == tensor.shape
            count += 1
    assert count == len(CODEC_OF)


@pytest.mark.parametrize("name", COMPARED)
def test_commands_accept_every_codec(name: str, tmp_path: Path) -> None:
    """plan, quantize, inspect, verify, and exports to bf16 and to integers."""
    source, _ = mixed_checkpoint(tmp_path / "model")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"codec: {name}\nbits: 4\n")
    out = tmp_path / "out"
    for arguments in (
        ["plan", source, "--recipe", recipe],
        ["quantize", source, out, "--recipe", recipe],
        ["inspect", out],
        ["verify", out],
        ["export", out, tmp_path / "plain", "--target", "bf16"],
        ["export", out, tmp_path / "integers", "--target", "torchao-int4"],
    ):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
    assert name in (out / "pqweights.json").read_text()


def test_codecs_with_equal_parameters_are_equal_and_frozen() -> None:
    assert SCALAR["absmax"] == comparison.ComparisonCodec(name="absmax", rotated=False, uniform=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SCALAR["absmax"].name = "other"  # type: ignore[misc]
