"""What each thread keeps for itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pqweights.kernels.workers import kept, scratch


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_scratch_memory_is_used_again_and_grows() -> None:
    def addresses() -> list[int]:
        return [scratch("a", byte_count).ctypes.data for byte_count in (500, 300, 500, 700, 500)]

    first, smaller, again, larger, last = in_a_thread(addresses)
    assert first == smaller == again != larger == last
    assert [len(scratch("a", byte_count)) for byte_count in (500, 300, 0)] == [500, 300, 0]


def test_scratch_memory_is_that_of_one_purpose_and_thread() -> None:
    ours, other = scratch("a", 500), scratch("b", 500)
    ours[:], other[:] = 1, 2

    def elsewhere() -> None:
        scratch("a", 500)[:] = 3
        scratch("b", 400)[:] = 4

    in_a_thread(elsewhere)
    assert (ours == 1).all() and (other == 2).all()
    assert scratch("a", 500).ctypes.data == ours.ctypes.data


def test_last_value_of_a_purpose_is_kept_by_each_thread() -> None:
    made: list[int] = []

    def ask(key: str) -> int:
        def make() -> int:
            made.append(len(made))
            return made[-1]

        return kept("a test of its own", key, make)

    assert [ask(key) for key in ("x", "x", "y", "x")] == [0, 0, 1, 2]
    assert in_a_thread(lambda: ask("x")) == 3
    assert ask("x") == 2
