"""Hadamard rotation and Lloyd-Max levels with a least-squares norm per block: the codec of the master.

From Vicentino, arXiv:2603.29078 v1: block norms, Walsh-Hadamard rotation, Lloyd-Max levels. The least-squares norm and
the fixed signs of the rescue rotation are additions of pqweights. docs/format.md gives the order of operations, and
docs/method.md the reasons.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pqweights.codecs import lloyd_max
from pqweights.codecs.lloyd_max import MAX_BITS, MIN_BITS
from pqweights.codecs.protocol import (
    Bytes,
    Codec,
    Coder,
    Measures,
    Part,
    PassResult,
    State,
    check_effort,
    unknown_rate,
)
from pqweights.codecs.scalar import (
    FIRST_INVALID_HALF,
    ROTATIONS,
    SIGNED_HADAMARD,
    NormRange,
    ScalarState,
    check_norms,
    parse_rotated,
    state_after,
)
from pqweights.common.strict_json import is_number
from pqweights.kernels import BLOCK_SIZE, BlockCoding, EncodedArrays, EncodeStats, load_backend
from pqweights.kernels.codebook import Codebook, codebook_from_levels

if TYPE_CHECKING:
    from torch import Tensor

CODES = "_codes"
NORMS = "_norms"


class HadamardLloydMax(Codec):
    """The codec of the master; see Codec.

    rotations: the default one, followed by those that a rescue tries
    orthogonal_error: see Coder
    """

    name = "hadamard-lloyd-max"
    format_version = 1
    suffixes = (CODES, NORMS)
    rates = range(MIN_BITS, MAX_BITS + 1)
    block_size = BLOCK_SIZE
    rotations: tuple[str, ...] = ROTATIONS
    orthogonal_error = True  # because the norm is that of least squares
    description = (
        "Each weight is cut along its rows into blocks of 128. A block is rotated by the Walsh-Hadamard matrix, which "
        "makes its coordinates nearly Gaussian, and each coordinate becomes the nearest of the Lloyd-Max levels of the "
        "normal distribution. Beside the codes a block has one float16 norm, the one with the least squared error."
    )
    papers = (
        "Vicentino, *PolarQuant* for weights, [arXiv:2603.29078](https://arxiv.org/abs/2603.29078v1) v1 (later renamed "
        "HLWQ): the method. PolarQuant for KV caches ([arXiv:2502.02617](https://arxiv.org/abs/2502.02617)) is another "
        "method with the same name.",
    )

    @property
    def state_defaults(self) -> Mapping[str, Any]:
        """See Codec."""
        return {"rotation": self.rotations[0], "norm_exponent": 0}

    def distortion(self, bits: int) -> float:
        """Return what Coder.distortion is at a bit width: the distortion of the Lloyd-Max levels on N(0,1)."""
        return lloyd_max.DISTORTION[bits]

    def codebook(self, bits: int) -> Codebook:
        """Return the Lloyd-Max levels of a bit width."""
        return lloyd_max.codebook(bits)

    def encode_blocks(self, values: Bytes, dtype: str, coding: BlockCoding, out: EncodedArrays) -> EncodeStats:
        """Encode whole blocks; see kernels.Backend.encode."""
        return load_backend("cpu").encode(values, dtype, coding, out)

    def coder(self, bits: float, effort: int | None = None) -> ScalarCoder:
        """See Codec."""
        check_effort(self, effort)
        return _coder(self, bits)

    def coder_from_tables(self, bits: float, tables: Any) -> ScalarCoder:
        """See Codec; the tables are the levels."""
        width = self.width(bits)
        return ScalarCoder(self, codebook_from_levels(width, _checked_levels(tables, width)))

    def width(self, bits: float) -> int:
        """Return a bit width as an integer.

        Raises RecipeError for one that the codec does not have.
        """
        if bits not in self.rates:
            raise unknown_rate(self, bits)
        return int(bits)


@functools.cache
def _coder(codec: HadamardLloydMax, bits: float) -> ScalarCoder:
    """Return the coder of a codec and a bit width, cached because plans ask for it once for each weight."""
    return ScalarCoder(codec, codec.codebook(codec.width(bits)))


def _checked_levels(numbers: Any, bits: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the levels of a master as float32, which must be finite and ascending.

    Raises ValueError for anything else.
    """
    if isinstance(numbers, list) and len(numbers) == 2**bits and all(map(is_number, numbers)):
        with np.errstate(over="ignore"):
            levels = np.array(numbers, dtype=np.float64).astype(np.float32)
        if np.isfinite(levels).all() and (levels[1:] > levels[:-1]).all():
            return levels
    raise ValueError(f"expected {2**bits} ascending float32 numbers for {bits} bits")


