"""The angle codebooks of PolarQuant for KV caches: literals, because they are part of the format.

Han et al., arXiv:2502.02617. A recursive polar transform of 16 coordinates pairs neighbours: level 1 turns 8 pairs of
coordinates into 8 angles and 8 radii, level 2 the 8 radii into 4 angles and 4 radii, and so on to one radius after
level 4. For a vector of independent standard normal coordinates all 15 angles and the radius are independent (Lemma 2):

- level 1: angles are uniform on [0, 2 pi)
- level l >= 2: angles are on [0, pi/2], because radii are not negative, with a density proportional to
  sin^(2^(l-1) - 1)(2 psi)

The centroids minimise the mean squared error of the angle (Section 4.1, equation 4): each is the mean of the angle over
its cell, and a cell ends half-way between two centroids. The error of the decoded vector is not quite that: it is
2 - 2 cos(angle - centroid), whose minimum has centroids up to 0.0003 radians away. The vectors' error would be lower by
less than one part in a million, so the tables are those of the paper. tests/codecs/test_polar_codebook.py derives them
again.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

# Coordinates with one radius, and the bits of an angle at each level: 8 * 4 + 4 * 2 + 2 * 2 + 1 * 2 = 46 for a group.
GROUP = 16
ANGLE_BITS = (4, 2, 2, 2)

# The centroids of each level in radians, ascending. At level 1 the table goes around the circle.
LEVELS: tuple[tuple[float, ...], ...] = (
    (
        0.19634954084936207,
        0.5890486225480862,
        0.9817477042468103,
        1.3744467859455345,
        1.7671458676442586,
        2.159844949342983,
        2.552544031041707,
        2.9452431127404313,
        3.3379421944391554,
        3.7306412761378795,
        4.123340357836604,
        4.516039439535327,
        4.908738521234052,
        5.301437602932776,
        5.6941366846315,
        6.086835766330225,
    ),
    (0.30975611698246786, 0.63398023999134, 0.9368160868035567, 1.2610402098124287),
    (0.4262496930707348, 0.6743849977574456, 0.896411329037451, 1.1445466337241619),
    (0.5242140911034461, 0.7059094056614845, 0.8648869211334121, 1.0465822356914505),
)

# The relative mean squared error of normal vectors that are decoded from their angle codes and their exact radius:
# 2 - 2 gamma, where gamma, the mean cosine between a vector and its decoded direction, is the product over the levels
# of E[cos(angle - centroid)]. It is 1.394 bits above the rate-distortion bound 4^-3.875.
RELATIVE_MSE = 0.0320764954


def angle_boundaries(level: int) -> tuple[float, ...]:
    """Return the ends between the cells of a level in radians, half-way between centroids, ascending.

    level: 1 to 4

    The code of an angle is the number of boundaries that are not above it. At level 1 the angle must be in [0, 2 pi);
    the cells 15 and 0 meet at 2 pi = 0, which is half-way between their centroids, too.
    """
    return tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS[level - 1]))


def angle_density(level: int, angles: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the probability density of the angles of a level for normal vectors (Lemma 2), per radian.

    level: 1 to 4
    angles: any shape, in radians; in [0, 2 pi) at level 1 and in [0, pi/2] at the others
    """
    if level == 1:
        return np.full(np.shape(angles), 1 / (2 * math.pi))
    size = 2 ** (level - 1)  # coordinates in each of the two radii
    factor = math.gamma(size) / (2.0 ** (size - 2) * math.gamma(size / 2) ** 2)
    density: npt.NDArray[np.float64] = factor * np.sin(2 * angles) ** (size - 1)
    return density
