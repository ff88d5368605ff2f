"""Requests that are sent again after failures that pass: to the Hub and to object storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")
Stop = Callable[[], bool]  # whether to stop


class TransferStopped(Exception):
    """A transfer was stopped by this program, because something else failed or the user asked for it."""


class Failures(Protocol):
    """How the failed requests of one service are read.

    kinds: the exceptions by which its client tells of them
    """

    kinds: tuple[type[Exception], ...]

    def pause(self, error: Exception, wait: float, attempt: int) -> float | None:
        """Return the seconds after which the request is sent again, or None if it is not.

        wait: the seconds to wait if the service does not say how many
        attempt: how often it was sent without any of the transfer having come
        """
        ...

    def explained(self, error: Exception, attempt: int) -> Exception:
        """Return what is raised in place of an error after which the request is not sent again, or the error itself."""
        ...


def attempted(
    send: Callable[[], Result],
    failures: Failures,
    *,
    first_wait: float,
    stop: Stop = lambda: False,
    how_far: Callable[[], int] = lambda: 0,
) -> Result:
    """Send a request, again as long as that may help, and return its result.

    first_wait: the seconds to wait after the first attempt, doubled after each
    stop: asked while waiting
    how_far: returns how far a transfer came; the attempts are counted from zero when it grows

    Raises what `failures` explains, TransferStopped.
    """
    attempt, wait, reached = 0, first_wait, how_far()
    while True:
        try:
            return send()
        except failures.kinds as error:
            if how_far() > reached:
                attempt, wait, reached = 0, first_wait, how_far()
            attempt += 1
            pause = failures.pause(error, wait, attempt)
            if pause is None:
                explained = failures.explained(error, attempt)
                if explained is error:
                    raise
                raise explained from None
        _wait(pause, stop)
        wait *= 2


def _wait(seconds: float, stop: Stop) -> None:
    """Sleep. Raises TransferStopped once `stop` returns True."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if stop():
            raise TransferStopped
        time.sleep(min(0.1, left))
