"""One weight: its passes, its norm exponent, and sums that do not depend on the size of chunks."""

import itertools
import math

import helpers
import numpy as np
import pytest
from closeness import F32_SUM, approx

from pqweights.formats import get_codec
from pqweights.formats.protocol import Measures, NormRange, PassResult
from pqweights.formats.scalar import ScalarState, norm_exponent_for
from pqweights.formats.weight import PassTotals, encode_weight

CODEC = get_codec("hadamard-lloyd-max")
H, S = "hadamard", "signed-hadamard"


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
    exponent = norm_exponent_for(NormRange(smallest, largest))
    assert exponent == expected
    if expected:
        assert 2.0**14 <= largest * 2.0**-exponent < 2.0**15


def blocks_of_errors(energies, errors, norms):
    seen = NormRange(min(norms, default=math.inf), max(norms, default=0.0))
    return Measures(energies=energies, errors=errors, first_bad_block=-1, norms=seen)


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
        totals = PassTotals(ScalarState(S, 4))
        for a, b in itertools.pairwise(cuts):
            totals.add(blocks_of_errors(energies[a:b], errors[a:b], norms[a:b].tolist()))
        seen = NormRange(norms.min(), norms.max())
        assert totals.result() == PassResult(
            state=ScalarState(S, 4), energy=expected_energy, error=expected_error, norms=seen
        )


@pytest.mark.parametrize("bits", CODEC.rates)
def test_a_partial_last_block_is_padded_with_zeros_whose_error_does_not_count(bits):
    values = helpers.gaussian(1000, seed=9)
    padded = np.concatenate([values, np.zeros(24, np.float32)])
    (part, measured), (whole, measured_whole) = (
        encode_weight(v.view(np.uint8), dtype="F32", shape=v.shape, coder=CODEC.coder(bits)) for v in (values, padded)
    )
    back = part.decode().view(np.float32)
    assert np.array_equal(back, whole.decode().view(np.float32)[:1000])
    assert measured.error == approx(((back.astype(np.float64) - values) ** 2).sum(), F32_SUM)
    assert measured.error < measured_whole.error
