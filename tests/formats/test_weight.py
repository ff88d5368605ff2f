"""One weight: its passes, its norm exponent, and sums that do not depend on the size of chunks."""

import itertools
import math

import helpers
import numpy as np
import pytest
from closeness import F32_SUM, approx

from pqweights.formats import get_codec
from pqweights.formats.lloyd_max import norm_exponent_for
from pqweights.formats.master import Pass
from pqweights.formats.weight import decode_weight, encode_weight
from pqweights.kernels import Measures

CODEC = get_codec("hadamard-lloyd-max")


@pytest.mark.parametrize(
    ("smallest", "largest", "expected"),
    [
        (math.inf, 0.0, 0),  # no norm at all
        (2.0**-14, 65504.0, 0),
        (math.nextafter(2.0**-14, 0), 2.0**-14, -28),
        (math.nextafter(2.0**-14, 0), 1.0, -14),
        (math.nextafter(2.0**-14, 0), 65504.0, 1),
        (2.0**-14, math.nextafter(65504.0, 1e9), 1),
        (1.0, 65536.0, 2),
        (2.0**-149, 2.0**131.5, 117),
        (2.0**-152, 2.0**-152, -166),
    ],
)
def test_norm_exponent_brings_norms_into_the_range_of_float16(smallest, largest, expected):
    exponent = norm_exponent_for(smallest, largest)
    assert exponent == expected
    if expected:
        assert 2.0**14 <= largest * 2.0**-exponent < 2.0**15


def blocks_of_errors(energies, errors, norms):
    return Measures(energies, errors, -1, min(norms, default=math.inf), max(norms, default=0.0))


def test_totals_do_not_depend_on_the_size_of_chunks():
    """The summands differ so much in size that another order of additions would round differently."""
    rng = np.random.default_rng(8)
    energies, errors = (10.0 ** rng.uniform(-8, 8, 1000) for _ in range(2))
    norms = rng.uniform(0.1, 9, 1000)
    expected_energy = expected_error = 0.0
    for energy, error in zip(energies.tolist(), errors.tolist(), strict=True):
        expected_energy, expected_error = expected_energy + energy, expected_error + error
    assert expected_energy != math.fsum(energies) and expected_energy != float(np.sum(energies))
    for cuts in ([0, 1000], [0, 1, 2, 999, 1000], [0, 0, 500, 500, 1000], list(range(1001)), [0, 128, 256, 700, 1000]):
        totals = Pass(CODEC.at(4))
        for a, b in itertools.pairwise(cuts):
            totals.add(blocks_of_errors(energies[a:b], errors[a:b], norms[a:b].tolist()))
        assert (totals.energy, totals.error) == (expected_energy, expected_error)
        assert (totals.smallest_norm, totals.largest_norm) == (norms.min(), norms.max())


@pytest.mark.parametrize("bits", CODEC.rates)
def test_a_partial_last_block_is_padded_with_zeros_whose_error_does_not_count(bits):
    values = helpers.gaussian(1000, seed=9)
    padded = np.concatenate([values, np.zeros(24, np.float32)])
    (part, measured), (whole, measured_whole) = (
        encode_weight(v.view(np.uint8), dtype="F32", shape=v.shape, format=CODEC.at(bits)) for v in (values, padded)
    )
    back = decode_weight(measured.format, part, 1000, "F32").view(np.float32)
    assert np.array_equal(back, decode_weight(measured_whole.format, whole, 1000, "F32").view(np.float32))
    assert measured.error == approx(((back.astype(np.float64) - values) ** 2).sum(), F32_SUM)
    assert measured.error < measured_whole.error
