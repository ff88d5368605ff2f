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
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from msgspec import Meta

from pqweights.common.strict_json import is_number
from pqweights.errors import RecipeError
from pqweights.formats.master import (
    HADAMARD,
    SIGNED_HADAMARD,
    BlockFormat,
    Bytes,
    DamagedBlock,
    Part,
    Pass,
    check_effort,
    check_rate,
    largest_error,
)
from pqweights.kernels import BLOCK_SIZE, BlockCoding, Codebook, Measures, codebook_from_levels, load_backend

if TYPE_CHECKING:
    from torch import Tensor

CODES = "_codes"
NORMS = "_norms"
MIN_BITS = 2
MAX_BITS = 8

SMALLEST_NORMAL_HALF = 2.0**-14
LARGEST_HALF = 65504.0
# Norms of float32 weights need no exponents beyond this, in either direction.
LARGEST_EXPONENT = 200
FIRST_INVALID_HALF = 0x7C00  # of the bit patterns of float16: infinity; NaN and all negative numbers follow
# Above the largest norm of 128 float32 numbers, and above four times it, because that of least squares may be larger.
_NORM_BOUND = 2.0**135
_EXPONENT_OF_BOUND = 119  # up to which no float16 reaches the bound

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


@dataclass(frozen=True, kw_only=True)
class LloydMax(BlockFormat):
    """Codes of Lloyd-Max levels, and a float16 norm for each block.

    gained: the widths at which norms are enlarged

    rotation: what blocks are multiplied by before their coordinates are rounded
    norm_exponent: norms are stored as float16(norm * 2**-norm_exponent)
    gain: what the encoder multiplies norms of least squares by
    """

    codec: ClassVar[str] = "hadamard-lloyd-max"
    suffixes: ClassVar[tuple[str, ...]] = (CODES, NORMS)
    settings: ClassVar[Mapping[str, Any]] = {"rotation": HADAMARD, "norm_exponent": 0}
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {"rotation": (HADAMARD, SIGNED_HADAMARD)}
    rates: ClassVar[Sequence[float]] = range(MIN_BITS, MAX_BITS + 1)
    gained: ClassVar[Sequence[int]] = (2, 3)
    description: ClassVar[str] = (
        "Each weight is cut along its rows into blocks of 128. A block is rotated by the Walsh-Hadamard matrix, which "
        "makes its coordinates nearly Gaussian, and each coordinate becomes the nearest of the Lloyd-Max levels of the "
        "normal distribution. Beside the codes a block has one float16 norm, the one with the least squared error."
    )
    papers: ClassVar[Sequence[str]] = (
        "Vicentino, *PolarQuant* for weights, [arXiv:2603.29078](https://arxiv.org/abs/2603.29078v1) v1 (later renamed "
        "HLWQ): the method. PolarQuant for KV caches ([arXiv:2502.02617](https://arxiv.org/abs/2502.02617)) is another "
        "method with the same name.",
    )

    bits: int
    rotation: str = HADAMARD
    norm_exponent: Annotated[int, Meta(ge=-LARGEST_EXPONENT, le=LARGEST_EXPONENT)] = 0
    gain: float = 1.0

    @classmethod
    def at(cls, bits: float, effort: int | None = None) -> Self:
        """Return the format of a bit width.

        Decoded weights are shorter than the weights by the error. Where that is much they are enlarged until their
        product with the weights is the energy of these: the squared error rises by the same factor, but what layers
        compute is not damped any more.
        """
        check_effort(cls, effort)
        check_rate(cls, bits)
        made = cls(bits=int(bits), rotation=cls.settings["rotation"])
        return replace(made, gain=1 / (1 - made.distortion)) if made.bits in cls.gained else made

    @property
    def codebook(self) -> Codebook:
        """The levels."""
        return codebook(self.bits)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors: of each block 16 bytes of codes for each bit, and a norm."""
        return Part(CODES, "U8", BLOCK_SIZE * self.bits // 8), Part(NORMS, "F16", 1)

    @property
    def distortion(self) -> float:
        """That of the Lloyd-Max levels on N(0,1), times the gain."""
        return DISTORTION[self.bits] * self.gain

    @property
    def orthogonal_error(self) -> bool:
        """Whether norms are those of least squares."""
        return self.gain == 1

    @property
    def rescued(self) -> bool:
        """Whether signs precede the rotation."""
        return self.rotation == SIGNED_HADAMARD

    def least_squares(self) -> Self:
        """Return the format whose norms are not enlarged."""
        return replace(self, gain=1.0)

    def stated(self) -> dict[str, Any]:
        """Return rotation and exponent, also one of 0."""
        return {key: getattr(self, key) for key in self.settings}

    def tables(self) -> list[float]:
        """Return the levels, the shortest decimals that round to them."""
        return [float(str(level)) for level in self.codebook.levels]

    def check_tables(self, tables: Any) -> None:
        """Raise ValueError unless the tables are the levels, in decimals that round to them."""
        count = 2**self.bits
        if not (isinstance(tables, list) and len(tables) == count and all(map(is_number, tables))):
            raise ValueError(f"expected {count} float32 numbers for {self.bits} bits")
        with np.errstate(over="ignore"):
            levels = np.array(tables, dtype=np.float64).astype(np.float32)
        if not np.array_equal(levels, self.codebook.levels):
            raise ValueError(f"expected those of the format at {self.bits} bits, found others")

    def after(self, passes: Sequence[Pass]) -> Self | None:
        """Return the format of another pass after these, or None if the last one stands.

        A rotation is judged after a pass with the exponent that fits its norms. They are tried in order until the error
        of one is small enough; if none is, the one with the smallest error stands.
        """
        last = passes[-1]
        exponent = norm_exponent_for(last.smallest_norm, last.largest_norm)
        if self.norm_exponent != exponent:
            return replace(self, norm_exponent=exponent)
        if last.relative_mse <= largest_error(self.distortion):
            return None
        # The last pass of a rotation is the one with the fitting exponent.
        tried = {done.format.rotation: done for done in passes if isinstance(done.format, LloydMax)}
        for rotation in self.choices["rotation"]:
            if rotation not in tried:
                return replace(self, rotation=rotation)
        best = min(tried, key=lambda rotation: tried[rotation].relative_mse)
        if best == self.rotation:
            return None
        exponent = norm_exponent_for(tried[best].smallest_norm, tried[best].largest_norm)
        return replace(self, rotation=best, norm_exponent=exponent)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str) -> Measures:
        """Encode whole blocks into codes and norms."""
        codes, norms = parts[0], parts[1].reshape(-1).view(np.uint16)
        measures = load_backend().encode(values, dtype, self.coding, (codes, norms))
        # Norms become infinite only where the exponent does not fit, of which these norms tell.
        np.minimum(norms, FIRST_INVALID_HALF - 1, out=norms)
        return measures

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str) -> None:
        """Decode whole blocks to raw bytes of `dtype`: BF16, F16 or F32."""
        self.check(parts)
        encoded = parts[0], parts[1].reshape(-1).view(np.uint16)
        load_backend().decode(encoded, self.coding, dtype, values)

    def check(self, parts: Sequence[Bytes]) -> None:
        """Raise DamagedBlock for a norm that no encoder writes with the exponent."""
        patterns, exponent = parts[1].reshape(-1).view(np.uint16), self.norm_exponent
        largest = patterns.max(initial=0)
        if largest >= FIRST_INVALID_HALF:
            wrong, reason = patterns >= FIRST_INVALID_HALF, "negative or not finite"
        elif exponent > _EXPONENT_OF_BOUND:
            numbers = np.ldexp(patterns.view(np.float16).astype(np.float64), exponent)
            wrong, reason = numbers >= _NORM_BOUND, f"too large with the exponent {exponent}"
        else:
            return
        if wrong.any():
            raise DamagedBlock(int(wrong.argmax()), f"its norm is {reason}")

    def decode_torch(self, parts: Sequence[Tensor]) -> Tensor:
        """Decode whole blocks on the device of the parts, [blocks, bytes] u8 -> [blocks, block size] f32.

        The operations of the reference run on any device.
        """
        import torch

        from pqweights.kernels.reference import decode_blocks

        codes, norms = parts
        if norms.device.type == "cpu":
            self.check([codes.numpy(), norms.numpy()])
        return decode_blocks(codes, norms.reshape(-1).view(torch.float16), self.coding)

    @property
    def coding(self) -> BlockCoding:
        """How blocks are coded, as the kernels take it."""
        return BlockCoding(
            codebook=self.codebook, signed=self.rescued, norm_exponent=self.norm_exponent, gain=self.gain
        )


def norm_exponent_for(smallest: float, largest: float) -> int:
    """Return the exponent e with which norms are stored as float16(norm * 2**-e).

    smallest, largest: the extremes of the norms that are not 0; inf and 0.0 if there are none

    It is 0 if all non-zero norms are normal float16 numbers; otherwise it brings the largest into [2**14, 2**15).
    """
    if largest == 0.0 or (smallest >= SMALLEST_NORMAL_HALF and largest <= LARGEST_HALF):
        return 0
    return math.frexp(largest)[1] - 1 - 14
