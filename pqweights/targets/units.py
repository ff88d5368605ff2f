"""The unit of the scales of a weight: the first pass over weights whose scales are small floats times a number.

Runtimes compute with fused layers as with one weight, so those that are fused get one unit, from the largest of all
their weights. Each of them reads the others for it: that needs neither a pass over the whole model nor anything that
workers would have to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor, element_count, whole_blocks
from pqweights.checkpoint.shard_file import ShardFile
from pqweights.checkpoint.views import ReadTogether
from pqweights.convert import jobs
from pqweights.convert.jobs import Job
from pqweights.formats.packing import PackedFormat
from pqweights.kernels.groups import FloatRule
from pqweights.kernels.workers import scratch

# The scale of the largest weight, in units: the largest of E4M3. Less would leave that one group room for a scale that
# is one and a half times as large (Four over Six, arXiv:2512.02010), but all others less of the range: with 256 the
# squared error of two small language models is 0.3 % less, and their divergence 1 to 3 % more.
LARGEST_SCALE = 448
# The largest weight in units: NVFP4 has codes up to 6 in E2M1, and FP8 with one scale those of E4M3 alone.
LARGEST_WEIGHTS = {"nvfp4": LARGEST_SCALE * 6, "fp8-tensor": 448}


def fused_weights(
    tensors: Sequence[LogicalTensor], decisions: Mapping[str, PackedFormat | str]
) -> dict[str, tuple[LogicalTensor, ...]]:
    """Return for each weight that needs a unit all weights that share it, itself included, by name."""
    layers: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors:
        decision = decisions.get(tensor.name)
        if isinstance(decision, PackedFormat) and decision.unit_of is not None:
            layers.setdefault(decision.unit_of, []).append(tensor)
    return {tensor.name: tuple(layer) for layer in layers.values() for tensor in layer}


def reading_together(
    tensors: Sequence[LogicalTensor], fused: Mapping[str, tuple[LogicalTensor, ...]]
) -> tuple[LogicalTensor, ...]:
    """Return tensors of which those that share a unit also name the stored parts of the others, which are read, too."""
    return tuple(
        ReadTogether(tensor, tuple(part for other in fused[tensor.name] for part in other.parts))
        if len(fused.get(tensor.name, ())) > 1
        else tensor
        for tensor in tensors
    )


def with_unit(rounding: PackedFormat, largest: float) -> PackedFormat:
    """Return how weights are rounded of which the largest has this magnitude."""
    assert isinstance(rounding.rule, FloatRule)
    # What files of NVFP4 hold is the inverse, in float32.
    with np.errstate(all="ignore"):
        inverse = np.float32(LARGEST_WEIGHTS[rounding.rule.kind]) / np.float32(largest)
        unit = float(np.float32(1) / inverse)
    # Without weights other than 0 any unit will do; what is not finite is refused when it is rounded.
    return of_unit(rounding, unit if 0 < unit < np.inf else 1.0)


def of_unit(rounding: PackedFormat, unit: float) -> PackedFormat:
    """Return how weights are rounded that have a unit already."""
    assert isinstance(rounding.rule, FloatRule)
    return replace(rounding, rule=replace(rounding.rule, unit=unit))


class UnitJob:
    """The pass that looks for the largest magnitude of some weights."""

    reads = None

    def __init__(self, tensors: Sequence[LogicalTensor], then: Callable[[float], Job]) -> None:
        """Prepare the pass. then: returns the next one, given that magnitude"""
        self._then, self._largest = then, 0.0
        self._ranges = [
            (tensor, start, min(step, element_count(tensor) - start))
            for tensor in tensors
            for step in [whole_blocks(tensor, jobs.CHUNK_WEIGHTS)]
            for start in range(0, element_count(tensor), step)
        ]
        self.chunks = len(self._ranges)

    def read(self, chunk: int, file: ShardFile) -> npt.NDArray[np.float32]:
        """Read one chunk as float32."""
        tensor, start, count = self._ranges[chunk]
        raw = scratch("values", count * 4)
        tensor.read(start, count, "F32", raw)
        return raw.view(np.float32)

    def write(self, chunk: int, values: npt.NDArray[np.float32], file: ShardFile) -> float:
        """Return the largest magnitude of one chunk."""
        return float(max(values.max(), -values.min()))

    def collect(self, result: float) -> None:
        """Take what is larger; a NaN is refused by the next pass."""
        self._largest = max(self._largest, result)

    def finish(self) -> Job:
        """Return the next pass."""
        return self._then(self._largest)
