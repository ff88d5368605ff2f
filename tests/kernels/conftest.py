"""Fixtures of the kernel tests: one thread for torch, and a lasting folder for code that takes long to compile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pqweights.kernels import cpu


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    """Let the reference compute on one thread: its tensors are so small that more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lasting_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that later runs find again, beside the kernels that cpu.py keeps; a temporary one if there is none.

    Code for processors and GPUs that this machine lacks is kept there, under names that change with the sources.
    """
    for folder in cpu._cache_folders():
        with contextlib.suppress(OSError):
            chosen = folder / "tests"
            chosen.mkdir(parents=True, exist_ok=True)
            if os.access(chosen, os.W_OK):
                return chosen
    return tmp_path_factory.mktemp("lasting")
