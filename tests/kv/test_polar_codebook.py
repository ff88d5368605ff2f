"""The angle codebooks of PolarQuant for KV caches, derived again by quadrature, in 30 digits."""

import functools
import itertools
import math

import mpmath
import pytest
from closeness import F64_FEW, approx, decimals

from pqweights.runtime.kv.polar_transform import LEVELS, angle_boundaries

UPPER_LEVELS = (2, 3, 4)
RELATIVE_MSE = 0.0320764954  # of normal vectors, decoded from their angle codes and their exact radius


def moment(level, function, low, high):
    """Return the integral of a function times sin^(2^(level-1) - 1)(2 psi), in mpmath's digits."""
    power = 2 ** (level - 1) - 1
    return mpmath.quad(lambda psi: function(psi) * mpmath.sin(2 * psi) ** power, [low, high])


def cells(centroids):
    """Return the cells of centroids on [0, pi/2]."""
    inner = [(a + b) / 2 for a, b in itertools.pairwise(centroids)]
    return list(itertools.pairwise([mpmath.mpf(0), *inner, mpmath.pi / 2]))


def mirrored(first, second):
    """Return the four centroids on [0, pi/2] of which these are the lower two."""
    return [first, second, mpmath.pi / 2 - second, mpmath.pi / 2 - first]


@functools.cache
def derived(level):
    """Return the four centroids with the least mean squared error of the angle.

    There are no other means of their cells, because the density is log-concave (Kieffer 1983).
    """
    with mpmath.workdps(30):

        def gaps(first, second):
            """How far two centroids are from the means of their cells; the others lie as these do, by symmetry."""
            of_cells = zip((first, second), cells(mirrored(first, second)), strict=False)
            return [moment(level, lambda psi, c=c: psi - c, low, high) for c, (low, high) in of_cells]

        return mirrored(*mpmath.findroot(gaps, LEVELS[level - 1][:2]))


def mean_cosine(level):
    """Return E[cos(angle - centroid)] at a level, by quadrature over the derived cells."""
    if level == 1:
        return mpmath.sin(mpmath.pi / 16) / (mpmath.pi / 16)
    centroids = derived(level)
    total = moment(level, lambda psi: 1, mpmath.mpf(0), mpmath.pi / 2)
    return (
        sum(
            moment(level, lambda psi, c=c: mpmath.cos(psi - c), low, high)
            for c, (low, high) in zip(centroids, cells(centroids), strict=True)
        )
        / total
    )


def test_level_1_divides_the_circle_into_equal_cells():
    assert LEVELS[0] == approx([(2 * k + 1) * math.pi / 16 for k in range(16)], F64_FEW)
    assert angle_boundaries(1) == approx([k * math.pi / 8 for k in range(1, 16)], F64_FEW)
    assert (LEVELS[0][-1] - 2 * math.pi + LEVELS[0][0]) / 2 == approx(0, 0, F64_FEW)


@pytest.mark.parametrize("level", UPPER_LEVELS)
def test_centroids_are_the_doubles_nearest_to_the_minimum(level):
    assert LEVELS[level - 1] == tuple(float(centroid) for centroid in derived(level))


@pytest.mark.parametrize("level", UPPER_LEVELS)
def test_boundaries_are_half_way_between_centroids(level):
    low, middle, high = angle_boundaries(level)
    assert middle == approx(math.pi / 4, F64_FEW)
    assert low == approx(float(cells(derived(level))[0][1]), F64_FEW)
    assert high == approx(math.pi / 2 - low, F64_FEW)


def test_relative_error_by_quadrature():
    with mpmath.workdps(30):
        cosine = mpmath.fprod(mean_cosine(level) for level in range(1, 5))
        assert float(2 - 2 * cosine) == approx(RELATIVE_MSE, 0, decimals(10))
    assert math.log2(RELATIVE_MSE) / 2 + 3.875 == approx(1.394, 0, decimals(3))  # bits above the bound
