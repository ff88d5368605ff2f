"""One weight: its passes, its norm exponent, and sums that do not depend on the size of chunks."""

import itertools
import math

import helpers
import numpy as np
import pytest
from closeness import F32_SUM, approx

from pqweights.codecs import get_codec
from pqweights.codecs.lloyd_max import DISTORTION
from pqweights.codecs.protocol import Measures, NormRange, PassResult
from pqweights.codecs.scalar import ScalarState, norm_exponent_for
from pqweights.codecs.weight import PassTotals, encode_weight

CODEC = get_codec("hadamard-lloyd-max")
BITS = 5
CODER = CODEC.coder(BITS)
PROMISE = 1.25 * DISTORTION[BITS]
H, S = "hadamard", "signed-hadamard"
FINE, BAD, WORSE = PROMISE * 0.8, PROMISE * 1.5, PROMISE * 2
NORMAL = (0.01, 3.0)  # smallest and largest norm
LARGE = (1.0, 2.0**17)  # exponent 3
TINY = (2.0**-30, 2.0**-25)  # exponent -39
LARGER = (1.0, 2.0**18)  # exponent 4


def result(rotation, exponent, *, norms, relative_mse):
    return PassResult(
        state=ScalarState(rotation, exponent), energy=100.0, error=100.0 * relative_mse, norms=NormRange(*norms)
    )


DECISIONS = {
    "a good pass stands": ([(H, 0, NORMAL, FINE)], None),
    "the promise itself is kept": ([(H, 0, NORMAL, PROMISE)], None),
    "a weight of zeros stands": ([(H, 0, (math.inf, 0.0), 0.0)], None),
    "large norms ask for an exponent": ([(H, 0, LARGE, FINE)], ScalarState(H, 3)),
    "tiny norms ask for an exponent": ([(H, 0, TINY, FINE)], ScalarState(H, -39)),
    "the exponent comes before the rescue": ([(H, 0, TINY, 1.0)], ScalarState(H, -39)),
    "the exponent that fits stands": ([(H, 0, LARGE, FINE), (H, 3, LARGE, FINE)], None),
    "a bad pass is rescued": ([(H, 0, NORMAL, BAD)], ScalarState(S, 0)),
    "just above the promise is bad": ([(H, 0, NORMAL, math.nextafter(PROMISE, 1))], ScalarState(S, 0)),
    "the rescue begins with the exponent found": ([(H, 0, LARGE, BAD), (H, 3, LARGE, BAD)], ScalarState(S, 3)),
    "a good rescue stands": ([(H, 0, NORMAL, BAD), (S, 0, NORMAL, FINE)], None),
    "a rescue may need an exponent": ([(H, 0, NORMAL, BAD), (S, 0, LARGE, FINE)], ScalarState(S, 3)),
    "a rescue may need no exponent": ([(H, 0, LARGE, 1), (H, 3, LARGE, BAD), (S, 3, NORMAL, FINE)], ScalarState(S, 0)),
    "a rescue may need another exponent": (
        [(H, 0, LARGE, 1), (H, 3, LARGE, BAD), (S, 3, LARGER, FINE)],
        ScalarState(S, 4),
    ),
    "both bad, the second better": ([(H, 0, NORMAL, WORSE), (S, 0, NORMAL, BAD)], None),
    "both bad, the first better": ([(H, 0, NORMAL, BAD), (S, 0, NORMAL, WORSE)], ScalarState(H, 0)),
    "both equally bad": ([(H, 0, NORMAL, BAD), (S, 0, NORMAL, BAD)], ScalarState(H, 0)),
    "back to the first, and done": ([(H, 0, NORMAL, BAD), (S, 0, NORMAL, WORSE), (H, 0, NORMAL, BAD)], None),
    "back to the first with its exponent": (
        [(H, 0, LARGE, 1), (H, 3, LARGE, BAD), (S, 3, LARGER, 1), (S, 4, LARGER, WORSE)],
        ScalarState(H, 3),
    ),
    "a pass with the wrong exponent does not count": (
        [(H, 0, LARGE, FINE), (H, 3, LARGE, BAD), (S, 3, LARGER, FINE), (S, 4, LARGER, WORSE), (H, 3, LARGE, BAD)],
        None,
    ),
}


@pytest.mark.parametrize(("history", "expected"), DECISIONS.values(), ids=DECISIONS.keys())
def test_next_state(history, expected):
    passes = [
        result(rotation, exponent, norms=norms, relative_mse=error) for rotation, exponent, norms, error in history
    ]
    assert CODER.next_state(passes) == expected


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
