"""Rounding with a view to the inputs of a weight: which inputs each matrix has, their factors, and the jobs.

Compensated rounding chooses codes by second moments of the inputs (kernels/compensation.py); weighted rounding by their
diagonal, an importance for each column, which llama.cpp calls an importance matrix. A row of a weight keeps its
compensated codes only if they err less than plain ones on the rows of inputs that were held back, so no layer errs more
on those. docs/exports.md has the rules.
"""

from __future__ import annotations

import abc
import math
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import View
from pqweights.common.strict_json import rounded
from pqweights.common.threads import ProcessLock
from pqweights.convert.jobs import Job
from pqweights.convert.records import TensorRecord
from pqweights.formats.packing import RoundingRule
from pqweights.kernels import Doubles, load_backend
from pqweights.kernels.compensation import (
    MomentsFactor,
    compensate,
    empty_matrix,
    errors_of,
    factorize,
    order_of,
    output_errors,
    trial_error,
)
from pqweights.kernels.gguf_encoding import BlockRule
from pqweights.kernels.groups import TILE, FloatRule, GroupRule, Groups, merged, normalized_importance
from pqweights.planning.inputs import KnownInputs, importance_of, read_by
from pqweights.targets.integers import IntegerJob
from pqweights.targets.target import GPTQ, IMPORTANCE

Floats = npt.NDArray[np.float32]

# The fewest tokens of inputs for compensation; and the fewest rows held back, and windows that those come from.
FEWEST_TOKENS, FEWEST_HELD_BACK, FEWEST_WINDOWS = 256, 128, 4
# Shares of the mean of the diagonal that are added to it, in the order in which they are tried.
DAMPINGS = (0.1, 0.01, 1.0)
# Factors that are kept for the matrices that come next.
KEPT_FACTORS = 2


class ReadyFactor(NamedTuple):
    """A factor with the rows held back of its inputs, [rows, K] in its order, and the damping that was chosen."""

    factor: MomentsFactor
    held_back: Floats
    damping: float


@dataclass(frozen=True, eq=False)
class Compensation:
    """What an export knows of the inputs of its weights.

    inputs: what is known of them
    rounded: the weights, each with its rule
    rounding: how codes are chosen, GPTQ or IMPORTANCE
    """

    inputs: KnownInputs
    rounded: Sequence[tuple[LogicalTensor, RoundingRule]]
    rounding: str
    _kept: deque[tuple[int, ReadyFactor | None]] = field(default_factory=lambda: deque(maxlen=KEPT_FACTORS))
    _making: ProcessLock = field(default_factory=ProcessLock)

    @property
    def memory_bytes(self) -> int:
        """The memory that the largest factors take, float32 [K, K], with the moments of a layer; importances take none.

        Weights of one module with as many inputs count as reading the same, such as q, k and v.
        """
        if self.rounding == IMPORTANCE:
            return 0
        of_layers: dict[str, dict[tuple[str, int], int]] = {}
        for tensor, _ in self.rounded:
            module, size = tensor.name.removesuffix(".weight").rpartition(".")[0], tensor.shape[-1]
            layer = re.match(r".*?\.\d+\.|", tensor.name)
            squares = math.prod((*tensor.shape[:-2], size, size))
            of_layers.setdefault(layer[0] if layer else "", {})[module, size] = squares
        largest = max((tensor.shape[-1] ** 2 for tensor, _ in self.rounded), default=0)
        moments = max((sum(of.values()) for of in of_layers.values()), default=0)
        return 4 * (moments + (KEPT_FACTORS + 1) * largest)

    @cached_property
    def sources(self) -> dict[str, tuple[int | str, ...]]:
        """For each weight, by name, the vector of each of its matrices, or the reason why it is rounded plainly."""
        return {tensor.name: self._sources_of(tensor, rule) for tensor, rule in self.rounded}

    def _sources_of(self, tensor: LogicalTensor, rule: RoundingRule) -> tuple[int | str, ...]:
        count = math.prod(tensor.shape[:-2])
        if isinstance(rule, FloatRule) and rule.kind.startswith("fp8") and self.rounding == GPTQ:
            return ("its format has no compensated rounding",) * count
        if rule.rows > 1:
            return ("its scales are those of the largest weights of tiles",) * count
        return tuple(_source(tensor, number, self.inputs) for number in range(count))

    def factor(self, vector: int) -> ReadyFactor | None:
        """Return the factor of a vector, made by one thread at a time; None if it cannot be factorized."""
        with self._making:
            for known, ready in self._kept:
                if known == vector:
                    return ready
            if len(self._kept) == KEPT_FACTORS:
                self._kept.popleft()  # before the next is made: a matrix may take gigabytes
            made = _made(self.inputs, vector)
            self._kept.append((vector, made))
            return made


