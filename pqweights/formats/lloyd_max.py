"""Hadamard rotation and Lloyd-Max levels with a least-squares norm per block: the codec of the master.

From Vicentino, arXiv:2603.29078 v1: block norms, Walsh-Hadamard rotation, Lloyd-Max levels. The least-squares norm and
the fixed signs of the rescue rotation are additions of pqweights. docs/format.md gives the order of operations, and
docs/method.md the reasons.

The levels are those of Lloyd (1982) and Max (1960) for N(0,1): level c_k is the mean over its cell, and a cell ends
half-way between two levels. For a log-concave density these conditions have exactly one solution (Kieffer 1983), so a
table can be checked as well as computed: tests/formats/test_lloyd_max.py derives every entry in 40-digit arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pqweights.common.strict_json import is_number
from pqweights.errors import RecipeError
from pqweights.formats.protocol import (
    Bytes,
    Codec,
    Coder,
    Measures,
    NormRange,
    Part,
    PassResult,
    State,
    check_effort,
    unknown_rate,
)
from pqweights.formats.scalar import (
    FIRST_INVALID_HALF,
    ROTATIONS,
    SIGNED_HADAMARD,
    ScalarState,
    check_norms,
    parse_rotated,
    state_after,
)
from pqweights.kernels import BLOCK_SIZE, Backend, BlockCoding, EncodedArrays, load_backend
from pqweights.kernels.codebook import Codebook, codebook_from_levels

if TYPE_CHECKING:
    from torch import Tensor

CODES = "_codes"
NORMS = "_norms"
MIN_BITS = 2
MAX_BITS = 8

# The upper half of each table, ascending; the lower half is its mirror image. Decimals that round to one float32, and
# literals, because they are part of the format.
HALF_LEVELS: dict[int, tuple[float, ...]] = {
    2: (
        0.45278004, 1.5104176,
    ),
    3: (
        0.24509418, 0.7560053, 1.3439093, 2.1519456,
    ),
    4: (
        0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895,
    ),
    5: (
        0.06588966, 0.19805183, 0.3313783, 0.4666995, 0.6049336, 0.7471357, 0.8945651, 1.0487833, 1.2118044,
        1.3863404, 1.576228, 1.7872332, 2.0287285, 2.3177395, 2.6911197, 3.2607324,
    ),
    6: (
        0.033409506, 0.10027829, 0.1672969, 0.23456699, 0.30219284, 0.37028265, 0.43894967, 0.5083138, 0.578503,
        0.6496556, 0.7219219, 0.7954677, 0.8704766, 0.94715494, 1.0257363, 1.1064882, 1.1897202, 1.2757945, 1.365141,
        1.4582764, 1.5558312, 1.6585889, 1.7675419, 1.8839773, 2.0096111, 2.1468103, 2.2989812, 2.471305, 2.6722739,
        2.9174068, 3.240437, 3.7441013,
    ),
    7: (
        0.01682817, 0.050490864, 0.08417264, 0.11788628, 0.15164465, 0.18546072, 0.21934764, 0.25331873, 0.28738755,
        0.32156795, 0.35587403, 0.3903203, 0.42492166, 0.45969343, 0.49465147, 0.5298122, 0.56519264, 0.6008105,
        0.6366843, 0.6728333, 0.70927787, 0.74603915, 0.78313965, 0.82060295, 0.8584542, 0.89671993, 0.9354285,
        0.97461, 1.0142967, 1.0545232, 1.0953267, 1.1367474, 1.1788286, 1.2216175, 1.2651651, 1.3095276, 1.3547662,
        1.4009485, 1.448149, 1.49645, 1.5459437, 1.5967331, 1.6489339, 1.702677, 1.7581115, 1.8154078, 1.8747625,
        1.9364046, 2.0006018, 2.0676715, 2.1379933, 2.2120275, 2.2903392, 2.3736343, 2.4628115, 2.5590405, 2.6638865,
        2.7795143, 2.9090471, 3.0572462, 3.231933, 3.4474304, 3.7349367, 4.189694,
    ),
    8: (
        0.008446193, 0.025339384, 0.042234983, 0.059134603, 0.07603986, 0.092952356, 0.10987372, 0.12680559,
        0.14374956, 0.16070732, 0.17768049, 0.19467075, 0.21167976, 0.2287092, 0.24576078, 0.26283622, 0.27993724,
        0.2970656, 0.31422305, 0.3314114, 0.34863243, 0.365888, 0.38317996, 0.40051022, 0.41788065, 0.4352932,
        0.45274988, 0.47025266, 0.4878036, 0.5054048, 0.5230583, 0.5407663, 0.55853105, 0.5763547, 0.5942396,
        0.6121881, 0.6302026, 0.6482855, 0.6664394, 0.68466675, 0.70297027, 0.72135264, 0.7398166, 0.75836504,
        0.77700084, 0.795727, 0.8145467, 0.833463, 0.8524793, 0.8715989, 0.8908253, 0.91016203, 0.92961293, 0.9491818,
        0.9688726, 0.98868936, 1.0086365, 1.0287182, 1.0489392, 1.0693042, 1.0898181, 1.110486, 1.1313132, 1.1523054,
        1.1734682, 1.1948076, 1.2163299, 1.2380418, 1.2599499, 1.2820615, 1.304384, 1.3269253, 1.3496937, 1.3726976,
        1.3959464, 1.4194493, 1.4432166, 1.4672587, 1.491587, 1.5162132, 1.5411496, 1.5664098, 1.5920075, 1.6179578,
        1.6442765, 1.6709803, 1.6980875, 1.7256169, 1.7535894, 1.7820269, 1.8109531, 1.8403933, 1.8703752, 1.900928,
        1.9320842, 1.9638784, 1.9963485, 2.0295358, 2.0634851, 2.0982466, 2.1338742, 2.1704283, 2.2079754, 2.24659,
        2.2863545, 2.3273618, 2.3697171, 2.4135387, 2.4589622, 2.5061426, 2.5552595, 2.6065214, 2.660174, 2.7165077,
        2.7758706, 2.8386858, 2.905473, 2.9768822, 3.053742, 3.1371326, 3.2285001, 3.3298485, 3.4440718, 3.575588,
        3.7316663, 3.9256377, 4.1865954, 4.6035357,
    ),
}  # fmt: skip

# Mean squared error of quantizing N(0,1) with the table above.
DISTORTION: dict[int, float] = {
    2: 0.117481848,
    3: 0.0345477608,
    4: 0.00950100801,
    5: 0.00250466836,
    6: 0.000644239665,
    7: 0.00016347823,
    8: 0.0000411850829,
}


@functools.cache
def codebook(bits: int) -> Codebook:
    """Return the Lloyd-Max codebook of a bit width.

    Raises RecipeError for a bit width outside 2..8.
    """
    if bits not in HALF_LEVELS:
        raise RecipeError(f"bits: expected {MIN_BITS} to {MAX_BITS}, found {bits}")
    upper = np.array(HALF_LEVELS[bits], dtype=np.float32)
    return codebook_from_levels(bits, np.concatenate([-upper[::-1], upper]))


class HadamardLloydMax(Codec):
    """The codec of the master; see Codec.

    rotations: the default one, followed by those that a rescue tries
    gained: the widths at which norms are enlarged (gain)
    """

    name = "hadamard-lloyd-max"
    suffixes = (CODES, NORMS)
    rates = range(MIN_BITS, MAX_BITS + 1)
    block_size = BLOCK_SIZE
    rotations: tuple[str, ...] = ROTATIONS
    gained: Sequence[int] = (2, 3)
    state_defaults: Mapping[str, Any] = {"rotation": ROTATIONS[0], "norm_exponent": 0}
    orthogonal_error = True  # where the norm is that of least squares
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

    def distortion(self, bits: int) -> float:
        """Return the distortion of the Lloyd-Max levels on N(0,1) at a bit width, with norms of least squares."""
        return DISTORTION[bits]

    def gain(self, bits: int) -> float:
        """Return the factor of the norms of least squares at a bit width.

        Decoded weights are shorter than the weights by the error. Where that is much they are enlarged until their
        product with the weights is the energy of these: the squared error rises by the same factor, but what layers
        compute is not damped any more.
        """
        return 1 / (1 - self.distortion(bits)) if bits in self.gained else 1.0

    def codebook(self, bits: int) -> Codebook:
        """Return the Lloyd-Max levels of a bit width."""
        return codebook(bits)

    @property
    def backend(self) -> Backend:
        """What encodes whole blocks."""
        return load_backend("cpu")

    def coder(self, bits: float, effort: int | None = None) -> ScalarCoder:
        """Return the coder of a rate, which encodes with an effort; None for the default."""
        check_effort(self, effort)
        width = self.width(bits)
        return _coder(self, width, self.gain(width))

    def coder_from_tables(self, bits: float, tables: Any) -> ScalarCoder:
        """Return the coder of a rate, with the tables of a master. The tables are the levels."""
        width = self.width(bits)
        return ScalarCoder(self, codebook_from_levels(width, _checked_levels(tables, width)), self.gain(width))

    def width(self, bits: float) -> int:
        """Return a bit width as an integer.

        Raises RecipeError for one that the codec does not have.
        """
        if bits not in self.rates:
            raise unknown_rate(self, bits)
        return int(bits)


@functools.cache
def _coder(codec: HadamardLloydMax, bits: int, gain: float) -> ScalarCoder:
    """Return the coder of a codec and a bit width, cached because plans ask for it once for each weight."""
    return ScalarCoder(codec, codec.codebook(bits), gain)


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
    """The codec with the levels of one bit width, and a factor of the norms that it encodes; see Coder."""

    _codec: HadamardLloydMax
    codebook: Codebook
    gain: float = 1.0
    block_size = BLOCK_SIZE

    @property
    def codec(self) -> str:
        """The name of the codec, a key of CODECS."""
        return self._codec.name

    @property
    def bits(self) -> int:
        """The rate by which users and files name the coder; an int if it is whole."""
        return self.codebook.bits

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors of a weight, with the suffixes of the codec.

        A block has 16 bytes of codes for each bit, and a norm.
        """
        return Part(CODES, "U8", BLOCK_SIZE * self.bits // 8), Part(NORMS, "F16", 1)

    @property
    def distortion(self) -> float:
        """The relative mean squared error that theory promises for Gaussian weights."""
        return self._codec.distortion(self.bits) * self.gain

    @property
    def orthogonal_error(self) -> bool:
        """Whether the error of a decoded weight is orthogonal to it, so that errors of later rounding simply add."""
        return self._codec.orthogonal_error and self.gain == 1

    def least_squares(self) -> ScalarCoder:
        """Return the coder that makes the same codes with the least squared error."""
        return replace(self, gain=1.0)

    def tables(self) -> list[float]:
        """Return what decoding needs besides parts and state, as JSON for the master; None if it needs nothing.

        The levels are the shortest decimals that round to them.
        """
        return [float(str(level)) for level in self.codebook.levels]

    def first_state(self) -> ScalarState:
        """Return the state of the first pass, which is the only one for nearly every weight."""
        return ScalarState(self._codec.rotations[0], 0)

    def next_state(self, history: Sequence[PassResult]) -> ScalarState | None:
        """Return the state for another pass after these, or None if the last one stands."""
        return state_after(self, self._codec.rotations, history)

    def parse_state(self, values: Mapping[str, Any]) -> ScalarState:
        """Parse what State.to_json returns; absent keys have the values of Codec.state_defaults."""
        return parse_rotated(self, ScalarState, self._codec.rotations, values)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        """Encode whole blocks into parts, and return what was measured."""
        codes, norms = parts
        energies, errors = np.empty((2, len(codes)), dtype=np.float64)
        out = EncodedArrays(codes, norms.reshape(-1).view(np.uint16), energies, errors)
        stats = self._codec.backend.encode(values, dtype, self.coding(state), out)
        # Norms become infinite only where the exponent does not fit, of which these norms tell.
        np.minimum(out.norms, FIRST_INVALID_HALF - 1, out=out.norms)
        return Measures(
            energies=energies,
            errors=errors,
            first_bad_block=stats.first_bad_block,
            norms=NormRange(stats.smallest_norm, stats.largest_norm),
        )

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        """Decode whole blocks, encoded in a state, to raw bytes of `dtype`: BF16, F16 or F32."""
        self.check(parts, state)
        codes, norms = parts
        encoded = codes, norms.reshape(-1).view(np.uint16)
        load_backend("cpu").decode(encoded, self.coding(state), dtype, values)

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """Raise DamagedBlock if it shows without decoding that no coder wrote these bytes."""
        check_norms(parts[1], state)

    def decode_torch(self, parts: Sequence[Tensor], state: State) -> Tensor:
        """Decode whole blocks on the device of the parts, [blocks, bytes] u8 -> [blocks, block size] f32.

        The operations of the reference run on any device.
        """
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
            gain=self.gain,
        )
