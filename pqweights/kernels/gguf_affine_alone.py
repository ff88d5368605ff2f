"""GGUF's affine blocks of one part (Q4_1, Q5_1) as LLVM vector code for numba: the search for the F16 numbers in them.

From the least-squares fit of gguf_affine_parts.py on, in each round: the codes of the scale and offset so far, the
least-squares offset for these codes, and the two F16 numbers around it; for each of them the least-squares scale, and
the two F16 numbers around that. The pair whose decoded weights have the least error begins the next round.

tests/support/gguf_affine_reference.py repeats the operations.
Format: https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h, block_q4_1 and block_q5_1); what
it calls m is -offset here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pqweights.kernels.emit import I64, Lanes, loop
from pqweights.kernels.gguf_affine_formats import ROUNDS
from pqweights.kernels.gguf_affine_parts import (
    TOTAL,
    AffineBlocks,
    AffineExtent,
    PartFit,
    code_of,
    inverse_of,
    measured,
)
from pqweights.kernels.gguf_halves import half_neighbours


class _CodeMoments(NamedTuple):
    """Sums over the weights of a block, of products of codes r and what is left, e; in steps."""

    er: Lanes
    rr: Lanes
    e: Lanes
    r: Lanes


def rounded_alone(blocks: AffineBlocks, extent: AffineExtent, fit: PartFit) -> tuple[Lanes, Lanes]:
    """The best scale and offset, as stored, in the scale of the work. fit: before rounding."""
    infinite = blocks.zero.of(float("inf"))

    def improve(_: Any, state: tuple[PartFit, PartFit]) -> tuple[PartFit, PartFit]:
        now, best = state
        candidates = _candidates(blocks, extent, now)
        for (scale, offset), error in zip(candidates, measured(blocks, I64(0), candidates), strict=True):
            better = error < best.error
            pairs = ((error, best.error), (scale, best.scale), (offset, best.offset))
            best = PartFit(*(better.choose(new, old) for new, old in pairs))
        return best, best

    start = (fit, PartFit(infinite, blocks.zero, blocks.zero))
    return loop(blocks.builder, blocks.count(ROUNDS), start, improve)[1][1:]


def _candidates(blocks: AffineBlocks, extent: AffineExtent, now: PartFit) -> list[tuple[Lanes, Lanes]]:
    """Scales and offsets around the least-squares ones for the codes of a fit, in F16."""
    _, scale, offset = now
    inverse, total = inverse_of(scale), blocks.field(TOTAL, I64(0))

    def add(j: Any, sums: _CodeMoments) -> _CodeMoments:
        w = blocks.weights(j)
        r = code_of(blocks, w, inverse, offset)
        e = (w + offset) * inverse - r
        fe, fr = (blocks.factors(j) * x for x in (e, r)) if blocks.weighted else (e, r)
        return _CodeMoments(sums.er + fe * r, sums.rr + fr * r, sums.e + fe, sums.r + fr)

    er, rr, e, r = blocks.over_part(I64(0), _CodeMoments(*[blocks.zero] * 4), add)
    spread = rr - r * (r / total)
    spreads = spread > rr * 1e-5
    slope = spreads.choose((er - e * (r / total)) / spreads.choose(spread, 1.0), blocks.zero)
    found = []
    for stored in half_neighbours(offset - scale * ((e - slope * r) / total), extent.up, extent.down):
        moved = stored - offset
        fitted = scale + (scale * er + moved * r) / (rr > 0.0).choose(rr, 1.0)
        # Where all codes are 0, the weights are alike: the largest code reaches them from an offset below them.
        fitted = (rr > 0.0).choose(fitted, moved / float(blocks.format.last_code)).maximum(0.0)
        found += [(near, stored) for near in half_neighbours(fitted, extent.up, extent.down)]
    return found
