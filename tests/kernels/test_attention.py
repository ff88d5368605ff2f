"""Attention on packed keys and values, beside float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import attention_cases
import numpy as np
import pytest
import torch
from attention_cases import (
    excess,
    hadamard_scores,
    polar_case,
    polar_exact,
    polar_scores,
    scores_exact,
    sums_exact,
    token_case,
    value_sums,
)
from closeness import F32_SUM, each_near

from pqweights.kernels import attention
from pqweights.kernels.attention import POLAR_WIDTHS

ROWS = (1, 2, 3, 7, 16)


@pytest.fixture
def every_call_is_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut even the smallest calls into tiles for two threads."""
    monkeypatch.setattr(attention, "LEAST_SHARED", 0)
    monkeypatch.setattr(attention, "LEAST_TILE", 1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# --- scores of polar-rope keys ---


@pytest.mark.parametrize("size", [8, 32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("widths", POLAR_WIDTHS)
def test_polar_scores_are_within_the_bound(widths: tuple[int, int], size: int) -> None:
    for rows in ROWS:
        for halves in (True, False):
            case = polar_case(widths, rows, size=size, halves=halves)
            assert excess(polar_scores(case), polar_exact(case)) <= 1


@pytest.mark.parametrize("groups", [1, 15, 16, 17, 130])
def test_polar_scores_of_any_number_of_groups(groups: int) -> None:
    for heads in (1, 3):
        case = polar_case((4, 4), 2, groups=groups, heads=heads)
        assert excess(polar_scores(case), polar_exact(case)) <= 1


@pytest.mark.usefixtures("every_call_is_shared")
@pytest.mark.parametrize("widths", POLAR_WIDTHS)
def test_threads_change_no_bit_of_polar_scores(widths: tuple[int, int]) -> None:
    case = polar_case(widths, 3, groups=100, heads=3)
    torch.set_num_threads(1)
    alone = polar_scores(case)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert np.array_equal(polar_scores(case), alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_queries_that_are_no_numbers_make_scores_that_are_none(value: float) -> None:
    """Of their own row, and of no other."""
    case = polar_case((4, 4), 4)
    queries = case.queries.copy()
    queries[1, 2, 5] = value
    made, usual = polar_scores(replace(case, queries=queries)), polar_scores(case)
    assert not np.isfinite(made[1, 2]).any()
    made[1, 2] = usual[1, 2]
    assert np.array_equal(made, usual)


def test_scales_may_be_bfloat16() -> None:
    case = polar_case((4, 4), 1)
    scales = torch.from_numpy(case.scales).bfloat16()
    whole = replace(case, scales=scales.half().numpy())
    arguments = [torch.from_numpy(array) for array in case.arrays[:3]]
    made = attention.polar_rope_scores(*arguments, scales, angle_bits=4, radius_bits=4)
    assert np.array_equal(made.numpy(), polar_scores(whole))


@pytest.mark.parametrize(("heads", "groups"), [(0, 3), (2, 0)])
def test_polar_scores_of_nothing_are_empty(heads: int, groups: int) -> None:
    case = polar_case((4, 4), 1)
    cut = [case.queries[:heads], case.angles[:heads, :groups], case.radii[:heads, :groups], case.scales[:heads]]
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in cut]
    assert attention.polar_rope_scores(*tensors, angle_bits=4, radius_bits=4).shape == (heads, 1, groups * 32)


def test_polar_arguments_that_do_not_fit_are_refused() -> None:
    """The kernels only see where a tensor begins."""
    queries, angles, radii, scales = map(torch.from_numpy, polar_case((4, 4), 2).arrays)
    good = {"queries": queries, "angles": angles, "radii": radii, "scales": scales}
    bad = [
        {"queries": queries.double()},
        {"queries": queries[:, :0]},
        {"queries": queries.repeat(1, 9, 1)},
        {"queries": queries[..., :60].contiguous()},
        {"angles": angles[:, ::2]},
        {"angles": angles.to(torch.int8)},
        {"radii": radii[..., :8].contiguous()},
        {"scales": scales[:, :16].contiguous()},
    ]
    for change in bad:
        with pytest.raises(ValueError, match="expected"):
            attention.polar_rope_scores(**(good | change), angle_bits=4, radius_bits=4)
    with pytest.raises(ValueError, match="bits"):
        attention.polar_rope_scores(**good, angle_bits=3, radius_bits=4)


# --- token-wise codes ---


@pytest.mark.parametrize("size", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("bits", range(2, 9))
def test_products_with_token_wise_codes_are_within_the_bound(bits: int, size: int) -> None:
    for rows in (1, 3, 4, 16):
        case = token_case(bits, rows, size=size)
        assert excess(value_sums(case), sums_exact(case)) <= 1
        assert excess(hadamard_scores(case), scores_exact(case)) <= 1


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 2100])
def test_any_number_of_tokens(tokens: int) -> None:
    for bits in (3, 4):
        for rows in (1, 5):
            case = token_case(bits, rows, tokens=tokens, heads=3)
            assert excess(value_sums(case), sums_exact(case)) <= 1
            assert excess(hadamard_scores(case), scores_exact(case)) <= 1


@pytest.mark.usefixtures("every_call_is_shared")
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_threads_change_no_bit_of_token_wise_products(bits: int, heads: int) -> None:
    """Where a tile of values ends does not depend on the threads."""
    case = token_case(bits, 3, heads=heads, tokens=3000)
    torch.set_num_threads(1)
    sums, scores = value_sums(case), hadamard_scores(case)
    for threads in (2, 2, 3, 8):
        torch.set_num_threads(threads)
        assert np.array_equal(value_sums(case), sums)
        assert np.array_equal(hadamard_scores(case), scores)


def test_scales_without_lows_and_lows_without_scales() -> None:
    case = token_case(4, 1, tokens=77)
    assert case.lows is not None
    tensors = [torch.from_numpy(array) for array in (case.weights, case.codes, case.levels)]
    plain = value_sums(replace(case, lows=None)).astype(np.float64)
    lows = np.einsum("hrt,ht->hr", case.weights.astype(np.float64), case.lows.astype(np.float64))[..., None]
    made = attention.weighted_values(*tensors, size=64, lows=torch.from_numpy(case.lows))
    assert each_near(made.numpy(), plain + lows, F32_SUM, F32_SUM)
    made = attention.weighted_values(*tensors, size=64, scales=torch.from_numpy(case.norms))
    zero = replace(case, lows=np.zeros_like(case.lows))
    assert excess(made.numpy(), sums_exact(zero)) <= 1


@pytest.mark.parametrize(("heads", "tokens"), [(0, 3), (2, 0)])
def test_token_wise_products_of_nothing(heads: int, tokens: int) -> None:
    codes, levels = torch.zeros(heads, tokens, 32, dtype=torch.uint8), torch.ones(16)
    sums = attention.weighted_values(torch.ones(heads, 2, tokens), codes, levels, size=64)
    assert torch.equal(sums, torch.zeros(heads, 2, 64))
    norms = torch.ones(heads, tokens, dtype=torch.float16)
    assert attention.hadamard_scores(torch.ones(heads, 2, 64), codes, norms, levels).shape == (heads, 2, tokens)


def test_token_wise_arguments_that_do_not_fit_are_refused() -> None:
    case = token_case(4, 2)
    weights, codes, levels = map(torch.from_numpy, (case.weights, case.codes, case.levels))
    queries, norms = torch.from_numpy(case.queries), torch.from_numpy(case.norms)
    for sums in (
        (weights.double(), codes, levels, 64),
        (weights[:, :, :5].contiguous(), codes, levels, 64),
        (weights.repeat(1, 9, 1), codes, levels, 64),
        (weights, codes, levels, 48),
        (weights, codes, levels, 96),
        (weights, codes, levels[:8].contiguous(), 64),
        (weights, codes, levels[:15].contiguous(), 64),
        (weights, codes[:, :, ::2], levels, 32),
    ):
        with pytest.raises(ValueError, match="expected"):
            attention.weighted_values(*sums[:3], size=sums[3])
    for scores in (
        (queries[:1].contiguous(), codes, norms, levels),
        (queries, codes, norms.float(), levels),
        (queries, codes, norms[:, :5].contiguous(), levels),
        (queries, codes, norms, levels[:2].contiguous()),
    ):
        with pytest.raises(ValueError, match="expected"):
            attention.hadamard_scores(*scores)


def test_codes_are_unpacked_as_they_are_described() -> None:
    """The reference of these tests, by an example: eight codes of three bits, a field of two and one of one."""
    packed = np.array([0b00_11_10_01, 0b10_01_00_11, 0b1000_0001], dtype=np.uint8)
    assert attention_cases.unpacked(packed, 3, 8).tolist() == [1 + 4, 3, 2, 0, 3, 1, 0, 2 + 4]
