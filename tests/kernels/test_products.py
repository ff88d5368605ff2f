"""Products of packed weights with rows of inputs, beside float64."""

from __future__ import annotations

import concurrent.futures
from dataclasses import replace

import numpy as np
import pytest
from closeness import F32_FEW, each_near
from product_cases import computed, exact, excess, make_case

from pqweights.kernels import openmp
from pqweights.kernels.products import MOST_ROWS


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_products_are_within_the_bound(bits: int, dtype: str) -> None:
    for rows in (1, 2, 3, 4, 5, 8, 15, MOST_ROWS):
        assert excess(make_case(bits, dtype, rows)) <= 1


@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 32, 70])
def test_any_number_of_blocks_and_outputs(blocks: int) -> None:
    for outputs in (1, 2, 300):
        for dtype in ("BF16", "F32"):
            assert excess(make_case(5, dtype, 3, outputs=outputs, blocks=blocks)) <= 1


def test_threads_change_no_bit() -> None:
    case = make_case(5, "F32", 3, outputs=3000, blocks=40)
    alone = computed(case)
    for threads in (2, 3, 8):
        assert np.array_equal(computed(case, threads=threads), alone)


def test_without_openmp_threads_of_python_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_parallel", lambda: None)
    case = make_case(5, "BF16", 3, outputs=3000, blocks=40)
    alone = computed(case)
    assert np.array_equal(computed(case, threads=3), alone)


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    cases = [make_case(bits, "BF16", rows, outputs=700) for bits in (3, 5) for rows in (1, 4)] * 4
    expected = [computed(case) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda case: computed(case, threads=2), cases))
    assert all(np.array_equal(one, other) for one, other in zip(made, expected, strict=True))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_no_numbers_make_outputs_that_are_none(value: float, dtype: str) -> None:
    """Of the rows that hold them, and of no other."""
    case = make_case(5, dtype, 4)
    x = case.x.copy()
    x[2, 300] = value
    norms = np.abs(case.norms) + np.float16(0.01)
    with np.errstate(invalid="ignore"):
        made = computed(replace(case, x=x, norms=norms))
    assert not np.isfinite(made[2]).any()
    assert np.array_equal(np.delete(made, 2, 0), np.delete(computed(replace(case, norms=norms)), 2, 0))


def test_products_beyond_the_range_are_infinite() -> None:
    case = make_case(5, "F16", 2)
    made, (expected, _) = computed(case, factor=2.0**20), exact(case)
    beyond = np.abs(expected) * 2.0**20 > 70000
    assert beyond.any() and np.isinf(made[beyond]).all()
    assert np.array_equal(np.sign(made[beyond]), np.sign(expected[beyond]))


def test_a_factor_multiplies_the_weight_alone() -> None:
    case = make_case(5, "F32", 3)
    without = replace(case, bias=None)
    assert case.bias is not None
    made = computed(case, factor=4.0)
    assert each_near(made, 4 * computed(without) + case.bias, F32_FEW, F32_FEW)
