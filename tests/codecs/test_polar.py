"""The codec `polar`: codes and radii by definition, an independent decoder, and extremes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import helpers
import mpmath
import numpy as np
import polar_decoder
import pytest
from closeness import F32_FEW, F32_MATRIX, F32_SOLVED, ROUNDED_ONCE_MORE, approx, decimals, each_near, rounding

from pqweights.codecs import CODECS, polar_transform
from pqweights.codecs.polar import PIECE_BLOCKS, PolarCoder
from pqweights.codecs.protocol import VALUE_DTYPES
from pqweights.codecs.scalar import HADAMARD, SIGNED_HADAMARD, ScalarState
from pqweights.codecs.weight import encode_weight

CODER = PolarCoder()
PLAIN = ScalarState(HADAMARD, 0)
LEVELS = range(1, 5)


def encoded(blocks: Any, state: ScalarState = PLAIN) -> Any:
    """Encode float32 blocks [blocks, 128]; returns packed codes, radii f16 and what was measured."""
    angles = np.empty((len(blocks), 46), dtype=np.uint8)
    radii = np.empty((len(blocks), 16), dtype=np.uint8)
    measures = CODER.encode(blocks.reshape(-1).view(np.uint8), [angles, radii], dtype="F32", state=state)
    return angles, radii.view(np.float16), measures


def decoded(angles: Any, radii: Any, state: ScalarState = PLAIN, dtype: str = "F32") -> Any:
    values = np.empty(len(angles) * 128 * (4 if dtype == "F32" else 2), dtype=np.uint8)
    CODER.decode([angles, radii.view(np.uint8)], values, dtype=dtype, state=state)
    return values.view(np.float32).reshape(-1, 128) if dtype == "F32" else values


def whole(values: Any) -> Any:
    """Encode a float32 weight with all passes; returns what it decodes to and the last pass."""
    weight, measured = encode_weight(
        np.ascontiguousarray(values).reshape(-1).view(np.uint8), dtype="F32", shape=values.shape, coder=CODER
    )
    return weight.decode().view(np.float32).reshape(values.shape), measured


def example() -> Any:
    """The block of the worked example in docs/format.md."""
    j = np.arange(128)
    return (((37 * j * j + 11 * j) % 101 - 50) / 1000).astype(np.float32)[None]


# Tables


@pytest.mark.parametrize("level", LEVELS)
def test_tables_are_correctly_rounded_and_those_of_the_page(level: int) -> None:
    """No value is so near to a tie between two float32 numbers that a C library could round it to the other one."""
    with mpmath.workdps(30):
        centroids = [mpmath.mpf(angle) for angle in polar_transform.LEVELS[level - 1]]
        ends = polar_transform.angle_boundaries(level)
        found = [*polar_transform.unit_vectors(level), np.array(polar_transform.tangents(level))]
        exact = [
            [mpmath.cos(angle) for angle in centroids],
            [mpmath.sin(angle) for angle in centroids],
            [mpmath.tan(ends[0]), mpmath.mpf(1), mpmath.tan(ends[2])],
        ]
        for values, wanted in zip(found, exact, strict=True):
            assert values.dtype == np.float32
            for value, want in zip(values, wanted, strict=True):
                spacing = float(np.spacing(np.abs(value)))
                assert abs(float(value) - float(want)) < (0.5 - rounding("F32", 16)) * spacing or value == 1
    assert all(map(np.array_equal, polar_transform.unit_vectors(level), polar_decoder.vectors(level)))
    page = Path(__file__).parents[2].joinpath("docs/format.md").read_text(encoding="utf-8")
    steep = [str(tangent) for tangent in polar_transform.tangents(level)[::2]]
    assert re.search(rf"{steep[0]}, 1(,| and) {steep[1]}", page)


# Codes and radii


def test_codes_and_radii_are_those_of_the_polar_transform() -> None:
    blocks = helpers.gaussian(3000, 128, seed=1)
    angles, radii, _ = encoded(blocks)
    x = blocks.astype(np.float64) @ helpers.sylvester() / math.sqrt(128)
    packed = polar_transform.unpack(angles.T)
    for level in LEVELS:
        found = np.arctan2(x[:, 1::2], x[:, 0::2]) % (2 * math.pi)
        ends = np.array(polar_transform.angle_boundaries(level))
        expected = np.searchsorted(ends, found, side="right")
        same = expected == packed[level - 1].T
        near = np.abs(found[..., None] - np.append(ends, (0, 2 * math.pi))).min(axis=-1) < F32_MATRIX
        assert (same | near).all() and same.mean() > 0.999
        x = np.hypot(x[:, 0::2], x[:, 1::2])
    assert each_near(radii, x, rounding("F16", 1) + F32_FEW)


def test_worked_example_of_the_page() -> None:
    page = Path(__file__).parents[2].joinpath("docs/format.md").read_text(encoding="utf-8")
    stated = page[page.index("*Worked example.* The block `(((37") :]
    angles, radii, _ = encoded(example())
    hexes = re.findall(r"^    ([0-9A-F ]+?)    level \d$", stated, re.MULTILINE)
    assert bytes.fromhex("".join(hexes)) == angles.tobytes()
    assert bytes.fromhex(re.search(r"radii `([0-9A-F ]+)`", stated)[1]) == radii.astype("<f2").tobytes()
    values = re.search(r"decoded to ([-\d., ]+)\.", " ".join(stated.split()))[1].split(", ")
    assert decoded(angles, radii)[0, :4] == approx([float(value) for value in values], 0, decimals(8))


@pytest.mark.parametrize("rotation", [HADAMARD, SIGNED_HADAMARD])
@pytest.mark.parametrize("exponent", [-140, -3, 0, 5, 112])
def test_independent_decoder_finds_the_same_values(rotation: str, exponent: int) -> None:
    rng = np.random.default_rng(2)
    angles = rng.integers(0, 256, (PIECE_BLOCKS + 700, 46)).astype(np.uint8)
    radii = rng.integers(0, 0x7C00, (len(angles), 8)).astype(np.uint16).view(np.float16)
    state = ScalarState(rotation, exponent)
    wanted = polar_decoder.decode_blocks(angles, radii, rotation=rotation, norm_exponent=exponent)
    for dtype in VALUE_DTYPES:
        assert np.array_equal(
            decoded(angles, radii, state, dtype).reshape(-1).view(np.uint8),
            helpers.raw_bytes(wanted.reshape(-1), dtype),
        )


def test_blocks_do_not_depend_on_the_pieces_that_they_are_encoded_in() -> None:
    blocks = helpers.gaussian(2 * PIECE_BLOCKS + 5, 128, seed=3)
    angles, radii, measures = encoded(blocks)
    last = encoded(blocks[-7:])
    assert np.array_equal(angles[-7:], last[0]) and np.array_equal(radii[-7:], last[1])
    assert np.array_equal(measures.errors[-7:], last[2].errors)
    # Blocks that are not finite are counted from the first piece.
    blocks[PIECE_BLOCKS + 4, 7] = blocks[PIECE_BLOCKS + 6, 0] = np.nan
    assert encoded(blocks)[2].first_bad_block == PIECE_BLOCKS + 4


# Whole weights


@pytest.mark.parametrize("scale", [2.0**-149, 1e-40, 1e-30, 1e-9, 1e9, 1e30, 1e37])
def test_tiny_and_huge_weights_keep_their_precision(scale: float) -> None:
    values = (np.random.default_rng(6).standard_normal((64, 128)) * 7 * scale).astype(np.float32)
    back, measured = whole(values)
    assert np.isfinite(back).all()
    error = ((back.astype(np.float64) - values) ** 2).sum() / (values.astype(np.float64) ** 2).sum()
    # Below float32's normal range decoded values are rounded to multiples of 2**-149.
    assert error == approx(measured.relative_mse, F32_SOLVED, ROUNDED_ONCE_MORE if scale == 2.0**-149 else 0)
    assert measured.relative_mse < 1.1 * CODER.distortion


def test_codec_is_listed_with_the_others() -> None:
    recipes = Path(__file__).parents[2].joinpath("recipes/README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \| ", recipes, re.MULTILINE)) >= set(CODECS)
