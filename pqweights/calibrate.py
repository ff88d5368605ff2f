"""Activation-aware scales: which scale of each input channel makes a layer's output err least, with the codec in use.

Lin et al., arXiv:2306.00978 (AWQ), scale the channels of a weight by s = mean|x|^a before it is quantized and divide by s
afterwards. The codecs here spread a block's error evenly over the block, so that channel k of a block errs by
D mean_j(w_j^2 s_j^2) / s_k^2, and an output by the sum of that times x_k^2: least at s_k = sqrt(rms(x_k) / rms(w_k)), by the
inequality of Cauchy and Schwarz. So both are searched: s = rms(x)^a / rms(w)^b, a = b = 1/2 being the answer of theory.
docs/awq.md has the method, and what was measured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.awq import SMALLEST_SCALE, check_free, write_awq
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.scales import scale_shape
from pqweights.checkpoint.source import open_local
from pqweights.codecs import Codec, get_codec
from pqweights.errors import EvaluationError, SourceError
from pqweights.evaluate.folders import read_folder
from pqweights.evaluate.packages import package, quiet
from pqweights.evaluate.texts import tokenize
from pqweights.kernels import BLOCK_SIZE
from pqweights.plan import QUANTIZE, TensorPlan
from pqweights.quantize import Quantize
from pqweights.recipe import Recipe
from pqweights.weight import encode_weight

if TYPE_CHECKING:
    from pqweights.integrations.activations import Activations, Inputs
    from pqweights.integrations.activations import Found as Where

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int, str], None]  # done, in all, what

# Rows of inputs that are kept for each matrix, for the search and for the check: at most, and at least.
MOST_ROWS, FEWEST_ROWS = (768, 384), (64, 32)
# Tokens that are read together, unless the model takes fewer.
WINDOW = 512
# What all rows together may take on the disk.
SAMPLE_BYTES = 8_000_000_000
# Rows of a weight that the search looks at; the check looks at all.
SEARCHED_ROWS = 512
# A smaller share of the error is not worth the bytes of the scales, and may be chance.
SMALLEST_GAIN = 0.01
CHECKED_WEIGHTS = 1 << 22
LARGEST_SCALE = 2.0**15


@dataclass(frozen=True)
class Found:
    """What the search says of one weight, or of one expert of a stack.

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


@dataclass(frozen=True)
class LayerReport:
    """One weight of the plan. matrices: one entry, or one for each expert."""

    name: str
    codec: str
    bits: int
    matrices: tuple[Found, ...]

    @property
    def scaled(self) -> bool:
        """Whether any of it is."""
        return any(found.scaled for found in self.matrices)

    def to_json(self) -> dict[str, Any]:
        """As in the metadata of the file."""
        return {
            "codec": self.codec, "bits": self.bits, "scaled": self.scaled, "matrices": [vars(m) for m in self.matrices],
        }  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """The whole run. tokens, held_back_tokens: of the text. bits_per_weight: what all scales add to the quantized weights."""

    tokens: int
    held_back_tokens: int
    layers: tuple[LayerReport, ...]
    bits_per_weight: float

    def to_json(self) -> dict[str, Any]:
        """calibrate --json."""
        return {
            "tokens": self.tokens,
            "held_back_tokens": self.held_back_tokens,
            "bits_per_weight": self.bits_per_weight,
            "weights": {layer.name: layer.to_json() for layer in self.layers},
        }


