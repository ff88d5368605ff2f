"""What codecs with float16 norms share: the rotation and the exponent of norms, which are the state of a weight.

docs/format.md, sections 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta, structs

from pqweights.common.documents import Document, as_document
from pqweights.formats.protocol import Bytes, Coder, DamagedBlock, NormRange, PassResult, State, largest_error

# The rotations, as files name them.
HADAMARD = "hadamard"
SIGNED_HADAMARD = "signed-hadamard"
ROTATIONS = (HADAMARD, SIGNED_HADAMARD)

SMALLEST_NORMAL_HALF = 2.0**-14
LARGEST_HALF = 65504.0
# Norms of float32 weights need no exponents beyond this, in either direction.
LARGEST_EXPONENT = 200
FIRST_INVALID_HALF = 0x7C00  # of the bit patterns of float16: infinity; NaN and all negative numbers follow
# Above the largest norm of 128 float32 numbers, and above four times it, because that of least squares may be larger.
_NORM_BOUND = 2.0**135
_EXPONENT_OF_BOUND = 119  # up to which no float16 reaches the bound


class RotatedState(Document, frozen=True):
    """The state of a weight whose blocks are rotated: the rotation."""

    rotation: str

    @property
    def rescued(self) -> bool:
        """Whether the codec's first choice had too large an error, so that the weight is encoded in another way."""
        return self.rotation == SIGNED_HADAMARD

    def to_json(self) -> dict[str, Any]:
        """Return the state as manifests store it: keys of Codec.state_defaults, with JSON scalars."""
        return structs.asdict(self)


class ScalarState(RotatedState, frozen=True):
    """The state of a weight: its rotation, and the exponent with which norms are float16(norm * 2**-norm_exponent)."""

    norm_exponent: Annotated[int, Meta(ge=-LARGEST_EXPONENT, le=LARGEST_EXPONENT)] = 0


Rotated = TypeVar("Rotated", bound=RotatedState)


def parse_rotated(coder: Coder, state: type[Rotated], rotations: Sequence[str], values: Mapping[str, Any]) -> Rotated:
    """Return what Coder.parse_state does for a coder with these rotations, the default one first."""
    parsed = as_document({"rotation": rotations[0], **values}, state, ValueError)
    if parsed.rotation not in rotations:
        raise ValueError(f"{coder.codec} has no rotation {parsed.rotation!r}")
    return parsed


def check_norms(stored: Bytes, state: State) -> None:
    """Raise DamagedBlock for a norm that no encoder writes in a state.

    stored: the bytes of float16 norms, [blocks, bytes per block]
    """
    assert isinstance(state, ScalarState)
    patterns, exponent = stored.reshape(-1).view(np.uint16), state.norm_exponent
    largest = patterns.max(initial=0)
    if largest >= FIRST_INVALID_HALF:
        wrong, reason = patterns >= FIRST_INVALID_HALF, "negative or not finite"
    elif exponent > _EXPONENT_OF_BOUND:
        numbers = np.ldexp(patterns.view(np.float16).astype(np.float64), exponent)
        wrong, reason = numbers >= _NORM_BOUND, f"too large with the exponent {exponent}"
    else:
        return
    if wrong.any():
        raise DamagedBlock(int(wrong.argmax()) * 2 // stored.shape[1], f"its norm is {reason}")


def norm_exponent_for(norms: NormRange) -> int:
    """Return the exponent e with which norms are stored as float16(norm * 2**-e).

    It is 0 if all non-zero norms are normal float16 numbers; otherwise it brings the largest into [2**14, 2**15).
    """
    if norms.largest == 0.0 or (norms.smallest >= SMALLEST_NORMAL_HALF and norms.largest <= LARGEST_HALF):
        return 0
    return math.frexp(norms.largest)[1] - 1 - 14


def state_after(coder: Coder, rotations: Sequence[str], history: Sequence[PassResult]) -> ScalarState | None:
    """Return what Coder.next_state does for a codec with these rotations, the default one first.

    A rotation is judged after a pass with the exponent that fits its norms. They are tried in order until the error of
    one is small enough; if none is, the one with the smallest error stands.
    """
    last = history[-1]
    state, exponent = last.state, norm_exponent_for(last.norms)
    assert isinstance(state, ScalarState)
    if state.norm_exponent != exponent:
        return ScalarState(state.rotation, exponent)
    if last.relative_mse <= largest_error(coder.distortion):
        return None
    # The last pass of a rotation is the one with the fitting exponent.
    tried = {result.state.rotation: result for result in history if isinstance(result.state, ScalarState)}
    for rotation in rotations:
        if rotation not in tried:
            return ScalarState(rotation, state.norm_exponent)
    best = min(tried.values(), key=lambda result: result.relative_mse).state
    assert isinstance(best, ScalarState)
    return None if best.rotation == state.rotation else best
