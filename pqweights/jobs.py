"""The work on one tensor, cut into chunks of whole blocks: run in any thread, collected in order.

`Job` is what the driver knows; `CopyJob` stores a tensor as it is or in another dtype. Encoding is in quantize.py.
"""

from __future__ import annotations

import hashlib
import math
import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.dtypes import DTYPE_BITS
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.manifest import TensorRecord
from pqweights.plan import TensorPlan

# 2**20 weights: 2 MiB of BF16, a chunk that the caches hold and whose overhead does not show.
CHUNK_WEIGHTS = 1 << 20

_buffers = threading.local()


def chunk_buffer(byte_count: int) -> npt.NDArray[np.uint8]:
    """The calling thread's reused input buffer, at least this large, cut to size; contents undefined."""
    buffer = getattr(_buffers, "input", None)
    if buffer is None or len(buffer) < byte_count:
        _buffers.input = buffer = np.empty(byte_count, dtype=np.uint8)
    result: npt.NDArray[np.uint8] = buffer[:byte_count]
    return result


class Sink(Protocol):
    """Where a job's bytes go: `offset` counts from the start of the stored tensor."""

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write all of data; any order, any thread."""
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

    def __init__(self, planned: TensorPlan, tensor: LogicalTensor) -> None:
        (self._spec,) = planned.stored
        self._tensor = tensor
        self._digest = hashlib.sha256()
        self._weights = math.prod(self._spec.shape)

    @property
    def chunks(self) -> int:
        """See Job."""
        return -(-self._weights // CHUNK_WEIGHTS)

    def run(self, chunk: int, sink: Sink) -> npt.NDArray[np.uint8]:
        """See Job."""
        start = chunk * CHUNK_WEIGHTS
        count = min(CHUNK_WEIGHTS, self._weights - start)
        bits = DTYPE_BITS[self._spec.dtype]
        data = np.empty(count * bits // 8, dtype=np.uint8)
        self._tensor.read(start, count, self._spec.dtype, data)
        sink.write(self._spec.name, start * bits // 8, data)
        return data

    def collect(self, result: npt.NDArray[np.uint8]) -> None:
        """See Job."""
        self._digest.update(result.data)

    def finish(self) -> TensorRecord:
        """See Job."""
        return TensorRecord(self._spec.name, {self._spec.name: self._digest.hexdigest()})
