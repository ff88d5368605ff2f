"""Machine code in the threads with which torch computes: those of the OpenMP runtime that torch has loaded.

Threads of our own would compete with those of torch for the same cores; these wait for work anyhow, and start within
microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

# A kernel that takes the address of a task.
TASK_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_in_threads(function: Any, argument: int, threads: int) -> None:
    """Call a function of machine code with one address in several threads at once, one of which is the caller's.

    The function must share out the work among its calls, and may be called fewer times.
    """
    parallel = _parallel() if threads > 1 else None
    if threads == 1:
        function(argument)
    elif parallel is not None:
        parallel(function, argument, threads, 0)
    else:
        others = [_pool(threads - 1).submit(function, argument) for _ in range(threads - 1)]
        try:
            function(argument)
        finally:  # they use memory of the caller
            wait(others)


@functools.cache
def _parallel() -> Any:
    """Return GOMP_parallel(function, argument, threads, flags) of the OpenMP runtime of torch; None without one."""
    for path in _runtimes():
        try:
            found = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes = [TASK_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        found.restype = None
        return found
    return None


def _runtimes() -> list[str]:
    """Return the OpenMP runtimes that this process has loaded, that of torch first; none without torch."""
    if "torch" not in sys.modules:
        return []
    folder = Path(sys.modules["torch"].__file__ or "").parent / "lib"
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux: torch keeps its runtime beside its own libraries
        return [str(path) for path in sorted(folder.glob("lib*omp*.dylib"))]
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    found = [Path(path) for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    # Other packages bring runtimes of their own.
    return [str(path) for path in sorted(found, key=lambda path: (not path.is_relative_to(folder), path))]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="pqweights")


os.register_at_fork(after_in_child=_pool.cache_clear)
