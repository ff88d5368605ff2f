"""How near computed numbers must be to those of another program: every tolerance of the tests is stated here.

`deviation` is the largest difference in units of the largest expected magnitude (of all logits of a text, say), so that
it does not depend on the scale of a model. What is allowed is one of three things:

- Where two programs compute the same in float32, in another order, ten times the largest deviation of its kind that was
  measured: over the instruction sets that torch can be told to use, 1 to 3 threads, and all tests of the kind.
- Where one of them rounds what it computes with to few bits, twice that: processors hardly differ in it.
- Where it is known how often a number was rounded to a type: `rounding(dtype, count)`.

To measure again, with each setting (`ATEN_CPU_CAPABILITY=default` and `avx2`, `ONEDNN_MAX_CPU_ISA=AVX2`):

    PQWEIGHTS_DEVIATIONS=FILE OMP_NUM_THREADS=2 .venv/bin/python -m pytest -n 0 TESTS
    .venv/bin/python tests/support/closeness.py FILE ...
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# What computes, and in which way it differs from what is expected -> the largest deviation measured.
REORDERED = {
    "torch": 5.5e-06,  # the same weights packed or not, in other chunks, in windows read together
    "torch, cached": 5.5e-06,  # texts of several lengths read together, by quantized caches
    "torch, perplexity": 2.7e-05,
    "torch, KL": 1e-10,
    "attention on codes": 7.5e-06,
    "attention on codes, again": 1.2e-4,  # where a key or a value next to a threshold has another code
    "attention on codes, tables": 0.00057,  # whose entries are integers
    "mlx": 1.1e-06,
    "llama.cpp": 3.5e-06,
    "llama.cpp, perplexity": 1e-05,
    "llama.cpp, KL": 1e-09,
    "llama.cpp, gelu": 0.0007,  # a table of half-precision numbers: where two are as near, it may take the other
    "llama.cpp, states": 2e-05,  # of DeltaNet and Mamba, added up in chunks of another size
}
ROUNDED = {
    "torch, BF16": 0.05,
    "compressed-tensors, E2M1": 0.0047,  # it rounds the decoded weights to BF16
    "8-bit weights": 0.093,
    "mlx, BF16": 0.044,  # it accumulates products in BF16
    "llama.cpp, thresholds": 0.035,  # of Gemma 3n, where the activations above a bound count only
    "llama.cpp, F16": 0.0025,  # it rounds the inputs of matrices to the type of the matrix
    "llama.cpp, BF16": 0.015,
    "llama.cpp, blocks": 0.05,  # and to 8 bits where that is made of blocks
    "clip.cpp, F16": 0.0035,
    # In units of log probabilities. INT4 makes those of a token differ by 0.25 on average.
    "vLLM, BF16": 0.045,
    "vLLM, BF16 on average": 0.011,
    "vLLM, int8": 0.08,  # here and below it rounds what layers read, too
    "vLLM, int8 on average": 0.021,
    "vLLM, int8 without VNNI": 0.27,  # oneDNN's products of integers are less exact on processors without VNNI
    "vLLM, int8 without VNNI on average": 0.066,
    "vLLM, fp8": 0.21,
    "vLLM, fp8 on average": 0.06,
    "vLLM, nvfp4": 0.74,
    "vLLM, nvfp4 on average": 0.17,
}
# Half the distance of neighbouring numbers, relative to them.
ROUNDED_BY = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}


def rounding(dtype: str, count: float) -> float:
    """Return how far numbers may be off, relative to them or to their sum, after so many roundings to a type."""
    return count * ROUNDED_BY[dtype]


# Numbers that are computed again: after a few operations, as a sum, as a product of matrices, from a difference of
# numbers that are nearly equal.
F64_FEW, F64_SUM = rounding("F64", 16), rounding("F64", 2**13)
F32_FEW, F32_SUM, F32_MATRIX, F32_SOLVED = (rounding("F32", 2**count) for count in (5, 8, 11, 14))
SMALLEST = 2.0**-123  # eight times float32's smallest normal number, below which sums lose bits
STATED = 1e-6  # of numbers that a document states with six decimals
# By which share numbers are off that are not computed again but estimated.
ALIKE = 0.01  # sizes, errors and predictions of two results, one of which was rounded once more, or has other codes
ROUNDED_ONCE_MORE = 0.02  # errors, measured on weights that were rounded to BF16 or F16
ORTHOGONAL = 0.03  # errors of two roundings that are added up as if they were orthogonal; means of 100,000 weights
ESTIMATED = 0.01  # divergences that are estimated from a saved reference
PARTS_OF_NAT = 1e-3  # divergences of log-probabilities that a saved reference has in whole parts of a nat
SAMPLE = 0.05  # means of some thousand weights
SMALL_SAMPLE = 0.1
ONE_DRAW = 0.3  # of noise
_RECORD = "PQWEIGHTS_DEVIATIONS"


def deviation(found: Any, expected: Any) -> float:
    """Return the largest difference in units of the largest expected magnitude; of arrays, tensors or numbers."""
    ours, theirs = _numbers(found), _numbers(expected)
    assert ours.shape == theirs.shape and ours.size
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def distance(found: Any, expected: Any) -> float:
    """Return the norm of the difference, relative to that of the expected numbers."""
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def bound(kind: str) -> float:
    """Return the largest deviation that a kind of computation may have."""
    return 10 * REORDERED[kind] if kind in REORDERED else 2 * ROUNDED[kind]


def assert_near(found: Any, expected: Any, kind: str) -> None:
    """Compare numbers with those of another program. kind: of REORDERED or ROUNDED"""
    assert_within(deviation(found, expected), kind)


def assert_within(measured: float, kind: str) -> None:
    """Compare another measure of the difference than the largest deviation with what its kind may have."""
    if _RECORD in os.environ:
        with Path(os.environ[_RECORD]).open("a") as file:
            print(kind, measured, os.environ.get("PYTEST_CURRENT_TEST", ""), sep="\t", file=file)
    assert measured <= bound(kind), f"{kind}: a deviation of {measured:.3g}, where {bound(kind):.3g} is allowed"


def decimals(count: int) -> float:
    """Return how far a number may be from what is printed with so many decimals."""
    return 0.5 * 10.0**-count


def approx(expected: Any, relative: float = STATED, absolute: float = 0.0) -> Any:
    """Return what equals a number, or all of a list or dict, that are near. relative, absolute: of this module"""
    return pytest.approx(expected, rel=relative, abs=absolute)


def near(found: Any, expected: Any, relative: float, absolute: float = 0.0) -> Any:
    """Return of each number whether it is near the expected one. relative, absolute: of this module"""
    ours, theirs = _numbers(found), _numbers(expected)
    with np.errstate(invalid="ignore"):  # infinite numbers
        is_near = np.abs(ours - theirs) <= relative * np.abs(theirs) + absolute
    return (is_near & np.isfinite(ours) & np.isfinite(theirs)) | (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))


def each_near(found: Any, expected: Any, relative: float, absolute: float = 0.0) -> bool:
    """Return whether all numbers are near the expected ones."""
    return bool(near(found, expected, relative, absolute).all())


def _numbers(values: Any) -> Any:
    return np.asarray(values.detach().double() if hasattr(values, "detach") else values, dtype=np.float64)


def main(files: list[str]) -> None:
    """Print the largest deviation of each kind in recorded files, and which test had it."""
    rows: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for line in (line for file in files for line in Path(file).read_text().splitlines()):
        kind, measured, test = line.split("\t")
        rows[kind].append((float(measured), test))
    for kind, measured in sorted(rows.items()):
        print(f"{kind:24} {len(measured):5} {max(measured)[0]:.3g} of {bound(kind):.3g} in {max(measured)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
