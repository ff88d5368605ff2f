"""The work on one tensor, cut into chunks of whole blocks that run in any thread and are collected in order.

`Job` is the interface that shard.py knows. `CopyJob` stores a tensor as it is or in another dtype. `EncodeJob` encodes
a weight, in one or more passes over its chunks, until its format asks for none.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from pqweights.checkpoint.gguf.views import reading_of
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.names import awq_name
from pqweights.checkpoint.readers import LogicalTensor, element_count, multiply_scales, whole_blocks
from pqweights.checkpoint.shard_file import ShardFile
from pqweights.checkpoint.source import find_non_finite
from pqweights.common.dtypes import DTYPE_BITS, item_bytes, to_float32
from pqweights.common.strict_json import rounded
from pqweights.convert.records import TensorRecord
from pqweights.errors import SourceError
from pqweights.formats.master import VALUE_DTYPES, BlockFormat, Bytes, Part, Pass
from pqweights.formats.weight import block_count, encode_chunk
from pqweights.kernels import Measures
from pqweights.kernels.workers import scratch
from pqweights.planning.layout import TensorPlan, block_format_of

# 2**20 weights are 2 MiB of BF16: few enough for the caches, and enough that the cost of a chunk does not show.
CHUNK_WEIGHTS = 1 << 20
COPY_MARGIN = 1 << 12


class Job(Protocol):
    """One pass over one tensor."""

    @property
    def chunks(self) -> int:
        """The number of chunks; 0 for an empty tensor."""
        ...

    @property
    def reads(self) -> object:
        """What jobs have in common that read the same chunks of the same tensor; None for one that reads alone."""
        ...

    def read(self, chunk: int, file: ShardFile) -> Any:
        """Return the values of one chunk, valid until the thread reads the next one. Called in any thread."""
        ...

    def write(self, chunk: int, values: Any, file: ShardFile) -> Any:
        """Transform and write one chunk, given its values, which it does not change. Called in the same thread."""
        ...

    def collect(self, result: Any) -> None:
        """Take what `write` returned. Called in the order of the chunks, in one thread at a time."""
        ...

    def finish(self) -> TensorRecord | Job:
        """Return what was measured, without the digests, or the next pass over the tensor."""
        ...


class CopyJob:
    """The job that stores a tensor plainly, in the dtype that the plan gives it, or several that are stored already."""

    def __init__(self, planned: TensorPlan, *tensors: LogicalTensor, record: TensorRecord | None = None) -> None:
        """Prepare the job.

        tensors: what each stored tensor of the plan is read from
        record: what is known of the tensor; by default nothing
        """
        self._record = TensorRecord(name=planned.name) if record is None else record
        self._ranges = [
            (spec, tensor, start, min(step, weights - start))
            for spec, tensor in zip(planned.stored, tensors, strict=True)
            for weights, step in [(math.prod(spec.shape), whole_blocks(tensor, CHUNK_WEIGHTS))]
            for start in range(0, weights, step)
        ]
        self.chunks = len(self._ranges)
        sources = zip(planned.stored, tensors, strict=True)
        self.reads: object = tuple((reading_of(tensor), spec.dtype, spec.shape) for spec, tensor in sources)

    def read(self, chunk: int, file: ShardFile) -> Bytes:
        """Read one chunk into memory from which it is written."""
        spec, tensor, start, count = self._ranges[chunk]
        bits = DTYPE_BITS[spec.dtype]
        byte_count = count * bits // 8
        # A few more bytes than needed, in which encoded tensors can decode whole blocks.
        buffer = file.memory("copied", spec.name, start * bits // 8, byte_count + COPY_MARGIN)
        tensor.read(start, count, spec.dtype, buffer)
        if spec.dtype != tensor.plain_dtype and (spec.dtype == "F16" or tensor.plain_dtype == "F64"):
            _check_range(tensor, start, buffer[:byte_count], spec)
        return buffer[:byte_count]

    def write(self, chunk: int, values: Bytes, file: ShardFile) -> None:
        """Write one chunk."""
        spec, _, start, _ = self._ranges[chunk]
        file.write(spec.name, start * DTYPE_BITS[spec.dtype] // 8, values)

    def collect(self, result: None) -> None:
        """Do nothing: a copy has no errors."""

    def finish(self) -> TensorRecord:
        """Return the record."""
        return self._record


def _check_range(tensor: LogicalTensor, start: int, stored: Bytes, spec: TensorSpec) -> None:
    """Raise SourceError if an element is infinite as it is stored and finite in its tensor. start: of the first"""
    infinite = np.flatnonzero(np.isinf(to_float32(stored, spec.dtype)))
    if infinite.size == 0:
        return
    count = int(infinite[-1]) + 1
    values = np.empty(count * item_bytes("F64"), dtype=np.uint8)
    tensor.read(start, count, "F64", values)
    too_large = next((value for value in values.view(np.float64)[infinite].tolist() if math.isfinite(value)), None)
    if too_large is not None:
        raise SourceError(
            f"tensor {spec.name!r}: expected numbers in the range of {spec.dtype}, found {too_large:g}; store it in a "
            "type with a wider range, such as BF16 or F32"
        )


class EncodeJob:
    """One pass over one weight."""

    reads = None

    def __init__(
        self,
        planned: TensorPlan,
        tensor: LogicalTensor,
        *,
        awq: Bytes | None = None,
        effort: int | None = None,
        format: BlockFormat | None = None,
        passes: tuple[Pass, ...] = (),
    ) -> None:
        """Prepare a pass.

        tensor: where the values are read from
        awq: the scales [..., K] of its input channels, as bytes of float16; None if it is not scaled
        effort: the effort of its codec; None for the default
        format: that of the pass, by default the first
        passes: the earlier ones
        """
        self._planned, self._tensor, self._awq = planned, tensor, awq
        self._format = block_format_of(planned, effort) if format is None else format
        self._passes = (*passes, Pass(self._format))
        self._dtype = _exact_dtype(tensor, is_scaled=awq is not None)
        self._factors = None if awq is None else to_float32(awq, "F16")
        self._weights = element_count(tensor)
        block_size = self._format.block_size
        self._chunk_weights = max(1, CHUNK_WEIGHTS // block_size) * block_size
        self.chunks = -(-self._weights // self._chunk_weights)

    def read(self, chunk: int, file: ShardFile) -> Bytes:
        """Read one chunk, scaled if the weight is; the padding to whole blocks is undefined."""
        start, count = self._range(chunk)
        whole = block_count(count, self._format.block_size) * self._format.block_size
        values = scratch("weights", whole * item_bytes(self._dtype))
        self._tensor.read(start, count, self._dtype, values)
        if self._factors is not None:
            with np.errstate(over="ignore"):  # the encoder reports infinities
                numbers = values.view(np.float32)[:count]
                multiply_scales(numbers, self._factors, start=start, shape=self._planned.shape)
        return values

    def _range(self, chunk: int) -> tuple[int, int]:
        """Return the first weight of a chunk, and how many it has."""
        start = chunk * self._chunk_weights
        return start, min(self._chunk_weights, self._weights - start)

    def write(self, chunk: int, values: Bytes, file: ShardFile) -> Measures:
        """Encode one chunk, and write its parts.

        Raises SourceError if a weight is not finite.
        """
        start, count = self._range(chunk)
        if chunk == 0 and self._awq is not None:
            file.write(awq_name(self._planned.name), 0, self._awq)
        first_block = start // self._format.block_size
        blocks = block_count(count, self._format.block_size)
        parts = tuple(self._memory(part, file, first_block, blocks) for part in self._format.parts)
        measures = encode_chunk(self._format, values, count, dtype=self._dtype, parts=parts)
        if measures.first_bad_block >= 0:
            self._refuse_non_finite(start, count)
        for part, data in zip(self._format.parts, parts, strict=True):
            file.write(self._planned.name + part.suffix, first_block * part.bytes_per_block, data.reshape(-1))
        return measures

    def _memory(self, part: Part, file: ShardFile, first_block: int, blocks: int) -> Bytes:
        """Return memory for a part of some blocks: [blocks, bytes per block]."""
        offset, byte_count = first_block * part.bytes_per_block, blocks * part.bytes_per_block
        memory = file.memory(f"encoded{part.suffix}", self._planned.name + part.suffix, offset, byte_count)
        return memory.reshape(blocks, part.bytes_per_block)

    def _refuse_non_finite(self, start: int, count: int) -> None:
        """Raise SourceError with the place of the first element of a chunk that is not finite."""
        at = find_non_finite(self._tensor, start, count)
        if at < 0:
            raise SourceError(
                f"tensor {self._tensor.name!r}: multiplied by the scales of its input channels, it leaves the range of "
                "float32; quantize it without `awq`, or keep it with a rule"
            )
        place = [int(i) for i in np.unravel_index(at, self._tensor.shape)]
        raise SourceError(
            f"{self._tensor.parts[0].file}: tensor {self._tensor.name!r}: expected finite weights, found a NaN or an "
            f"infinity at {place}; keep the tensor with a rule (name: {self._tensor.name!r}, keep: true) or repair the "
            "checkpoint"
        )

    def collect(self, result: Measures) -> None:
        """Add up what was measured of a chunk."""
        self._passes[-1].add(result)

    def finish(self) -> TensorRecord | Job:
        """Return the record of the weight, or another pass if the format asks for one."""
        following = self._format.after(self._passes)
        if following is not None:
            return EncodeJob(self._planned, self._tensor, awq=self._awq, format=following, passes=self._passes)
        last = self._passes[-1]
        return TensorRecord(
            name=self._planned.name,
            state=last.format.stated(),
            relative_mse=rounded(last.relative_mse),
            energy=rounded(last.energy),
        )


def _exact_dtype(tensor: LogicalTensor, *, is_scaled: bool) -> str:
    """Return the dtype in which a weight is read and handed to the encoder: its own, if that holds the values."""
    is_exact = tensor.dtype in VALUE_DTYPES or tensor.dtype == "MXFP4"
    return tensor.plain_dtype if is_exact and not is_scaled else "F32"
