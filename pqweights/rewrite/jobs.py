"""The work on one tensor, cut into chunks of whole blocks: run in any thread, collected in order.

`Job` is what the driver knows; `CopyJob` stores a tensor as it is or in another dtype. Encoding is in encode_job.py.
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

# 2**20 weights: 2 MiB of BF16, a chunk that the caches hold and whose overhead does not show.
CHUNK_WEIGHTS = 1 << 20

# Bytes of a buffer for what a chunk becomes, from `run` to `collect`: 8 hold a weight of any dtype.
OUTPUT_BYTES_PER_WEIGHT = 8


class Sink(Protocol):
    """Where a job's bytes go: `offset` counts from the start of the stored tensor."""

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write all of data; any order, any thread."""
        ...

    def sha256(self, stored_name: str) -> str:
        """Of a stored tensor that was written as a whole."""
        ...


class Job(Protocol):
    """One pass over one tensor."""

    @property
    def chunks(self) -> int:
        """How many chunks there are; 0 for an empty tensor."""
        ...

    def run(self, chunk: int, sink: Sink) -> Any:
        """Read, transform and write one chunk; called once per chunk, in any thread."""
        ...

    def collect(self, result: Any) -> None:
        """Take the results of `run`, in the order of the chunks, in one thread."""
        ...

    def finish(self) -> TensorRecord | Job:
        """The finished tensor, or the next pass over it."""
        ...


class CopyJob:
    """Store a tensor plainly, in the dtype that the plan gives it."""

    def __init__(self, planned: TensorPlan, tensor: LogicalTensor, buffers: BufferPool) -> None:
        (self._spec,) = planned.stored
        self._tensor, self._buffers = tensor, buffers
        self._digest = hashlib.sha256()
        self._weights = math.prod(self._spec.shape)

    @property
    def chunks(self) -> int:
        """See Job."""
        return -(-self._weights // CHUNK_WEIGHTS)

    def run(self, chunk: int, sink: Sink) -> tuple[npt.NDArray[np.uint8], int]:
        """See Job; the buffer and how many bytes of it count."""
        start = chunk * CHUNK_WEIGHTS
        count = min(CHUNK_WEIGHTS, self._weights - start)
        bits = DTYPE_BITS[self._spec.dtype]
        buffer = self._buffers.take()
        self._tensor.read(start, count, self._spec.dtype, buffer)
        byte_count = count * bits // 8
        sink.write(self._spec.name, start * bits // 8, buffer[:byte_count])
        return buffer, byte_count

    def collect(self, result: tuple[npt.NDArray[np.uint8], int]) -> None:
        """See Job."""
        buffer, byte_count = result
        self._digest.update(buffer[:byte_count].data)
        self._buffers.give(buffer)

    def finish(self) -> TensorRecord:
        """See Job."""
        return TensorRecord(name=self._spec.name, sha256={self._spec.name: self._digest.hexdigest()})
