"""What an interrupt (Ctrl-C, SIGINT) does: one line on stderr, and exit code 130, from the start of a command.

`answer_at_once` is called before anything large is imported; only Python's own start-up comes before it. Outside
`raised`, there is nothing to clean up, and an exception could be swallowed by an import, so the process ends right
away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 130  # 128 + SIGINT, as shells have it
# Whether an interrupt came inside raised. Some libraries turn the KeyboardInterrupt into an error of their own.
_came = False


def answer_at_once() -> None:
    """Answer interrupts from now on by ending the process; where SIGINT is ignored, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Have an interrupt raise KeyboardInterrupt, and every error after it count as its consequence."""
    global _came
    _came = False
    ours = signal.getsignal(signal.SIGINT) is _end  # not in a program that answers interrupts itself
    if ours:
        signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, _end)
        error = sys.exception()
        if _came and error is not None and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error


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
        os.write(2, b"interrupted\n")
    leave()


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    _came = True
    raise KeyboardInterrupt
