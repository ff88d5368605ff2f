"""The search for the scales of one weight: of one matrix, or of each in a stack of experts."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.scales import scale_shape
from pqweights.codecs import CODECS
from pqweights.planning.plan import TensorPlan, coder_of
from pqweights.planning.statistics_file import WeightInputs
from pqweights.quality.measure.scale_search import Matrix, SearchResult, search

if TYPE_CHECKING:
    from pqweights.quality.measure.inputs import VectorInputs

Floats = npt.NDArray[np.float32]


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
        """Return the entry of the weight in the metadata of the file."""
        return {
            "codec": self.codec,
            "bits": self.bits,
            "scaled": self.scaled,
            "matrices": [vars(matrix) for matrix in self.matrices],
        }


def search_layer(
    planned: TensorPlan,
    tensor: LogicalTensor,
    *,
    reads: WeightInputs | None,
    collected: Mapping[int, VectorInputs],
) -> tuple[LayerReport, Floats | None]:
    """Search one weight; return its report, and its scales [..., K] or None.

    reads: what its matrices read; None if the model was not seen to multiply by them
    """
    coder, shape = coder_of(planned), planned.shape

    def report(*results: SearchResult) -> LayerReport:
        return LayerReport(name=planned.name, codec=coder.codec, bits=coder.bits, matrices=results)

    if len(shape) not in (2, 3) or not planned.weights:
        reason = f"expected a matrix or a stack of them, found shape {list(shape)}"
        return report(SearchResult(scaled=False, reason=reason, tokens=0)), None
    count = math.prod(shape[:-2])
    vectors = (None,) * count if reads is None else reads.vectors
    results, scales = [], np.ones((count, shape[-1]), dtype=np.float32)
    for number, vector in enumerate(vectors):
        weight = Matrix(
            tensor=tensor,
            number=number,
            rows=shape[-2],
            columns=shape[-1],
            block_size=CODECS[coder.codec].block_size,
        )
        inputs = None if vector is None else collected[vector].inputs()
        result, best = search(coder, weight, inputs, transposed=reads is not None and reads.transposed)
        results.append(result)
        if best is not None:
            scales[number] = best
    layer = report(*results)
    return layer, scales.reshape(scale_shape(shape)) if layer.scaled else None


def layer_to_record(layer: LayerReport, scales: Floats | None) -> dict[str, Any]:
    """Return what was found for one weight as JSON. Scales are float16 numbers."""
    stored = None
    if scales is not None:
        stored = {"shape": scales.shape, "float16": base64.b64encode(scales.astype("<f2").tobytes()).decode()}
    return {**layer.to_json(), "scales": stored}


def layer_from_record(name: str, record: Mapping[str, Any]) -> tuple[LayerReport, Floats | None]:
    """Return what the record of a weight says: its report, and its scales [..., K]."""
    matrices = tuple(SearchResult(**matrix) for matrix in record["matrices"])
    layer = LayerReport(name=name, codec=record["codec"], bits=record["bits"], matrices=matrices)
    stored = record["scales"]
    if stored is None:
        return layer, None
    values = np.frombuffer(base64.b64decode(stored["float16"]), dtype="<f2").astype(np.float32)
    return layer, values.reshape(stored["shape"])