def job_of(rule: RoundingRule, rounding: str) -> type[IntegerJob]:
    """Return what rounds a weight by a rule with a view to its inputs; types that GPTQ does not round are weighed."""
    is_weighed = rounding == IMPORTANCE or (isinstance(rule, BlockRule) and not rule.is_compensated)
    return WeightedJob if is_weighed else CompensatedJob


def _made(inputs: KnownInputs, vector: int) -> ReadyFactor | None:
    """Factorize the moments of a vector, with the best damping for rounding what looks random."""
    moments, rows = inputs.moments(vector)
    diagonal = np.diagonal(moments)
    order = order_of(diagonal)
    matrix = empty_matrix(len(order))
    for row, channel in enumerate(order):
        matrix[row, : len(order)] = moments[channel, order]
    held_back = np.ascontiguousarray(rows[:, order])

    def with_damping(damping: float) -> MomentsFactor | None:
        damped = factorize(matrix, diagonal[order], damping)
        return None if damped is None else MomentsFactor(order=order, matrix=matrix, diagonal=damped)

    least, best, factor, last = np.inf, None, None, None
    for damping in DAMPINGS:
        factor, last = with_damping(damping), damping
        error = np.inf if factor is None else trial_error(factor, held_back)
        if error < least:
            least, best = error, damping
        if best == DAMPINGS[1]:  # where less damping helps, more does not
            break
    if best is None:
        return None
    if best != last or factor is None:
        factor = with_damping(best)
    return None if factor is None else ReadyFactor(factor, held_back, best)


def _source(tensor: LogicalTensor, number: int, inputs: KnownInputs) -> int | str:
    """Return the vector of one matrix, or why it is rounded plainly."""
    matrices = read_by(tensor, number)
    if matrices is None:
        return "its rows are not whole rows of other weights"
    transposed = isinstance(tensor, View) and tensor.transposed
    vectors = {_vector_of(name, matrix, inputs, transposed=transposed) for name, matrix in matrices}
    if len(vectors) != 1:
        reasons = sorted(vector for vector in vectors if isinstance(vector, str))
        return reasons[0] if reasons else "its rows have different inputs"
    (vector,) = vectors
    if isinstance(vector, str):
        return vector
    about = inputs.vectors[vector]
    if about.size != tensor.shape[-1]:
        return f"expected {tensor.shape[-1]} input channels, found {about.size}"
    if not about.windows:  # a file of importances, which has no more
        return vector
    if about.tokens < FEWEST_TOKENS or about.held_back < FEWEST_HELD_BACK or about.windows < FEWEST_WINDOWS:
        # Without what was found: the summary has a line for each reason.
        return f"fewer than {FEWEST_TOKENS} tokens, or {FEWEST_HELD_BACK} held back from {FEWEST_WINDOWS} windows"
    return vector


def _vector_of(name: str, matrix: int, inputs: KnownInputs, *, transposed: bool) -> int | str:
    known = inputs.weights.get(name)
    if known is None or matrix >= len(known.vectors):
        return "no product of inputs with it was seen"
    if known.transposed != transposed:
        return "its groups run along the outputs"
    vector = known.vectors[matrix]
    return "no product of inputs with it was seen" if vector is None else vector


class _InformedJob(IntegerJob, abc.ABC):
    """The job of a weight of which inputs are known: the manifest says what was rounded how, and what that gained."""

    def __init__(self, *arguments: Any, compensation: Compensation, **keywords: Any) -> None:
        """Prepare the job of one weight; see IntegerJob."""
        super().__init__(*arguments, **keywords)
        self._compensation, self._sources = compensation, compensation.sources[self._tensor.name]

    def finish(self) -> TensorRecord | Job:
        """Return the record, with how many matrices were rounded how, unless all codes are those of the source."""
        record = super().finish()
        assert isinstance(record, TensorRecord)
        if record.rounding is not None:
            return record
        reasons = Counter(source for source in self._sources if isinstance(source, str))
        summary = {"matrices": len(self._sources), **self._gains(reasons)}
        return replace(record, rounding=summary | {"rounded_plainly": dict(sorted(reasons.items()))})

    @abc.abstractmethod
    def _gains(self, reasons: Counter[str]) -> dict[str, Any]:
        """Return what the manifest says of the matrices that are not rounded plainly; may add reasons for others."""


