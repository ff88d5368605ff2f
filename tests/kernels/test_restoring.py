"""Levels of transform codes, and the nearest levels of numbers, the same bits as numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from restoring_cases import Runs, books, code_tables_of_all, expected_codes, expected_levels

from pqweights.kernels import transform_codes
from pqweights.kernels.transform_codes import nearest, scaled_levels

TABLES = code_tables_of_all()
RUNS: list[Runs] = [
    *([(count, bits)] for bits in range(1, 9) for count in (8, 24, 128, 136)),
    [(8, bits) for bits in range(8, 0, -1)],
    [(8, 8), (16, 5), (40, 3), (24, 1)],
    [(8, 1), (40, 7), (8, 2), (64, 6)],
    [(512, 3), (512, 1)],
]


@pytest.fixture
def every_call_is_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut even the smallest calls into tiles for two threads."""
    monkeypatch.setattr(transform_codes, "LEAST_SHARED", 0)
    monkeypatch.setattr(transform_codes, "LEAST_TILE", 1)
    monkeypatch.setattr(transform_codes, "TILE_NUMBERS", 64)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def some_codes(runs: Runs, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random packed codes and factors of vectors, one of which is zero."""
    torch.manual_seed(len(runs))
    codes = torch.randint(0, 256, (*shape, sum(count * bits // 8 for count, bits in runs)), dtype=torch.uint8)
    factors = torch.randn(*shape).exp().half()
    factors[..., -1] = 0
    return codes, factors


def numbers(runs: Runs, rows: int) -> torch.Tensor:
    """Random numbers, among them thresholds themselves, infinities and NaN."""
    torch.manual_seed(len(runs))
    values = torch.randn(rows, sum(count for count, _ in runs))
    begin = 0
    for count, bits in runs:
        thresholds = torch.from_numpy(books()[bits][1])
        values[0, begin : begin + count] = thresholds[torch.arange(count) % len(thresholds)]
        begin += count
    values[-1, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    return values


def levels_of(codes: torch.Tensor, factors: torch.Tensor, runs: Runs) -> torch.Tensor:
    """What `scaled_levels` has to return."""
    return torch.from_numpy(expected_levels(codes.numpy(), factors.numpy(), runs))


def nearest_of(values: torch.Tensor, runs: Runs) -> list[torch.Tensor]:
    """What `nearest` has to return."""
    return [torch.from_numpy(part) for part in expected_codes(values.numpy(), runs)]


# --- levels of codes ---


@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_levels_of_all_widths_are_as_expected(runs: Runs) -> None:
    for shape in ((1, 1, 1), (1, 3, 33), (2, 2, 16)):
        codes, factors = some_codes(runs, shape)
        made = scaled_levels(codes, factors, runs, TABLES)
        assert torch.equal(made, levels_of(codes, factors, runs))


@pytest.mark.parametrize("shape", [(1, 2, 40), (3, 1, 40), (2, 3, 40)])
def test_rows_may_have_room_for_more(shape: tuple[int, int, int]) -> None:
    runs = RUNS[-2]
    codes, factors = some_codes(runs, shape)
    for tokens in (1, 17, 39):
        some = codes[:, :, :tokens], factors[:, :, :tokens]
        assert torch.equal(scaled_levels(*some, runs, TABLES), levels_of(*some, runs))
    turned = codes.transpose(0, 1), factors.transpose(0, 1)
    assert torch.equal(scaled_levels(*turned, runs, TABLES), levels_of(*turned, runs))


@pytest.mark.usefixtures("every_call_is_shared")
def test_threads_change_no_bit_of_levels_and_no_code() -> None:
    for runs in RUNS[-4:]:
        codes, factors = some_codes(runs, (2, 3, 77))
        assert torch.equal(scaled_levels(codes, factors, runs, TABLES), levels_of(codes, factors, runs))
        values = numbers(runs, 100)
        for made, expected in zip(nearest(values, runs, TABLES), nearest_of(values, runs), strict=True):
            assert torch.equal(made, expected)


@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 0, 3), (1, 2, 0)])
def test_levels_of_nothing(shape: tuple[int, int, int]) -> None:
    codes, factors = torch.zeros(*shape, 3, dtype=torch.uint8), torch.zeros(shape, dtype=torch.float16)
    assert scaled_levels(codes, factors, [(8, 3)], TABLES).shape == (*shape, 8)


def test_codes_that_do_not_fit_are_refused() -> None:
    runs = [(8, 3), (16, 2)]
    codes, factors = some_codes(runs, (1, 2, 5))
    for wrong in (
        (codes, factors, [(8, 3)]),
        (codes, factors, [(12, 2), (8, 4)]),
        (codes, factors, [(8, 7), (0, 2)]),
        (torch.zeros(1, 2, 5, 9, dtype=torch.uint8), factors, [(8, 9)]),
        (torch.zeros(1, 2, 5, 129, dtype=torch.uint8), factors, [(1032, 1)]),
        (codes.int(), factors, runs),
        (codes, factors.float(), runs),
        (codes, factors[:, :, :4], runs),
        (codes.to("meta"), factors, runs),
    ):
        with pytest.raises(ValueError, match="expected"):
            scaled_levels(*wrong, TABLES)


# --- the nearest levels ---


@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_codes_of_all_widths_are_as_expected(runs: Runs) -> None:
    for rows in (1, 37):
        values = numbers(runs, rows)
        for made, expected in zip(nearest(values, runs, TABLES), nearest_of(values, runs), strict=True):
            assert torch.equal(made, expected)


def test_numbers_with_gaps_and_gradients_are_coded() -> None:
    values = numbers([(16, 3)], 10).T.contiguous().T.requires_grad_()
    codes, levels = nearest(values, [(16, 3)], TABLES)
    assert torch.equal(codes, nearest_of(values.detach(), [(16, 3)])[0])
    assert not levels.requires_grad


def test_numbers_that_do_not_fit_are_refused() -> None:
    values = torch.zeros(3, 24)
    for wrong, runs in (
        (values, [(16, 3)]),
        (values, [(12, 3), (12, 2)]),
        (values, [(24, 9)]),
        (values, [(24, 0)]),
        (values.double(), [(24, 3)]),
        (values.to("meta"), [(24, 3)]),
    ):
        with pytest.raises(ValueError, match="expected"):
            nearest(wrong, runs, TABLES)
    assert nearest(values[:0], [(24, 3)], TABLES)[0].shape == (0, 24)
