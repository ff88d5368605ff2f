"""Conversions between floating dtypes against torch, over every 16-bit pattern and samples of the wider ones."""

import numpy as np
import pytest
import torch

from pqweights.common.dtypes import (
    DTYPE_BITS,
    FLOAT_DTYPES,
    convert,
    float8_table,
    from_float32,
    item_bytes,
    to_float32,
)

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
WRITABLE = ("F64", "F32", "F16", "BF16")


def samples(dtype):
    """Raw bytes: every pattern of up to 16 bits; for wider dtypes random patterns, scales, edges and ties."""
    if item_bytes(dtype) == 1:
        return np.arange(256, dtype=np.uint8)
    if item_bytes(dtype) == 2:
        return np.arange(65536, dtype=np.uint16).view(np.uint8)
    rng = np.random.default_rng(5)
    ordinary = rng.standard_normal(30000) * 10.0 ** rng.uniform(-50, 50, 30000)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)  # finite, not negative
    brains = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 3.4028234663852886e38]
    edges += [2.0**-149, 2.0**-150, 2.0**128]
    ties = [(v[:-1] + v[1:]) / 2 for v in (halves, brains)]  # half-way between neighbours
    beside = [t * (1 + e) for t in ties for e in (2.0**-22, -(2.0**-22))]
    positive = np.concatenate([halves, brains, *ties, *beside])
    values = np.concatenate([ordinary, edges, positive, -positive])
    if dtype == "F64":
        singles = rng.integers(0, 0x7F7FFFFF, 20000, dtype=np.uint32)
        low, high = ((singles + step).astype(np.uint32).view(np.float32).astype(np.float64) for step in (0, 1))
        patterns = rng.integers(-(2**63), 2**63, 30000).view(np.float64)
        return np.concatenate([values, low, (low + high) / 2, -(low + high) / 2, patterns]).view(np.uint8)
    with np.errstate(over="ignore"):
        singles = values.astype(np.float32)
    patterns = rng.integers(0, 2**32, 60000, dtype=np.uint32)
    return np.concatenate([singles.view(np.uint32), patterns]).view(np.uint8)


def as_torch(raw, dtype):
    return torch.from_numpy(raw.copy()).view(TORCH[dtype])


def assert_same_values(ours, theirs, dtype):
    """Bytes must be equal, except that any NaN will do for a NaN."""
    expected = theirs.contiguous().view(torch.uint8).numpy()
    assert ours.dtype == np.uint8 and ours.shape == expected.shape
    size = item_bytes(dtype)
    nan = torch.isnan(theirs.to(torch.float64)).numpy()
    same = (ours.reshape(-1, size) == expected.reshape(-1, size)).all(axis=1)
    assert same[~nan].all()
    assert torch.isnan(as_torch(ours, dtype).to(torch.float64)).numpy()[nan].all()


@pytest.mark.parametrize("target", WRITABLE)
@pytest.mark.parametrize("source", FLOAT_DTYPES)
def test_convert_matches_torch(source, target):
    """The conversion goes through float32, so F64 is rounded twice, here as in torch."""
    raw = samples(source)
    through = as_torch(raw, source) if source == target else as_torch(raw, source).to(torch.float32)
    assert_same_values(convert(raw, source, target), through.to(TORCH[target]), target)
    assert np.array_equal(convert(raw, source, source), raw)


def test_overflow_is_infinite_and_ties_go_to_even():
    def half(*values):
        return from_float32(np.array(values, np.float32), "F16").view(np.float16).tolist()

    def brain(*values):
        return [hex(v) for v in from_float32(np.array(values, np.float32), "BF16").view(np.uint16)]

    assert half(65519.0, 65520.0, -1e30, 1 + 2.0**-11, 1 + 3 * 2.0**-11) == [65504, np.inf, -np.inf, 1, 1 + 2.0**-9]
    assert brain(3.4028234e38, -3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8) == ["0x7f80", "0xff80", "0x3f80", "0x3f82"]
    # A NaN whose payload lies only in the dropped bits must not become an infinity.
    quiet = from_float32(np.array([0x7F800001, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32), "BF16")
    assert np.isnan(to_float32(quiet, "BF16")).all()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_float8_tables_match_torch(dtype):
    table = float8_table(dtype)
    kind = {"F8_E8M0": torch.float8_e8m0fnu, **TORCH}[dtype]
    expected = torch.arange(256, dtype=torch.uint8).view(kind).to(torch.float32)
    assert table.dtype == np.float32 and table.shape == (256,)
    assert_same_values(table.view(np.uint8), expected, "F32")


def test_sizes_and_float8_tables_match_the_specifications():
    """OCP 8-bit floating point specification 1.0, table 1; microscaling formats specification 1.0, table 7."""
    e4m3, e5m2, e8m0 = (float8_table(d).astype(float) for d in ("F8_E4M3", "F8_E5M2", "F8_E8M0"))
    assert (e4m3[0x7E], e4m3[0x08], e4m3[0x01], e4m3[0xFE]) == (448, 2.0**-6, 2.0**-9, -448)
    assert np.flatnonzero(np.isnan(e4m3)).tolist() == [0x7F, 0xFF] and not np.isinf(e4m3).any()
    assert (e5m2[0x7B], e5m2[0x04], e5m2[0x01], e5m2[0x7C], e5m2[0xFC]) == (57344, 2.0**-14, 2.0**-16, np.inf, -np.inf)
    assert np.flatnonzero(np.isnan(e5m2)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert (e8m0[0], e8m0[127], e8m0[254]) == (2.0**-127, 1, 2.0**127) and np.isnan(e8m0[255])
    assert np.signbit(e4m3[0x80]) and np.signbit(e5m2[0x80])
    assert (DTYPE_BITS["F4"], DTYPE_BITS["F6_E2M3"], DTYPE_BITS["C64"]) == (4, 6, 64)
