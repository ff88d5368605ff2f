"""The two ways in which numba compiles the functions that kernels are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Any:
    """Compile to a function of its own, which LLVM may inline."""
    return numba.njit(error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile as a part of each function that calls it.

    LLVM then sees which arrays its loops work on, and that they do not overlap. Other loops cost a check for that,
    and code for both cases.
    """
    return numba.njit(error_model="numpy", inline="always")(function)
