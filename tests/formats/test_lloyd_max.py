"""The tables of Lloyd-Max levels, derived again by Newton's method on the stationarity conditions, in 40 digits."""

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest

from pqweights.formats import lloyd_max as codebook

BITS = range(2, 9)


def newton_step(c):
    """Return the upper half c of a symmetric table after one Newton step, and the largest correction.

    F_i = c_i * P(cell i) - integral of x over cell i = 0, with cell ends half-way between neighbours; tridiagonal.
    """
    n = len(c)
    ends = [mpmath.mpf(0), *((a + b) / 2 for a, b in itertools.pairwise(c)), mpmath.inf]
    heights = [mpmath.npdf(t) if t != mpmath.inf else mpmath.mpf(0) for t in ends]
    tails = [mpmath.erfc(t / mpmath.sqrt(2)) / 2 for t in ends]
    below, diagonal, above, right = [], [], [], []
    for i in range(n):
        mass = tails[i] - tails[i + 1]
        from_left = heights[i] * (c[i] - ends[i]) / 2 if i else mpmath.mpf(0)
        from_right = heights[i + 1] * (c[i] - ends[i + 1]) / 2 if i < n - 1 else mpmath.mpf(0)
        right.append(heights[i] - heights[i + 1] - c[i] * mass)
        below.append(-from_left)
        diagonal.append(mass + from_right - from_left)
        above.append(from_right)
    for i in range(1, n):
        factor = below[i] / diagonal[i - 1]
        diagonal[i] -= factor * above[i - 1]
        right[i] -= factor * right[i - 1]
    delta = [mpmath.mpf(0)] * n
    for i in reversed(range(n)):
        delta[i] = (right[i] - (above[i] * delta[i + 1] if i < n - 1 else 0)) / diagonal[i]
    return [a + b for a, b in zip(c, delta, strict=True)], max(abs(d) for d in delta)


@functools.cache
def derived(bits):
    """Return the upper half of the Lloyd-Max table of N(0,1), to which Newton's method leads, and its distortion."""
    with mpmath.workdps(40):
        c = [mpmath.mpf(level) for level in codebook.HALF_LEVELS[bits]]
        for _ in range(6):
            c, correction = newton_step(c)
        assert correction < mpmath.mpf(10) ** -36
        ends = [mpmath.mpf(0), *((a + b) / 2 for a, b in itertools.pairwise(c)), mpmath.inf]
        tails = [mpmath.erfc(t / mpmath.sqrt(2)) / 2 for t in ends]
        return c, 1 - 2 * sum(v * v * (tails[i] - tails[i + 1]) for i, v in enumerate(c))


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_solution_rounded_to_float32(bits):
    exact, _ = derived(bits)
    assert exact == sorted(exact) and exact[0] > 0
    expected = [float(str(np.float32(float(c)))) for c in exact]
    assert list(codebook.HALF_LEVELS[bits]) == expected
    assert codebook.codebook(bits).levels[2 ** (bits - 1) :].tolist() == [float(np.float32(float(c))) for c in exact]


@pytest.mark.parametrize("bits", BITS)
def test_distortion_is_exact_to_nine_digits(bits):
    _, exact = derived(bits)
    given = codebook.DISTORTION[bits]
    digits = len(repr(given).split("e")[0].replace("0.", "").lstrip("0").replace(".", ""))
    assert digits >= 8
    assert given == float(mpmath.nstr(exact, 9))


@pytest.mark.parametrize(
    ("bits", "published"), [(2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152])], ids=["2 bits", "3 bits"]
)
def test_published_levels(bits, published):
    """Max (1960), table I: N = 4 and N = 8, as printed with four figures."""
    assert [float(f"{c:.4g}") for c in codebook.HALF_LEVELS[bits]] == published


def test_published_signal_to_noise_ratios():
    """Jayant and Noll (1984), section 4.4: 9.30, 14.62 and 20.22 dB for 2, 3 and 4 bits."""
    assert [round(-10 * math.log10(codebook.DISTORTION[bits]), 2) for bits in (2, 3, 4)] == [9.30, 14.62, 20.22]


@pytest.mark.parametrize("bits", BITS)
def test_thresholds_are_midpoints_rounded_once(bits):
    book = codebook.codebook(bits)
    with mpmath.workdps(40):
        middles = [(mpmath.mpf(float(a)) + mpmath.mpf(float(b))) / 2 for a, b in itertools.pairwise(book.levels)]
    # The midpoint of two float32 numbers with the same exponent has at most 25 bits, so a float holds it exactly.
    assert book.thresholds.tolist() == [float(np.float32(float(m))) for m in middles]
    assert book.thresholds[2 ** (bits - 1) - 1] == 0
    assert np.array_equal(book.levels, -book.levels[::-1]) and (np.diff(book.thresholds) > 0).all()


def test_codebook_from_levels_rounds_midpoints_once():
    """A float32 sum of two levels would be rounded before it is halved, or overflow."""
    low, high = np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0))
    assert codebook.codebook_from_levels(1, np.array([low, high])).thresholds.tolist() == [1.0]
    big = np.array([2.0**127, 2.0**127 * 1.5], dtype=np.float32)  # their float32 sum is infinite
    assert codebook.codebook_from_levels(1, big).thresholds.tolist() == [2.0**127 * 1.25]