def calibrate(
    source: Path,
    out: Path,
    text: str,
    recipe: Recipe,
    *,
    max_tokens: int = 16384,
    window: int | None = None,
    tokenizer: Path | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    threads: int,
    overwrite: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Calibration:
    """Run a checkpoint over a text, search scales for every weight that the recipe quantizes, and write them to a file.

    window: tokens that are read together, by default the smaller of 512 and what the model can take. Raises SourceError,
    RecipeError, OutputError, MissingDependencyError.
    """
    checkpoint = open_local(source)
    if checkpoint.is_master:
        raise SourceError(f"{source}: expected an original checkpoint, found a master; calibrate what it was made from")
    planned = [t for t in Quantize(recipe).plan(checkpoint) if t.action == QUANTIZE]
    check_free(out, overwrite)
    ids = tokenize(tokenizer or source, text)[:max_tokens]
    context = read_folder(source).context
    size = window or min(WINDOW, context or WINDOW)
    if context is not None and size > context:
        raise EvaluationError(f"--window: expected at most the {context} tokens that the model takes, found {size}")
    windows = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if len(windows) < 2:
        raise EvaluationError(
            f"the text: expected at least {2 * size} tokens, two windows of {size}, found {len(ids)}; give a longer one, or a "
            "smaller --window"
        )
    held_back = [number % 8 in _held_back_places(len(windows)) for number in range(len(windows))]
    package("transformers", "transformers", "running the model")
    from pqweights.integrations.activations import places, watch
    from pqweights.integrations.transformers import load_model

    with quiet():
        model = load_model(source, dtype=dtype, device_map=device_map, experts_implementation="eager")
    where = places(model, [tensor.name for tensor in planned])
    with watch(
        model, windows, held_back, _rows(planned), out.parent, lambda done, total: progress(done, total, "running the model")
    ) as activations:  # fmt: skip
        del model
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        found: list[tuple[LayerReport, Floats | None]] = []
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(_search_layer, t, tensors[t.name], where.get(t.name), activations) for t in planned]
            for number, job in enumerate(jobs):
                found.append(job.result())
                progress(number + 1, len(jobs), planned[number].name)
    layers = tuple(layer for layer, _ in found)
    scales = {layer.name: values for layer, values in found if values is not None}
    read, back = size * held_back.count(False), size * held_back.count(True)
    about = {
        "recipe": recipe.to_json(),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": read,
        "held_back_tokens": back,
        "window": size,
    }
    write_awq(out, checkpoint.fingerprint(), about, {layer.name: layer.to_json() for layer in layers}, scales)
    weights = sum(tensor.weights for tensor in planned)
    added = 16 * sum(values.size for values in scales.values())
    return Calibration(read, back, layers, added / weights if weights else 0.0)


def _held_back_places(windows: int) -> tuple[int, ...]:
    """Which of each eight windows are held back: spread over the text; of few windows, the last."""
    return (3, 7) if windows >= 8 else (windows - 1,)


def _rows(planned: Sequence[TensorPlan]) -> tuple[int, int]:
    """How many rows are kept for each matrix, so that all of them fit into SAMPLE_BYTES."""
    channels = sum(math.prod(scale_shape(tensor.shape)) for tensor in planned if len(tensor.shape) >= 2)
    share = min(1.0, SAMPLE_BYTES / (4 * max(channels, 1) * sum(MOST_ROWS)))
    rows = [max(fewest, int(most * share)) for most, fewest in zip(MOST_ROWS, FEWEST_ROWS, strict=True)]
    return rows[0], rows[1]


# The search, of one weight at a time.


def _search_layer(
    planned: TensorPlan, tensor: LogicalTensor, where: Where | None, activations: Activations
) -> tuple[LayerReport, Floats | None]:
    """The report, and the scales [..., K] where there are any."""
    assert planned.codec is not None and planned.bits is not None
    codec, bits, shape = get_codec(planned.codec), planned.bits, planned.shape
    if len(shape) not in (2, 3):
        return _nothing(planned, f"{len(shape)} dimensions, not a matrix or a stack of matrices")
    if where is None:
        return _nothing(planned, "transformers does not load it")
    place, transposed = where
    matrices = shape[0] if len(shape) == 3 else 1
    scales = np.ones((matrices, shape[-1]), dtype=np.float32)
    reports = []
    for number in range(matrices):
        # A stack in the file is a stack in the model; an expert of its own is one matrix of such a stack.
        of_matrix = activations.inputs((place[0], number if len(shape) == 3 else place[1]))
        weight = _Matrix(tensor, number, shape[-2], shape[-1])
        report, best = _search(codec, bits, weight, of_matrix, transposed)
        reports.append(report)
        if best is not None:
            scales[number] = best
    layer = LayerReport(planned.name, codec.name, bits, tuple(reports))
    return layer, scales.reshape(scale_shape(shape)) if layer.scaled else None


def _nothing(planned: TensorPlan, reason: str) -> tuple[LayerReport, None]:
    assert planned.codec is not None and planned.bits is not None
    return LayerReport(planned.name, planned.codec, planned.bits, (Found(False, reason, 0),)), None


