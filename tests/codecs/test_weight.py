"""One weight: its passes, its norm exponent, and sums that do not depend on the size of chunks."""

import itertools
import math

import helpers
import independent_reader
import numpy as np
import pytest
from blocks import same_bits
from scalar import encode_scalar

from pqweights.codecs import get_codec
from pqweights.codecs.lloyd_max import DISTORTION
from pqweights.codecs.protocol import Measures, NormRange, PassResult, exceeds_promise
from pqweights.codecs.scalar import SIGNED_HADAMARD, ScalarState, norm_exponent_for
from pqweights.codecs.weight import PassTotals
from pqweights.kernels import SIGNS

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
        (2.0**-14, 2.0**-14, 0),
        (65504.0, 65504.0, 0),
        (math.nextafter(2.0**-14, 0), 2.0**-14, -28),
        (math.nextafter(2.0**-14, 0), math.nextafter(2.0**-14, 0), -29),
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


def test_error_exceeds_the_promise_above_the_rescue_factor():
    for bits in CODEC.rates:
        coder, limit = CODEC.coder(bits), 1.25 * DISTORTION[bits]
        assert not exceeds_promise(coder, limit) and exceeds_promise(coder, limit * (1 + 1e-12))


def raw(values, dtype):
    """Return the raw words of a weight of any shape."""
    stored = {"BF16": helpers.bf16, "F16": helpers.f16, "F32": helpers.f32}[dtype](np.asarray(values))[1]
    return stored.reshape(np.shape(values))


def encoded(values, dtype="F32", bits=BITS):
    stored = raw(values, dtype)
    return encode_scalar(stored.reshape(-1).view(np.uint8), dtype, stored.shape, CODEC, bits)


def decoded(weight):
    kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[weight.dtype]
    return helpers.as_float32((weight.dtype, weight.decode().view(kind))).reshape(weight.shape)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    "shape", [(128,), (1,), (127,), (129,), (3, 100), (2, 3, 64), (2, 2, 2, 37), (5, 256), (), (1, 1)]
)
def test_weights_of_any_shape(shape, dtype):
    values = helpers.gaussian(*shape, seed=3, scale=0.05)
    weight, measured = encoded(values, dtype)
    blocks = -(-math.prod(shape) // 128)
    assert weight.codes.shape == (blocks, 16 * BITS) and weight.norms.shape == (blocks,)
    assert (weight.shape, weight.dtype, weight.bits, weight.codec) == (shape, dtype, BITS, CODEC.name)
    assert (weight.rotation, weight.norm_exponent) == (measured.state.rotation, measured.state.norm_exponent)
    back = decoded(weight)
    assert back.shape == shape and len(weight.decode()) == raw(values, dtype).nbytes
    exact = helpers.as_float32((dtype, raw(values, dtype))).astype(np.float64)
    energy = (exact**2).sum()
    assert measured.energy == pytest.approx(energy, rel=1e-6)
    # This error includes rounding to 16 bits, which the measured error does not.
    error = ((back - exact) ** 2).sum()
    rounding = {"BF16": 2.0**-9, "F16": 2.0**-12, "F32": 2.0**-25}[dtype]
    assert math.sqrt(error) <= math.sqrt(1.001 * measured.error) + 1.1 * rounding * math.sqrt(energy)
    if math.prod(shape) % 128 == 0 and dtype == "F32":
        assert error == pytest.approx(measured.error, rel=1e-3)


def test_weight_with_a_large_error_in_both_rotations_takes_the_better_one():
    for constant, aligned, better in ((3, 1, S), (1, 3, H)):
        values = np.concatenate([np.ones((constant, 128)), np.tile(SIGNS, (aligned, 1))])
        weight, measured = encoded(values)
        assert exceeds_promise(CODER, measured.relative_mse)
        assert measured.state.rotation == weight.rotation == better
        wrong = measured.relative_mse * 4  # one block of four carries the error of a Walsh function
        assert wrong == pytest.approx(0.0493 + 3 * 0.00203, rel=0.01)


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


# --- extreme weights ---

each = pytest.mark.parametrize("bits", CODEC.rates)


@each
def test_zeros_are_exact_and_have_no_norms(bits):
    for values in (np.zeros((3, 128), np.float32), np.full((2, 128), -0.0, np.float32), np.zeros((2, 0), np.float32)):
        weight, measured = encoded(values, bits=bits)
        assert not weight.norms.any() and not weight.decode().view(np.float32).any()
        assert (measured.relative_mse, measured.state.norm_exponent, measured.energy) == (0, 0, 0)
        assert measured.norms == NormRange()
        assert (independent_reader.unpack(weight.codes, bits) == 2 ** (bits - 1)).all()


@each
@pytest.mark.parametrize("scale", [2.0**-141, 1e-38, 1e-20, 1e20, 1e36])
def test_relative_error_does_not_depend_on_scale(bits, scale):
    """Weights from subnormal to huge; a power of two gives the same codes, other scales round the norms differently."""
    plain = helpers.gaussian(64, 128, seed=7, scale=1.0)
    values = (plain.astype(np.float64) * scale).astype(np.float32)
    weight, measured = encoded(values, bits=bits)
    assert weight.norm_exponent != 0 and np.isfinite(weight.decode().view(np.float32)).all()
    assert (weight.norms & 0x7FFF < 0x7C00).all() and (weight.norms & 0x7FFF >= 0x0400).all()
    if scale >= 1e-38:
        _, at_one = encoded(plain, bits=bits)
        assert measured.relative_mse == pytest.approx(at_one.relative_mse, rel=0.01)  # norms are rounded elsewhere
    power, at_power = encoded(plain * np.float32(2.0**-60), bits=bits)
    assert same_bits(power.codes, encoded(plain, bits=bits)[0].codes)
    assert at_power.state.norm_exponent < 0


@each
@pytest.mark.parametrize("constant", [0.0125, -3.0, 2.0**-10])
def test_constant_blocks_are_rescued(bits, constant):
    """A constant is the worst case of the rotation, in which one coordinate takes everything."""
    weight, measured = encoded(np.full((5, 128), constant, np.float32), bits=bits)
    assert weight.rotation == SIGNED_HADAMARD and measured.relative_mse < 3 * DISTORTION[bits]
