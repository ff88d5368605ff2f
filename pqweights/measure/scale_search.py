"""Which scale of each input channel makes the output of a matrix err least, with the codec in use.

Lin et al., arXiv:2306.00978 (AWQ), scale the channels of a weight by s = mean|x|^a before it is quantized and divide by s
afterwards. The codecs here spread a block's error evenly over the block, so that channel k of a block errs by
D mean_j(w_j^2 s_j^2) / s_k^2, and an output by the sum of that times x_k^2: least at s_k = sqrt(rms(x_k) / rms(w_k)), by the
inequality of Cauchy and Schwarz. So both are searched: s = rms(x)^a / rms(w)^b, a = b = 1/2 being the answer of theory.
What is found is checked on inputs that the search has not seen. docs/awq.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.scales import LARGEST_SCALE, SMALLEST_SCALE
from pqweights.codecs.protocol import Coder
from pqweights.codecs.weight import encode_weight
from pqweights.errors import SourceError

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Rows of inputs without which nothing is searched: of those to search on, and of those held back.
FEWEST_ROWS = (256, 128)
# Windows of the text that those held back must come from: rows of one window depend on each other.
FEWEST_WINDOWS = 4
# A gain on them counts if it is above so many of its standard errors over windows.
CLEAR = 3.0
# A smaller share of the error is not worth the bytes of the scales.
SMALLEST_GAIN = 0.01
# Rows of a weight that the search looks at; the check looks at all, so many weights at a time.
SEARCHED_ROWS = 512
CHECKED_WEIGHTS = 1 << 22


@dataclass(frozen=True, eq=False)
class Inputs:
    """What entered one matrix of K input channels.

    along_rows: whether channels run along the rows of the matrix as the model stores it, [N, K]; some store [K, N].
    tokens: how many rows there were in all, held-back ones not counted. rms: [K] f32, root mean square of each channel over
    them. rows, held_back: samples [rows, K] f32 of each kind; windows: of each row held back, the number of its window.
    """

    along_rows: bool
    tokens: int
    rms: Floats
    rows: Floats
    held_back: Floats
    windows: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SearchResult:
    """What the search says of one matrix.

    scaled: whether it gets scales; reason: why not. tokens: that it saw. input_exponent, weight_exponent: a and b.
    gain, held_back_gain: by what share of itself the output error falls, on the text searched and on the text held back.
    """

    scaled: bool
    reason: str
    tokens: int
    input_exponent: float = 0.0
    weight_exponent: float = 0.0
    gain: float | None = None
    held_back_gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """[N, K], the number-th of a tensor. block_size: of what is to encode it."""

    tensor: LogicalTensor
    number: int
    rows: int
    columns: int
    block_size: int

    @property
    def step(self) -> int:
        """Rows that whole blocks fill."""
        return self.block_size // math.gcd(self.columns, self.block_size)

    @property
    def begins_with_a_block(self) -> bool:
        """Whether no block holds weights of this matrix and of another one of the stack."""
        return len(self.tensor.shape) == 2 or self.rows * self.columns % self.block_size == 0

    def read(self, first: int, count: int) -> Floats:
        """Rows [first, first + count).

        Raises SourceError where a weight is NaN or infinite.
        """
        raw = np.empty(count * self.columns * 4, dtype=np.uint8)
        start = (self.number * self.rows + first) * self.columns
        self.tensor.read(start, count * self.columns, "F32", raw)
        values = raw.view(np.float32).reshape(count, self.columns)
        if not np.isfinite(values).all():
            raise SourceError(
                f"{self.tensor.parts[0].file}: tensor {self.tensor.name!r}: expected finite weights, found a NaN or an infinity; "
                "keep the tensor with a rule of the recipe, or repair the checkpoint"
            )
        return values

    def sample(self) -> Floats:
        """About SEARCHED_ROWS rows, in runs of whole blocks that are spread over the matrix."""
        runs = -(-self.rows // self.step)
        wanted = max(1, min(runs, SEARCHED_ROWS // self.step))
        firsts = [int(place * runs / wanted) * self.step for place in range(wanted)]
        return np.concatenate([self.read(first, min(self.step, self.rows - first)) for first in firsts])

    def pieces(self) -> Iterator[Floats]:
        """All of it, CHECKED_WEIGHTS at a time."""
        step = max(1, CHECKED_WEIGHTS // self.columns // self.step) * self.step
        for first in range(0, self.rows, step):
            yield self.read(first, min(step, self.rows - first))


def search(
    coder: Coder, weight: Matrix, inputs: Inputs | None, transposed: bool = False
) -> tuple[SearchResult, Floats | None]:
    """The scales of one matrix, [K] float16 values as f32; None where it keeps scale 1.

    transposed: whether the model stores the matrix the other way round. Raises SourceError for weights that are not finite.
    """
    why_not = _why_not(weight, inputs, transposed)
    if inputs is None or why_not:
        return SearchResult(False, why_not, 0 if inputs is None else inputs.tokens), None
    sample = weight.sample()
    of_inputs, of_weights = (
        _logarithms(inputs.rms),
        _logarithms(np.sqrt(np.square(sample, dtype=np.float64).mean(axis=0))),
    )

    def scales(a: float, b: float) -> Floats:
        return _as_stored(a * of_inputs - b * of_weights)

    def error(a: float, b: float) -> float:
        return float(output_errors(coder, sample, scales(a, b), inputs.rows).sum())

    plain = error(0.0, 0.0)
    if plain == 0.0:
        return SearchResult(False, "its outputs have no error", inputs.tokens), None
    (a, b), least = _least(error, plain)
    gain = 1 - least / plain
    if not gain >= SMALLEST_GAIN:
        return SearchResult(False, f"no scale gains {SMALLEST_GAIN:.0%}", inputs.tokens, gain=gain), None
    best = scales(a, b)
    ones = np.ones_like(best)
    before, after = (
        sum(output_errors(coder, piece, of_piece, inputs.held_back) for piece in weight.pieces())
        for of_piece in (ones, best)
    )
    held_back_gain = float(1 - np.sum(after) / np.sum(before)) if np.sum(before) else 0.0
    reason = ""
    if not held_back_gain >= SMALLEST_GAIN:
        reason = f"gains less than {SMALLEST_GAIN:.0%} on the text held back"
    elif not is_clear(np.asarray(before - after), inputs.windows):
        reason = "what it gains on the text held back may be chance"
    return SearchResult(not reason, reason, inputs.tokens, a, b, gain, held_back_gain), None if reason else best


def _why_not(weight: Matrix, inputs: Inputs | None, transposed: bool) -> str:
    """Why a matrix keeps scale 1 without a search; empty for one that is searched."""
    if inputs is None:
        return "no product of activations with it was seen"
    seen, held_back, windows = len(inputs.rows), len(inputs.held_back), len(np.unique(inputs.windows))
    if seen < FEWEST_ROWS[0] or held_back < FEWEST_ROWS[1] or windows < FEWEST_WINDOWS:
        return (
            f"expected at least {FEWEST_ROWS[0]} tokens, and {FEWEST_ROWS[1]} held back from {FEWEST_WINDOWS} windows; "
            f"{seen} entered it, and {held_back} from {windows}"
        )
    if inputs.along_rows == transposed:
        return "its blocks run along the outputs, and take up whatever scale an input has"
    if len(inputs.rms) != weight.columns:
        return f"{len(inputs.rms)} channels entered it, it has {weight.columns}"
    if not weight.begins_with_a_block:
        return "it shares blocks with the next matrix of the stack"
    if not all(np.isfinite(values).all() for values in (inputs.rms, inputs.rows, inputs.held_back)):
        return "what enters it is not finite; try --dtype float32"
    return ""


def is_clear(gains: Doubles, windows: npt.NDArray[np.int64]) -> bool:
    """Whether gains of rows, added up by the window that they come from, are above 0 by CLEAR standard errors."""
    by_window = np.array([gains[windows == window].sum() for window in np.unique(windows)])
    if len(by_window) < 2:
        return False
    return bool(by_window.mean() > CLEAR * by_window.std(ddof=1) / math.sqrt(len(by_window)))


def _least(error: Callable[[float, float], float], plain: float) -> tuple[tuple[float, float], float]:
    """Exponents with the least error: a grid over [0, 1] x [0, 1], then twice the neighbours of the best at half the step."""
    known = {(0.0, 0.0): plain}
    step = 0.25
    best = (0.0, 0.0)
    candidates = [(i * step, j * step) for i in range(5) for j in range(5)]
    for _ in range(3):
        for pair in candidates:
            if pair not in known:
                known[pair] = error(*pair)
        best = min(known, key=lambda pair: (known[pair], pair))
        step /= 2
        candidates = [(best[0] + i * step, best[1] + j * step) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        candidates = [pair for pair in candidates if min(pair) >= 0 and max(pair) <= 1]
    return best, known[best]


def output_errors(coder: Coder, weight: Floats, scales: Floats, inputs: Floats) -> Doubles:
    """||(W' - W) x||^2 for each row x of inputs [rows, K], W' being what W * scales [N, K] is decoded to, over scales.

    Infinite where a scaled weight leaves float32.
    """
    with np.errstate(over="ignore"):
        scaled = np.ascontiguousarray(weight * scales)
    if not np.isfinite(scaled).all():
        return np.full(len(inputs), np.inf)
    encoded, _ = encode_weight(scaled.view(np.uint8).reshape(-1), "F32", scaled.shape, coder)
    difference = encoded.decode().view(np.float32).reshape(weight.shape) / scales - weight
    outputs = difference @ inputs.T
    errors: Doubles = np.einsum("ij,ij->j", outputs, outputs, dtype=np.float64)
    return errors


def _logarithms(rms: npt.NDArray[np.float32] | Doubles) -> Floats:
    """Of each channel's size, around 0; channels that are all but silent count as a ten-thousandth of the mean."""
    floor = max(1e-4 * float(rms.mean()), 1e-30)
    logarithms = np.log(np.maximum(rms, floor))
    centred: Floats = (logarithms - logarithms.mean()).astype(np.float32)
    return centred


def _as_stored(logarithms: Floats) -> Floats:
    """e to their power, as float16 holds it."""
    exact = np.clip(np.exp(logarithms), SMALLEST_SCALE, LARGEST_SCALE)
    return exact.astype(np.float16).astype(np.float32)
