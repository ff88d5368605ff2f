"""What one thread computes with: a backend, and memory that it uses again and again.

Fresh megabytes for every chunk would cost more in page faults than the work that is done on them. Nothing else in the
library belongs to a thread. The alternative is a parameter of every function between a thread pool and the innermost
reader, which would say no more.
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
        """The backend that codecs compute with, imported on first use."""
        if self._backend is None:
            self._backend = load_backend(DEVICES[self._device])
        return self._backend

    def scratch(self, purpose: str, byte_count: int) -> npt.NDArray[np.uint8]:
        """Memory for one purpose, contents undefined, valid until the worker is asked for the same purpose again."""
        buffer = self._scratch.get(purpose)
        if buffer is None or len(buffer) < byte_count:
            buffer = self._scratch[purpose] = self.backend.empty(byte_count)
        return buffer[:byte_count]

    def kept(self, purpose: str, key: Hashable, make: Callable[[], Value]) -> Value:
        """The last value of a purpose if it had this key, else the one that `make` returns."""
        found = self._kept.get(purpose)
        if found is None or found[0] != key:
            found = self._kept[purpose] = key, make()
        value: Value = found[1]
        return value


def compute_on(device: str) -> None:
    """Make the calling thread compute on this device (a key of DEVICES) from now on."""
    worker = Worker(device)
    _of_thread.worker = worker
    assert worker.backend is not None  # imports it now, before anything is timed or under way


def worker() -> Worker:
    """The worker of the calling thread, which computes on the CPU unless compute_on said otherwise."""
    found: Worker | None = getattr(_of_thread, "worker", None)
    if found is None:
        found = _of_thread.worker = Worker("cpu")
    return found


def backend() -> Backend:
    """The backend that codecs compute with in the calling thread."""
    return worker().backend


def scratch(purpose: str, byte_count: int) -> npt.NDArray[np.uint8]:
    """Scratch memory of the calling thread; see Worker.scratch."""
    return worker().scratch(purpose, byte_count)
