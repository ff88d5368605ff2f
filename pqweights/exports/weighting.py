"""The job that rounds one weight with errors weighed by how large its inputs are: an importance for each column.

The importances are the mean squares of calibration inputs, the diagonal of their second moments: what llama.cpp calls
an importance matrix.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.exports.compensation import Compensation
from pqweights.exports.integer_job import IntegerJob, MatrixJob
from pqweights.exports.integers import WeightedRule
from pqweights.kernels.groups import Groups
from pqweights.rewrite.jobs import Job, Sink
from pqweights.rewrite.records import TensorRecord


class WeightedJob(MatrixJob):
    """The job that rounds one weight with weighed errors, where its inputs are known."""

    def __init__(self, job: IntegerJob, compensation: Compensation, sources: tuple[int | str, ...]) -> None:
        """Take over the job of a weight. sources: see Compensation."""
        super().__init__(job, matrices=len(sources), row_multiple=1)
        self._compensation, self._sources = compensation, sources

    def _round(self, chunk: int, values: npt.NDArray[np.float32]) -> tuple[Groups, Any]:
        """Round rows of one matrix with weighed errors, if its inputs are known."""
        matrix, rule = chunk // self._per_matrix, self._rounding.rule
        vector = self._sources[matrix]
        if isinstance(vector, str):
            return super()._round(chunk, values)
        assert isinstance(rule, WeightedRule)
        return rule.quantize_weighted(values, self._compensation.importance(self._tensor, matrix, vector)), None

    def finish(self, sink: Sink) -> TensorRecord | Job:
        """Return the record, which says what was weighed."""
        record = super().finish(sink)
        assert isinstance(record, TensorRecord)
        reasons = Counter(each for each in self._sources if isinstance(each, str))
        weighed = sum(not isinstance(each, str) for each in self._sources)
        account = {"matrices": len(self._sources), "weighed": weighed, "rounded_plainly": dict(sorted(reasons.items()))}
        return replace(record, rounding=account)
