"""Notices of the slow steps of a call, such as looking at a Ray cluster first: only the library knows of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# Steps are taken in any thread, so all share the listeners. The last one is told.
_listeners: list[Callable[[str], None]] = []


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
    for tell in told:
        tell(name)
    try:
        yield
    finally:
        for tell in told:
            tell("")
