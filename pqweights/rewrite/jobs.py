"""The work on one tensor, cut into chunks of whole blocks that run in any thread and are collected in order.

`Job` is the interface that the stream knows. `CopyJob` stores a tensor as it is or in another dtype; the job that
encodes a weight is in encode_job.py.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.buffers import BufferPool
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.dtypes import DTYPE_BITS
from pqweights.planning.plan import TensorPlan
from pqweights.rewrite.manifest import TensorRecord

# 2**20 weights are 2 MiB of BF16: few enough for the caches, and enough that the cost of a chunk does not show.
CHUNK_WEIGHTS = 1 << 20

# Size of the buffer that holds a chunk's output from `run` to `collect`; 8 bytes hold a weight of any dtype.
OUTPUT_BYTES_PER_WEIGHT = 8


class Sink(Protocol):
    """Where a job's output goes."""

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write data at `offset` bytes from the start of a stored tensor, in any order and from any thread."""
        ...

    def sha256(self, stored_name: str) -> str:
        """Return the sha256 of a stored tensor, all of which must have been written."""
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

    def finish(self) -> TensorRecord | Job:
        """Return the record of the finished tensor, or the next pass over it."""
        ...


class CopyJob:
    """The job that stores a tensor plainly, in the dtype that the plan gives it."""

    def __init__(self, planned: TensorPlan, tensor: LogicalTensor, buffers: BufferPool) -> None:
        (self._spec,) = planned.stored
        self._tensor, self._buffers = tensor, buffers
        self._digest = hashlib.sha256()
        self._weights = math.prod(self._spec.shape)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self._weights // CHUNK_WEIGHTS)

    def run(self, chunk: int, sink: Sink) -> tuple[npt.NDArray[np.uint8], int]:
        """Copy one chunk, and return its buffer with the number of bytes used in it."""
        start = chunk * CHUNK_WEIGHTS
        count = min(CHUNK_WEIGHTS, self._weights - start)
        bits = DTYPE_BITS[self._spec.dtype]
        buffer = self._buffers.take()
        self._tensor.read(start, count, self._spec.dtype, buffer)
        byte_count = count * bits // 8
        sink.write(self._spec.name, start * bits // 8, buffer[:byte_count])
        return buffer, byte_count

    def collect(self, result: tuple[npt.NDArray[np.uint8], int]) -> None:
        """Hash the chunk, and give its buffer back."""
        buffer, byte_count = result
        self._digest.update(buffer[:byte_count].data)
        self._buffers.give(buffer)

    def finish(self) -> TensorRecord:
        """Return the record, which holds nothing but the hash."""
        return TensorRecord(name=self._spec.name, sha256={self._spec.name: self._digest.hexdigest()})
