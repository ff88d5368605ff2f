"""A short run of tests/fuzz_decoders.py, which `make fuzz` runs for longer, and that it finds what it looks for."""

from __future__ import annotations

import fuzz_decoders
import kernel_runner
import numpy as np
import pytest

from pqweights.kernels import native

ROUNDS = 40


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Compiling them takes most of the time."""
    return fuzz_decoders.programs(tmp_path_factory.mktemp("runners"))


def test_damaged_input_is_computed_without_a_fault(programs: dict[str, list[str]]) -> None:
    passed = fuzz_decoders.fuzz(programs, list(fuzz_decoders.UNTRUSTED), 0, lambda rounds: rounds < ROUNDS)
    assert {kernel for _, kernel in passed} == set(fuzz_decoders.UNTRUSTED)
    assert set(passed.values()) == {ROUNDS}


@pytest.mark.parametrize(
    ("kind", "found"), [("guarded", "exit status -11"), ("sanitized", "AddressSanitizer: heap-buffer-overflow")]
)
def test_a_read_beyond_an_array_is_found(kind: str, found: str, programs: dict[str, list[str]]) -> None:
    """Told of more blocks than there are, a kernel reads on."""
    if kind not in programs:
        pytest.skip("neither g++ nor clang++ is installed")
    values = native.array(np.zeros(4096, np.float32), np.float32, 4096, written=True)
    with kernel_runner.running(programs[kind]), pytest.raises(kernel_runner.RunnerError, match=found):
        native.call("rotate", values, 33, 1.0)
