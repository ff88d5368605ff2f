"""Work in the threads with which torch computes: those of the OpenMP runtime that torch has loaded.

Threads of our own would compete with those of torch for the same cores; these wait for work anyhow, and start within
microseconds. What torch itself is asked for in one of them, it computes in that thread alone. A forked process does not
have them, and gets threads of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

# A kernel that takes the address of a task.
TASK_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_in_threads(function: Any, argument: bytes | int, threads: int) -> None:
    """Call a function of machine code with one address in several threads at once, one of which is the caller's.

    argument: the address, or bytes that begin there

    The function must share out the work among its calls, and may be called fewer times.
    """
    if threads == 1:
        function(argument)
    elif (parallel := _parallel()) is not None:
        parallel(function, argument, threads, 0)
    else:
        others = [_pool(threads - 1).submit(function, argument) for _ in range(threads - 1)]
        try:
            function(argument)
        finally:  # they use memory of the caller
            wait(others)


class _Kept(contextlib.AbstractContextManager[None]):
    """A context of which an error is kept instead of raised: it must not pass through machine code."""

    def __init__(self, failed: dict[int, BaseException], item: int) -> None:
        self._failed, self._item = failed, item

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._failed[self._item] = error
        return True


def map_in_threads(work: Callable[[int], None], items: Iterable[int], threads: int) -> None:
    """Call a function for each item in several threads, which take the items in order; scratch memory does not last.

    Raises what the function raised for the first item of those for which it raised anything.
    """
    left, failed = iter(items), dict[int, BaseException]()

    def take(_: object) -> None:
        for item in left:
            with _Kept(failed, item):
                work(item)
            if item in failed:
                return

    run_in_threads(TASK_FUNCTION(take), 0, threads)
    if failed:
        raise failed[min(failed)]


@functools.cache
def _parallel() -> Any:
    """Return GOMP_parallel(function, argument, threads, flags) of the OpenMP runtime of torch; None without one."""
    if _is_forked:
        return None
    for path in _runtimes():
        try:
            library = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        library.argtypes = [TASK_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.restype = None
        return library
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
    libraries = [Path(path) for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    # Other packages bring runtimes of their own.
    return [str(path) for path in sorted(libraries, key=lambda path: (not path.is_relative_to(folder), path))]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="pqweights")


_is_forked = False


def _forget_threads() -> None:
    """Use no thread of the process that this one was forked from."""
    global _is_forked
    _is_forked = True
    _parallel.cache_clear()
    _pool.cache_clear()


os.register_at_fork(after_in_child=_forget_threads)