@dataclass(frozen=True)
class _Matrix:
    """[N, K], the number-th of a tensor."""

    tensor: LogicalTensor
    number: int
    rows: int
    columns: int

    def read(self, first: int, count: int) -> Floats:
        """Rows [first, first + count)."""
        raw = np.empty(count * self.columns * 4, dtype=np.uint8)
        start = (self.number * self.rows + first) * self.columns
        self.tensor.read(start, count * self.columns, "F32", raw)
        return raw.view(np.float32).reshape(count, self.columns)

    @property
    def step(self) -> int:
        """Rows that whole blocks fill."""
        return BLOCK_SIZE // math.gcd(self.columns, BLOCK_SIZE)

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


def _search(
    codec: Codec, bits: int, weight: _Matrix, inputs: Inputs | None, transposed: bool = False
) -> tuple[Found, Floats | None]:
    """The scales of one matrix, [K] float16 values as f32; None where it keeps scale 1."""
    if inputs is None:
        return Found(False, "no activations entered it", 0), None
    if len(inputs.rows) < FEWEST_ROWS[0] or len(inputs.held_back) < FEWEST_ROWS[1]:
        few = f"{len(inputs.rows)} and, held back, {len(inputs.held_back)} tokens entered it"
        return Found(False, f"expected at least {FEWEST_ROWS[0]} and {FEWEST_ROWS[1]}, {few}", inputs.tokens), None
    if inputs.along_rows == transposed or len(inputs.rms) != weight.columns:
        return Found(
            False, "its blocks run along the outputs, and take up whatever scale an input has", inputs.tokens
        ), None
    sample = weight.sample()
    of_inputs, of_weights = _logarithms(inputs.rms), _logarithms(np.sqrt((sample.astype(np.float64) ** 2).mean(axis=0)))

    def scales(a: float, b: float) -> Floats:
        return _as_stored(a * of_inputs - b * of_weights)

    def error(a: float, b: float) -> float:
        return output_error(codec, bits, sample, scales(a, b), inputs.rows)

    plain = error(0.0, 0.0)
    if plain == 0.0:
        return Found(False, "its outputs have no error", inputs.tokens), None
    (a, b), least = _least(error, plain)
    gain = 1 - least / plain
    if gain < SMALLEST_GAIN:
        return Found(False, f"no scale gains {SMALLEST_GAIN:.0%}", inputs.tokens, gain=gain), None
    best = scales(a, b)
    ones = np.ones_like(best)
    before = after = 0.0
    for piece in weight.pieces():
        before += output_error(codec, bits, piece, ones, inputs.held_back)
        after += output_error(codec, bits, piece, best, inputs.held_back)
    held_back_gain = 1 - after / before if before else 0.0
    scaled = held_back_gain >= SMALLEST_GAIN
    reason = "" if scaled else f"gains less than {SMALLEST_GAIN:.0%} on the text held back"
    return Found(scaled, reason, inputs.tokens, a, b, gain, held_back_gain), best if scaled else None


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


def output_error(codec: Codec, bits: int, weight: Floats, scales: Floats, inputs: Floats) -> float:
    """||(W' - W) X^T||^2 / rows of X, W' being what W * scales [N, K] is decoded to, over scales; inputs X: [rows, K]."""
    scaled = np.ascontiguousarray(weight * scales)
    encoded, _ = encode_weight(scaled.view(np.uint8).reshape(-1), "F32", scaled.shape, codec, bits)
    difference = encoded.decode().view(np.float32).reshape(weight.shape) / scales - weight
    outputs = difference @ inputs.T
    return float(np.einsum("ij,ij->", outputs, outputs, dtype=np.float64)) / len(inputs)


def _logarithms(rms: npt.NDArray[Any]) -> Floats:
    """Of each channel's size, around 0; channels that are all but silent count as a ten-thousandth of the mean."""
    floor = max(1e-4 * float(rms.mean()), 1e-30)
    logarithms = np.log(np.maximum(rms, floor))
    result: Floats = (logarithms - logarithms.mean()).astype(np.float32)
    return result


def _as_stored(logarithms: Floats) -> Floats:
    """e to their power, as float16 holds it."""
    exact = np.clip(np.exp(logarithms), SMALLEST_SCALE, LARGEST_SCALE)
    return exact.astype(np.float16).astype(np.float32)
