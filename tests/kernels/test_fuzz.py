"""A short run of tests/fuzz_decoders.py, which `make fuzz` runs for longer, and that it finds what it looks for."""

from __future__ import annotations

import fuzz_decoders
import kernel_runner
import numpy as np
import pytest

from pqweights.kernels import native

ROUNDS = 40


@pytest.fixture(scope="module")
def program() -> list[str]:
    """Compiling it takes most of the time."""
    return kernel_runner.sanitized_command()


def test_every_kernel_is_fuzzed() -> None:
    assert set(fuzz_decoders.UNTRUSTED) == set(native.functions())


def test_damaged_input_is_computed_without_a_fault(program: list[str]) -> None:
    passed = fuzz_decoders.fuzz(program, list(fuzz_decoders.UNTRUSTED), 0, lambda rounds: rounds < ROUNDS)
    assert passed == dict.fromkeys(fuzz_decoders.UNTRUSTED, ROUNDS)


def test_a_read_beyond_an_array_is_found(program: list[str]) -> None:
    """Told of more blocks than there are, a kernel reads on."""
    values = native.array(np.zeros(4096, np.float32), np.float32, 4096, written=True)
    found = pytest.raises(kernel_runner.RunnerError, match="AddressSanitizer: heap-buffer-overflow")
    with kernel_runner.running(program), found:
        native.call("rotate", values, 33)
