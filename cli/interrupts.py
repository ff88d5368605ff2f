"""What an interrupt (Ctrl-C, SIGINT) does: one line on stderr, and exit code 130, at any moment of a command.

`answer_at_once` is called before anything large is imported. Outside `raised`, there is nothing to clean up, and an
exception could be swallowed by an import, so the process ends right away. Inside it, KeyboardInterrupt is raised.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 130  # 128 + SIGINT, as shells have it
# Whether an interrupt came. Some libraries turn the KeyboardInterrupt into an error of their own.
_came = False


def answer_at_once() -> None:
    """Answer interrupts from now on by ending the process; where SIGINT is ignored, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for interrupts that come inside this context."""
    global _came
    _came = False
    if signal.getsignal(signal.SIGINT) is not _end:  # a test, or a program that answers them itself
        yield
        return
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def came() -> bool:
    """Whether an interrupt came inside the last `raised`."""
    return _came


def leave() -> None:
    """End the process without waiting for threads that still compute: what they do is of no use any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_CODE)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"error: interrupted\n")
    leave()


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    _came = True
    raise KeyboardInterrupt
