"""Search for the scales of input channels that give the output of a matrix the least error with the codec in use.

Lin et al., arXiv:2306.00978 (AWQ), scale the channels of a weight by s = mean|x|^a before it is quantized and divide by
s afterwards. The codecs here spread a block's error evenly over the block, so channel k of a block has the error
D mean_j(w_j^2 s_j^2) / s_k^2, and an output the sum of that times x_k^2. By the inequality of Cauchy and Schwarz it is
least at s_k = sqrt(rms(x_k) / rms(w_k)). So two exponents are searched, s = rms(x)^a / rms(w)^b, and theory says
a = b = 1/2. The result is checked on inputs that the search has not seen. See docs/awq.md.

A format that encodes slowly has a model of its errors (BlockFormat.modelled_errors), by which the search compares
scales; the check encodes in any case, so that no scale is taken that only the model praises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LARGEST_SCALE, SMALLEST_SCALE, LogicalTensor, scale_shape
from pqweights.errors import SourceError
from pqweights.formats.master import BlockFormat
from pqweights.formats.weight import decode_weight, encode_weight
from pqweights.planning.inputs import WeightInputs
from pqweights.planning.layout import TensorPlan, block_format_of

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# The fewest rows of inputs for a search: rows to search on, and rows held back.
FEWEST_ROWS = (256, 128)
# The fewest windows that held-back rows must come from, because rows of one window depend on each other.
FEWEST_WINDOWS = 4
# A gain on held-back rows counts if it is above this many of its standard errors over windows.
CLEAR = 3.0
# The smallest gain, as a share of the error, that is worth the bytes of the scales.
SMALLEST_GAIN = 0.01
# The search looks at this many rows of a weight. The check looks at all rows, this many weights at a time.
SEARCHED_ROWS = 512
CHECKED_WEIGHTS = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The inputs of one matrix with K input channels.

    tokens: how many rows there were in all, not counting those held back.
    rms: the root mean square of each channel over those rows, [K] f32.
    rows: a sample of those rows, [rows, K] f32.
    held_back: a sample of the rows held back, [rows, K] f32.
    windows: the number of the window of each row in held_back, [rows].
    """

    tokens: int
    rms: Floats
    rows: Floats
    held_back: Floats
    windows: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of the search for one matrix.

    scaled: whether the matrix gets scales.
    reason: why it does not; empty if it does.
    tokens: how many rows of inputs the matrix had.
    input_exponent, weight_exponent: the exponents a and b.
    gain, held_back_gain: the share by which the output error falls, on the searched and on the held-back rows.
    """

    scaled: bool
    reason: str
    tokens: int
    input_exponent: float = 0.0
    weight_exponent: float = 0.0
    gain: float | None = None
    held_back_gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The result for one weight of the plan.

    name: the weight.
    codec, bits: what the scales were searched for.
    matrices: one result, or one for each expert.
    """

    name: str
    codec: str
    bits: float
    matrices: tuple[SearchResult, ...]

    @property
    def scaled(self) -> bool:
        """Whether any of its matrices gets scales."""
        return any(matrix.scaled for matrix in self.matrices)

    def to_json(self) -> dict[str, Any]:
        """Return what `quantize --json` says of the weight."""
        return {
            "codec": self.codec,
            "bits": self.bits,
            "scaled": self.scaled,
            "matrices": [vars(matrix) for matrix in self.matrices],
        }


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One matrix [N, K] of a tensor, which may be a stack of matrices.

    tensor: the tensor.
    number: which matrix of the stack it is, from 0 on.
    rows, columns: N and K.
    block_size: the weights that the codec treats together at least (BlockFormat.stated_block_size).
    """

    tensor: LogicalTensor
    number: int
    rows: int
    columns: int
    block_size: int

    @property
    def step(self) -> int:
        """The smallest number of rows that whole blocks fill."""
        return self.block_size // math.gcd(self.columns, self.block_size)

    @property
    def begins_with_a_block(self) -> bool:
        """Whether no block holds weights of this matrix together with weights of another one of the stack."""
        return len(self.tensor.shape) == 2 or self.rows * self.columns % self.block_size == 0

    def read(self, first: int, count: int) -> Floats:
        """Return the rows [first, first + count), f32.

        Raises SourceError if a weight is NaN or infinite.
        """
        raw = np.empty(count * self.columns * 4, dtype=np.uint8)
        start = (self.number * self.rows + first) * self.columns
        self.tensor.read(start, count * self.columns, "F32", raw)
        values = raw.view(np.float32).reshape(count, self.columns)
        if not np.isfinite(values).all():
            raise SourceError(
                f"{self.tensor.parts[0].file}: tensor {self.tensor.name!r}: expected finite weights, found a NaN or an "
                "infinity; keep the tensor with a rule of the recipe, or repair the checkpoint"
            )
        return values

    def sample(self) -> Floats:
        """Return about SEARCHED_ROWS rows, in runs of whole blocks that are spread over the matrix."""
        runs = -(-self.rows // self.step)
        wanted = max(1, min(runs, SEARCHED_ROWS // self.step))
        firsts = [int(number * runs / wanted) * self.step for number in range(wanted)]
        return np.concatenate([self.read(first, min(self.step, self.rows - first)) for first in firsts])

    def pieces(self) -> Iterator[Floats]:
        """Yield all rows, about CHECKED_WEIGHTS weights at a time."""
        step = max(1, CHECKED_WEIGHTS // self.columns // self.step) * self.step
        for first in range(0, self.rows, step):
            yield self.read(first, min(step, self.rows - first))


def search_layer(
    planned: TensorPlan,
    tensor: LogicalTensor,
    *,
    reads: WeightInputs | None,
    inputs_of: Callable[[int], Inputs | None],
    makes_logits: bool = False,
) -> tuple[LayerReport, Floats | None]:
    """Search the scales of one weight; return its report, and its scales [..., K] or None.

    reads: what its matrices read; None if the model was not seen to multiply by them
    inputs_of: returns the inputs of a vector, by its number
    makes_logits: whether its outputs are the model's predictions
    """
    # That weights are enlarged afterwards adds about as much to all errors, whatever the scales.
    format, shape = block_format_of(planned).least_squares(), planned.shape

    def report(*results: SearchResult) -> LayerReport:
        return LayerReport(name=planned.name, codec=format.codec, bits=format.bits, matrices=results)

    if len(shape) not in (2, 3) or not planned.weights:
        reason = f"expected a matrix or a stack of them, found shape {list(shape)}"
        return report(SearchResult(scaled=False, reason=reason, tokens=0)), None
    count, block_size = math.prod(shape[:-2]), format.stated_block_size
    vectors = (None,) * count if reads is None else reads.vectors
    results, scales = [], np.ones((count, shape[-1]), dtype=np.float32)
    for number, vector in enumerate(vectors):
        weight = Matrix(tensor=tensor, number=number, rows=shape[-2], columns=shape[-1], block_size=block_size)
        inputs = None if vector is None else inputs_of(vector)
        transposed = reads is not None and reads.transposed
        result, best = search(format, weight, inputs, transposed=transposed, makes_logits=makes_logits)
        results.append(result)
        if best is not None:
            scales[number] = best
    layer = report(*results)
    return layer, scales.reshape(scale_shape(shape)) if layer.scaled else None


def search(
    format: BlockFormat,
    weight: Matrix,
    inputs: Inputs | None,
    *,
    transposed: bool = False,
    makes_logits: bool = False,
) -> tuple[SearchResult, Floats | None]:
    """Search the scales of one matrix: [K] float16 values as f32, or None if it keeps scale 1.

    format: what will encode the matrix.
    weight: the matrix.
    inputs: its inputs; None if it had none.
    transposed: whether the matrix is stored as [K, N], with channels along its columns.
    makes_logits: whether its outputs are the model's predictions, so that the check is of their divergence.

    Raises SourceError for weights that are not finite.
    """
    tokens, why_not = 0 if inputs is None else inputs.tokens, _why_not(weight, inputs, transposed)
    if inputs is None or why_not:
        return SearchResult(scaled=False, reason=why_not, tokens=tokens), None
    sample = weight.sample()
    of_inputs, of_weights = _logarithms(inputs.rms), _logarithms(_rms(sample))

    def error(a: float, b: float) -> float:
        return expected_error(format, sample, _as_stored(a * of_inputs - b * of_weights), inputs.rows)

    plain = error(0.0, 0.0)
    if plain == 0.0:
        return SearchResult(scaled=False, reason="its outputs have no error", tokens=tokens), None
    (a, b), least = _least(error, plain)
    gain = 1 - least / plain
    if not gain >= SMALLEST_GAIN:
        reason = f"no scale gains {SMALLEST_GAIN:.0%}"
        return SearchResult(scaled=False, reason=reason, tokens=tokens, gain=gain), None
    best = _as_stored(a * of_inputs - b * of_weights)
    held_back_gain, reason = _check(format, weight, scales=best, inputs=inputs, makes_logits=makes_logits)
    result = SearchResult(
        scaled=not reason,
        reason=reason,
        tokens=tokens,
        input_exponent=a,
        weight_exponent=b,
        gain=gain,
        held_back_gain=held_back_gain,
    )
    return result, best if result.scaled else None


def _check(
    format: BlockFormat, weight: Matrix, *, scales: Floats, inputs: Inputs, makes_logits: bool
) -> tuple[float, str]:
    """Return the gain of scales on held-back rows, and why they are not taken (empty if they are)."""
    errors = divergences if makes_logits else _all_errors
    before, after = (errors(format, weight, factors, inputs.held_back) for factors in (np.ones_like(scales), scales))
    gain = float(1 - np.sum(after) / np.sum(before)) if np.sum(before) else 0.0
    if not gain >= SMALLEST_GAIN:
        return gain, f"gains less than {SMALLEST_GAIN:.0%} on the text held back"
    if not is_clear(np.asarray(before - after), inputs.windows):
        return gain, "its gain on the text held back may be chance"
    return gain, ""


def _all_errors(format: BlockFormat, weight: Matrix, scales: Floats, inputs: Floats) -> Doubles:
    """Return output_errors of a whole matrix, [rows]."""
    errors: Doubles = sum((output_errors(format, piece, scales, inputs) for piece in weight.pieces()), np.zeros(1))
    return errors


def divergences(format: BlockFormat, weight: Matrix, scales: Floats, inputs: Floats) -> Doubles:
    """Return about how far predictions diverge by the errors of the matrix that makes them, [rows].

    It is half the variance of the errors of a row's logits, under its own probabilities: errors of logits of tokens
    that are not predicted do not count, nor does what all logits have in common.
    """
    greatest, total = np.full(len(inputs), -np.inf), np.zeros(len(inputs))
    for piece in weight.pieces():
        logits = (piece @ inputs.T).astype(np.float64)
        most = np.maximum(greatest, logits.max(axis=0))
        total = total * np.exp(greatest - most) + np.exp(logits - most).sum(axis=0)
        greatest = most
    mean, square = np.zeros(len(inputs)), np.zeros(len(inputs))
    for piece in weight.pieces():
        shares = np.exp((piece @ inputs.T).astype(np.float64) - greatest) / total
        differences = output_differences(format, piece, scales, inputs)
        if not np.isfinite(differences).all():
            return np.full(len(inputs), np.inf)
        mean += (shares * differences).sum(axis=0)
        square += (shares * np.square(differences)).sum(axis=0)
    return (square - np.square(mean)) / 2


def _why_not(weight: Matrix, inputs: Inputs | None, transposed: bool) -> str:
    """Return why a matrix keeps scale 1 without a search; empty if it is searched."""
    if inputs is None:
        return "no product of activations with it was seen"
    seen, held_back, windows = len(inputs.rows), len(inputs.held_back), len(np.unique(inputs.windows))
    if seen < FEWEST_ROWS[0] or held_back < FEWEST_ROWS[1] or windows < FEWEST_WINDOWS:
        return (
            f"expected at least {FEWEST_ROWS[0]} tokens, and {FEWEST_ROWS[1]} held back from {FEWEST_WINDOWS} windows; "
            f"found {seen}, and {held_back} from {windows}"
        )
    if transposed:
        return "its blocks run along the outputs, so scales of inputs change nothing"
    if len(inputs.rms) != weight.columns:
        return f"expected {weight.columns} input channels, found {len(inputs.rms)}"
    if not weight.begins_with_a_block:
        return "it shares blocks with the next matrix of the stack"
    if not all(np.isfinite(values).all() for values in (inputs.rms, inputs.rows, inputs.held_back)):
        return "its inputs are not finite"
    return ""


def is_clear(gains: Doubles, windows: npt.NDArray[np.int64]) -> bool:
    """Return whether the gains of rows, added up by window, are above 0 by CLEAR standard errors.

    gains: the gain of each row, [rows].
    windows: the number of each row's window, [rows].
    """
    by_window = np.array([gains[windows == window].sum() for window in np.unique(windows)])
    if len(by_window) < 2:
        return False
    return bool(by_window.mean() > CLEAR * by_window.std(ddof=1) / math.sqrt(len(by_window)))


def _least(error: Callable[[float, float], float], plain: float) -> tuple[tuple[float, float], float]:
    """Return the exponents with the least error, and that error.

    It searches a grid over [0, 1] x [0, 1], then twice the neighbours of the best point at half the step.
    """
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


def expected_error(format: BlockFormat, weight: Floats, scales: Floats, inputs: Floats) -> float:
    """Return the sum of output_errors, by the format's model if it has one."""
    modelled = modelled_error(format, weight, scales, inputs)
    return float(output_errors(format, weight, scales, inputs).sum()) if modelled is None else modelled