class WeightedJob(_InformedJob):
    """The job that rounds one weight with errors weighed by the importance of inputs, where they are known."""

    row_multiple = TILE

    def _round(self, matrix: int, values: Floats) -> tuple[Groups, Any]:
        vector, rule = self._sources[matrix], self._rounding.rule
        if isinstance(vector, str):
            return super()._round(matrix, values)
        assert isinstance(rule, BlockRule | FloatRule | GroupRule)
        squares = importance_of(self._tensor, matrix, self._compensation.inputs)
        if isinstance(rule, FloatRule):  # where nothing counted, any scale would be as good
            normalized = normalized_importance(squares, self._columns)
            if normalized is None:
                return super()._round(matrix, values)
            squares = normalized
        return rule.quantize_weighted(values, squares), None

    def _gains(self, reasons: Counter[str]) -> dict[str, Any]:
        return {"weighed": len(self._sources) - reasons.total()}


class CompensatedJob(_InformedJob):
    """The job that rounds one weight with compensation, where it has inputs and gains from it."""

    row_multiple = TILE
    carries_groups = False  # other groups make up for the errors of those that are rounded

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Prepare the job of one weight; see IntegerJob."""
        super().__init__(*arguments, **keywords)
        self._outputs = np.zeros((self._matrices, 2))  # sums of errors, before and after
        self._plain_rows = 0
        self._dampings: dict[int, float | None] = {}  # by matrix

    def _round(self, matrix: int, values: Floats) -> tuple[Groups, Any]:
        """Round rows plainly (blocks: weighed) and with compensation; rows take what errs less on inputs held back.

        Also returns the matrix, the errors of the outputs on these inputs, rounded plainly and as stored, f64 [rows],
        how many rows are stored as rounded plainly, and the damping of the factor; None if there is none.
        """
        vector, rule = self._sources[matrix], self._rounding.rule
        if isinstance(vector, str):
            return super()._round(matrix, values)
        assert isinstance(rule, GroupRule | FloatRule | BlockRule)
        ready = self._compensation.factor(vector)
        if ready is None:
            return self._quantized(values), (matrix, np.empty(0), np.empty(0), 0, None)
        is_block = isinstance(rule, BlockRule)
        plain = rule.quantize_weighted(values, ready.factor.importance) if is_block else self._quantized(values)
        if not np.isfinite(plain.errors).all():
            return plain, None
        better, better_errors = compensate(values.reshape(-1, self._columns), plain, rule, ready.factor)
        plain_errors = errors_of(values.reshape(-1, self._columns), plain, rule, ready.factor)
        before, after = output_errors(plain_errors, ready.held_back), output_errors(better_errors, ready.held_back)
        worse = ~(after < before)
        groups = merged(better, plain, np.repeat(worse, self._columns // rule.group_size))
        return groups, (matrix, before, np.where(worse, before, after), int(worse.sum()), ready.damping)

    def collect(self, result: tuple[Doubles, Doubles, bool, Any]) -> None:
        """Add up the errors of outputs besides those of weights."""
        super().collect(result)
        if result[-1] is not None:
            matrix, plain, stored, plain_rows, damping = result[-1]
            load_backend().add_in_order(self._outputs[matrix], plain, stored)
            self._plain_rows += plain_rows
            self._dampings[matrix] = damping

    def _gains(self, reasons: Counter[str]) -> dict[str, Any]:
        dampings = [damping for damping in self._dampings.values() if damping is not None]
        if len(dampings) < len(self._dampings):
            reasons["its moments could not be factorized"] += len(self._dampings) - len(dampings)
        before, after = map(sum, self._outputs.T.tolist())
        return {
            "compensated": len(dampings),
            "rows_rounded_plainly": self._plain_rows,
            "dampings": sorted(set(dampings)),
            "gain": rounded(1 - after / before) if before else 0.0,
        }
