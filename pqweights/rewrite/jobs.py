"""The work on one tensor, cut into chunks of whole blocks that run in any thread and are collected in order.

`Job` is the interface that shard.py knows. `CopyJob` stores a tensor as it is or in another dtype; the job that
encodes a weight is in encode_job.py.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor, whole_blocks
from pqweights.common.dtypes import DTYPE_BITS
from pqweights.planning.plan import TensorPlan
from pqweights.rewrite.records import TensorRecord

# 2**20 weights are 2 MiB of BF16: few enough for the caches, and enough that the cost of a chunk does not show.
CHUNK_WEIGHTS = 1 << 20
COPY_MARGIN = 1 << 12


class Sink(Protocol):
    """Where a job's output goes."""

    def memory(self, purpose: str, stored_name: str, offset: int, byte_count: int) -> npt.NDArray[np.uint8]:
        """Return memory from which `write` of the same place makes no copy, contents undefined.

        It is valid until the thread asks for the same purpose again.
        """
        ...

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write data at `offset` bytes from the start of a stored tensor, in any order and from any thread.

        Each byte is written once. The caller may change `data` afterwards.
        """
        ...


class Job(Protocol):
    """One pass over one tensor."""

    @property
    def chunks(self) -> int:
        """The number of chunks; 0 for an empty tensor."""
        ...

    def run(self, chunk: int, sink: Sink) -> Any:
        """Read, transform and write one chunk. Called once for each chunk, in any thread."""
        ...

    def collect(self, result: Any) -> None:
        """Take what `run` returned. Called in the order of the chunks, in one thread."""
        ...

    def finish(self, sink: Sink) -> TensorRecord | Job:
        """Write what is still to be written, and return what was measured, or the next pass over the tensor.

        The record has no digests yet: whoever owns the sink adds them.
        """
        ...


class CopyJob:
    """The job that stores a tensor plainly, in the dtype that the plan gives it."""

    def __init__(self, planned: TensorPlan, tensor: LogicalTensor) -> None:
        (self._spec,) = planned.stored
        self._tensor = tensor
        self._weights = math.prod(self._spec.shape)
        self._chunk_weights = whole_blocks(tensor, CHUNK_WEIGHTS)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self._weights // self._chunk_weights)

    def run(self, chunk: int, sink: Sink) -> None:
        """Copy one chunk."""
        start = chunk * self._chunk_weights
        count = min(self._chunk_weights, self._weights - start)
        bits = DTYPE_BITS[self._spec.dtype]
        offset, byte_count = start * bits // 8, count * bits // 8
        # A few more bytes than needed, in which encoded tensors can decode whole blocks.
        buffer = sink.memory("copied", self._spec.name, offset, byte_count + COPY_MARGIN)
        self._tensor.read(start, count, self._spec.dtype, buffer)
        sink.write(self._spec.name, offset, buffer[:byte_count])

    def collect(self, result: None) -> None:
        """Do nothing: a copy has no errors."""

    def finish(self, sink: Sink) -> TensorRecord:
        """Return a record without measures."""
        return TensorRecord(name=self._spec.name)