def modelled_error(format: BlockFormat, weight: Floats, scales: Floats, inputs: Floats) -> float | None:
    """Return the sum of ||(W' - W) x||^2 over the inputs that the format's model expects; None if it has none.

    The errors of weights are taken as uncorrelated, with the mean square that the model gives their block, divided by
    the square of their channel's scale. It is infinite if a scaled weight overflows float32.

    format: what will encode the weight.
    weight: W, [N, K].
    scales: one of each input channel, [K].
    inputs: rows of inputs, [rows, K].
    """
    size = format.stated_block_size
    with np.errstate(over="ignore"):
        scaled = weight * scales
    if not np.isfinite(scaled).all():
        return math.inf
    padded = np.zeros(-(-scaled.size // size) * size, dtype=np.float32)
    padded[: scaled.size] = scaled.reshape(-1)
    of_blocks = format.modelled_errors(padded.reshape(-1, size))
    if of_blocks is None:
        return None
    by_channel = np.repeat(of_blocks, size)[: scaled.size].reshape(weight.shape).sum(axis=0)
    energies = np.einsum("ij,ij->j", inputs, inputs, dtype=np.float64)
    return float((by_channel * energies / np.square(scales, dtype=np.float64)).sum())


def output_errors(format: BlockFormat, weight: Floats, scales: Floats, inputs: Floats) -> Doubles:
    """Return ||(W' - W) x||^2 for each row x of the inputs, [rows]; see output_differences."""
    differences = output_differences(format, weight, scales, inputs)
    errors: Doubles = np.einsum("ij,ij->j", differences, differences, dtype=np.float64)
    return errors


def output_differences(format: BlockFormat, weight: Floats, scales: Floats, inputs: Floats) -> Floats:
    """Return (W' - W) x for each row x of the inputs, [N, rows].

    W' is what W * scales is decoded to, divided by scales. All are infinite if a scaled weight overflows float32.

    format: what encodes the weight.
    weight: W, [N, K].
    scales: one of each input channel, [K].
    inputs: rows of inputs, [rows, K].
    """
    with np.errstate(over="ignore"):
        scaled = np.ascontiguousarray(weight * scales)
    if not np.isfinite(scaled).all():
        return np.full((len(weight), len(inputs)), np.inf, dtype=np.float32)
    raw = scaled.view(np.uint8).reshape(-1)
    parts, last = encode_weight(raw, dtype="F32", shape=scaled.shape, format=format)
    decoded = decode_weight(last.format, parts, scaled.size, "F32").view(np.float32)
    outputs: Floats = (decoded.reshape(weight.shape) / scales - weight).astype(np.float32, copy=False) @ inputs.T
    return outputs


def _rms(sample: Floats) -> Doubles:
    """The root mean square of each column, [K]."""
    values: Doubles = np.sqrt(np.square(sample, dtype=np.float64).mean(axis=0))
    return values


def _logarithms(rms: npt.NDArray[np.float32] | Doubles) -> Floats:
    """Return the logarithm of each channel's size, around 0; channels near 0 count as a ten-thousandth of the mean."""
    floor = max(1e-4 * float(rms.mean()), 1e-30)
    logarithms = np.log(np.maximum(rms, floor))
    centred: Floats = (logarithms - logarithms.mean()).astype(np.float32)
    return centred


def _as_stored(logarithms: Floats) -> Floats:
    """Return e to the power of each logarithm, as float16 holds it."""
    exact = np.clip(np.exp(logarithms), SMALLEST_SCALE, LARGEST_SCALE)
    return exact.astype(np.float16).astype(np.float32)
