"""What one thread computes with: a backend, and memory that it uses again and again.

Fresh megabytes for every chunk cost more in page faults than the work that is done on them. This is the one place where
something belongs to a thread: a parameter of everything between a thread pool and the innermost reader would say no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pqweights.kernels import DEVICES, Backend, load_backend

Value = TypeVar("Value")

_of_thread = threading.local()


class Worker:
    """One thread's backend and memory. device: a key of DEVICES."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._backend: Backend | None = None
        self._scratch: dict[str, npt.NDArray[np.uint8]] = {}
        self._kept: dict[str, tuple[Hashable, Any]] = {}

    @property
    def backend(self) -> Backend:
        """What codecs compute with; imported on first use."""
        if self._backend is None:
            self._backend = load_backend(DEVICES[self._device])
        return self._backend

    def scratch(self, purpose: str, byte_count: int) -> npt.NDArray[np.uint8]:
        """Memory for one purpose, contents undefined; valid until this worker is asked for the same purpose again."""
        buffer = self._scratch.get(purpose)
        if buffer is None or len(buffer) < byte_count:
            buffer = self._scratch[purpose] = self.backend.empty(byte_count)
        return buffer[:byte_count]

    def kept(self, purpose: str, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made where the last one of that purpose had another key."""
        found = self._kept.get(purpose)
        if found is None or found[0] != key:
            found = self._kept[purpose] = key, make()
        value: Value = found[1]
        return value


def compute_on(device: str) -> None:
    """The calling thread computes on this device (a key of DEVICES) from now on; the bytes are the same on every device."""
    worker = Worker(device)
    _of_thread.worker = worker
    assert worker.backend is not None  # imported here, before anything is timed or under way


def worker() -> Worker:
    """That of the calling thread; one that never said otherwise computes on the CPU."""
    found: Worker | None = getattr(_of_thread, "worker", None)
    if found is None:
        found = _of_thread.worker = Worker("cpu")
    return found


def backend() -> Backend:
    """The one that codecs compute with in this thread."""
    return worker().backend


def scratch(purpose: str, byte_count: int) -> npt.NDArray[np.uint8]:
    """See Worker.scratch; of the calling thread."""
    return worker().scratch(purpose, byte_count)