@dataclass(frozen=True, eq=False)
class ScalarCoder(Coder):
    """The codec with the levels of one bit width; see Coder."""

    _codec: HadamardLloydMax
    codebook: Codebook
    block_size = BLOCK_SIZE

    @property
    def codec(self) -> str:
        """See Coder."""
        return self._codec.name

    @property
    def bits(self) -> int:
        """See Coder."""
        return self.codebook.bits

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """See Coder; a block has 16 bytes of codes for each bit, and a norm."""
        return Part(CODES, "U8", BLOCK_SIZE * self.bits // 8), Part(NORMS, "F16", 1)

    @property
    def distortion(self) -> float:
        """See Coder."""
        return self._codec.distortion(self.bits)

    @property
    def orthogonal_error(self) -> bool:
        """See Coder."""
        return self._codec.orthogonal_error

    def tables(self) -> list[float]:
        """See Coder; the levels are the shortest decimals that round to them."""
        return [float(str(level)) for level in self.codebook.levels]

    def first_state(self) -> ScalarState:
        """See Coder."""
        return ScalarState(self._codec.rotations[0], 0)

    def next_state(self, history: Sequence[PassResult]) -> ScalarState | None:
        """See Coder and `state_after`."""
        return state_after(self, self._codec.rotations, history)

    def parse_state(self, values: Mapping[str, Any]) -> ScalarState:
        """See Coder."""
        return parse_rotated(self, ScalarState, self._codec.rotations, values)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        """See Coder."""
        codes, norms = parts
        energies, errors = np.empty((2, len(codes)), dtype=np.float64)
        out = EncodedArrays(codes, norms.reshape(-1).view(np.uint16), energies, errors)
        stats = self._codec.encode_blocks(values, dtype, self.coding(state), out)
        # Norms become infinite only where the exponent does not fit, of which `observed` tells.
        np.minimum(out.norms, FIRST_INVALID_HALF - 1, out=out.norms)
        return Measures(
            energies=energies,
            errors=errors,
            first_bad_block=stats.first_bad_block,
            observed=NormRange(stats.smallest_norm, stats.largest_norm),
        )

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        """See Coder."""
        self.check(parts, state)
        codes, norms = parts
        encoded = codes, norms.reshape(-1).view(np.uint16)
        load_backend("cpu").decode(encoded, self.coding(state), dtype, values)

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """See Coder."""
        check_norms(parts[1], state, "its norm")

    def decode_torch(self, parts: Sequence[Tensor], state: State) -> Tensor:
        """See Coder; the operations of the reference run on any device."""
        import torch

        from pqweights.kernels.reference import decode_blocks

        codes, norms = parts
        if norms.device.type == "cpu":
            self.check([codes.numpy(), norms.numpy()], state)
        return decode_blocks(codes, norms.reshape(-1).view(torch.float16), self.coding(state))

    def coding(self, state: State) -> BlockCoding:
        """Return how blocks were coded in a state, for kernels that read codes and norms themselves."""
        assert isinstance(state, ScalarState)
        return BlockCoding(
            codebook=self.codebook,
            signed=state.rotation == SIGNED_HADAMARD,
            norm_exponent=state.norm_exponent,
        )
