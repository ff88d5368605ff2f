"""Notices of slow steps that the library takes by itself, such as compiling kernels on the first run on a machine.

Whoever calls the library knows which call is slow. That a call compiles kernels first, only the kernels know.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

# Compiled kernels are shared by all threads, so the listeners are, too. The last one is told.
_listeners: list[Callable[[str], None]] = []
# The slow steps under way, with the threads that take them.
_steps: list[tuple[str, int]] = []
# The step that cannot be interrupted, see kernels/cpu.py.
COMPILING = "compiling kernels (once)"


@contextlib.contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell`, from any thread, with the name of a slow step when it begins, and with "" when it ends."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


@contextlib.contextmanager
def slow_step(name: str) -> Iterator[None]:
    """Tell the listener that a slow step begins, and that it ends."""
    told = _listeners[-1:]
    step = (name, threading.get_ident())
    _steps.append(step)
    for tell in told:
        tell(name)
    try:
        yield
    finally:
        _steps.remove(step)
        for tell in told:
            tell("")


def others_compile() -> bool:
    """Whether a thread other than this one compiles kernels."""
    return any(name == COMPILING and thread != threading.get_ident() for name, thread in tuple(_steps))
