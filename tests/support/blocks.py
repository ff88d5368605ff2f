"""Helpers that encode and decode whole blocks with a backend, and compare the bytes."""

from __future__ import annotations

import math
from typing import Any

import helpers
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings

from pqweights.formats.lloyd_max import codebook, norm_exponent_for
from pqweights.kernels import Backend, BlockCoding, Codebook, Measures, cpu, reference

Bytes = npt.NDArray[np.uint8]
Encoded = tuple[Bytes, npt.NDArray[np.uint16], npt.NDArray[np.float64], npt.NDArray[np.float64], Measures]

BITS = range(2, 9)
DTYPES = ("BF16", "F16", "F32")

BACKENDS: dict[str, Backend] = {"cpu": cpu, "reference": reference}
each_backend = pytest.mark.parametrize("backend", sorted(BACKENDS))


def examples(count: int) -> settings:
    """Settings of a property test that does not fail on a busy machine."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def item_bytes(dtype: str) -> int:
    return 4 if dtype == "F32" else 2


def encode(backend: str, raw: Bytes, dtype: str, bits: int, signed: bool = False, exponent: int = 0) -> Encoded:
    """Encode whole blocks; return codes, norms, energies, errors, and all that was measured."""
    blocks = len(raw) // (128 * item_bytes(dtype))
    codes, norms = np.full((blocks, 16 * bits), 0xAB, np.uint8), np.full(blocks, 0xABCD, np.uint16)
    coding = BlockCoding(codebook=codebook(bits), signed=signed, norm_exponent=exponent)
    measures = BACKENDS[backend].encode(raw, dtype, coding, (codes, norms))
    return codes, norms, measures.energies, measures.errors, measures


def decode(
    backend: str,
    codes: Bytes,
    norms: npt.NDArray[np.uint16],
    dtype: str,
    bits: int,
    signed: bool = False,
    exponent: int = 0,
    book: Codebook | None = None,
) -> Bytes:
    """Decode whole blocks to raw bytes."""
    values = np.full(len(codes) * 128 * item_bytes(dtype), 0xAB, np.uint8)
    coding = BlockCoding(codebook=book or codebook(bits), signed=signed, norm_exponent=exponent)
    BACKENDS[backend].decode((codes, norms), coding, dtype, values)
    return values


def encode_floats(
    values: npt.NDArray[np.float32], bits: int, signed: bool = False, exponent: int = 0, backend: str = "cpu"
) -> Encoded:
    return encode(backend, helpers.raw_bytes(values, "F32"), "F32", bits, signed, exponent)


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two arrays have the same bytes, which distinguishes -0 from 0 and one NaN from another."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_same_encoding(ours: Encoded, truth: Encoded, where: object = "") -> None:
    for what, a, b in zip(("codes", "norms", "energies", "errors"), ours[:4], truth[:4], strict=True):
        assert same_bits(a, b), (what, where)
    assert ours[4][2:] == truth[4][2:], where


def exponents_for(stats: Measures) -> list[int]:
    """Exponents with which no stored norm is infinite: the weight's own, the scaled one, and one that loses norms."""
    if stats.largest_norm == 0:
        return [0, -20, 30]
    scaled = math.frexp(stats.largest_norm)[1] - 1 - 14
    return sorted({exponent_for(stats), scaled, scaled + 24})


def exponent_for(stats: Measures) -> int:
    """The exponent that fits the norms."""
    return norm_exponent_for(stats.smallest_norm, stats.largest_norm)


def assert_backends_agree(raw: Bytes, dtype: str, bits: int, signed: bool) -> None:
    """Check that the CPU backend gives the bytes of the reference, with every kind of exponent.

    The dtype to which blocks are decoded changes with exponent, width and signs.
    """
    exponents = exponents_for(encode("cpu", raw, dtype, bits, signed, 150)[4])
    for place, exponent in enumerate(exponents, start=bits + signed):
        ours, truth = (encode(name, raw, dtype, bits, signed, exponent) for name in ("cpu", "reference"))
        assert_same_encoding(ours, truth, exponent)
        assert (ours[1] & 0x7FFF < 0x7C00).all()
        target = DTYPES[place % len(DTYPES)]
        args = (*ours[:2], target, bits, signed, exponent)
        assert same_bits(decode("cpu", *args), decode("reference", *args)), (target, exponent)
