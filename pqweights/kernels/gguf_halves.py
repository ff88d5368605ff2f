"""Numbers in F16, as LLVM vector code for numba: those around a number, and their bits."""

from __future__ import annotations

from pqweights.kernels.emit import Lanes

LARGEST_HALF, SMALLEST_NORMAL_HALF = 65504.0, 2.0**-14


def half_neighbours(x: Lanes, up: Lanes, down: Lanes) -> tuple[Lanes, Lanes]:
    """The F16 number nearest to x, saturated, and the next one on the other side of x.

    up, down: powers of two that lead from the scale of x and of the results to that of F16, and back.
    """
    x = (x * up).minimum(LARGEST_HALF).maximum(-LARGEST_HALF)
    magnitude = x.magnitude()
    exponent = (magnitude.bits() & 0x7F800000).maximum(113 << 23)  # 2**-14: the step does not shrink below it
    step, inverse_step = (exponent - (10 << 23)).floats(), ((264 << 23) - exponent).floats()
    nearest = (magnitude * inverse_step).rint() * step
    other = (magnitude > nearest).choose(nearest + step, nearest - step).minimum(LARGEST_HALF).maximum(0.0)
    negative = x < 0.0
    first, second = (negative.choose(-y, y) * down for y in (nearest, other))
    return first, second


def half_bits(x: Lanes) -> Lanes:
    """The bits of F16 numbers, as int32."""
    magnitude = x.magnitude()
    tiny = (magnitude.minimum(1.0) * 2.0**24).whole()
    half = (magnitude < SMALLEST_NORMAL_HALF).choose(tiny, (magnitude.bits() >> 13) - (112 << 10))
    return half | ((x.bits() >> 16) & 0x8000)
