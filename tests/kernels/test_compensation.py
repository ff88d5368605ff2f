"""Error-compensated rounding: the codes of the textbook, and errors that only fall."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from closeness import F32_FEW, F32_SUM, each_near, near
from commands import raises
from helpers import gaussian

from pqweights.kernels.compensation import (
    MomentsFactor,
    compensate,
    empty_matrix,
    errors_of,
    factorize,
    order_of,
    output_errors,
    round_tiles,
)
from pqweights.kernels.gguf_codes import with_codes
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, BlockRule, decode_blocks
from pqweights.kernels.groups import BEST, FloatRule, GroupRule, Groups, Tiles, sums_of_squares

Floats = npt.NDArray[np.float32]
AFFINE = GroupRule(bits=4, group_size=32, symmetric=False, middle=True, rule=BEST)
NVFP4 = FloatRule("nvfp4", 4, 16, BEST, unit=1 / 500)
RULES: dict[str, GroupRule | FloatRule] = {
    "torchao": AFFINE,
    "mlx": GroupRule(bits=3, group_size=64, symmetric=False, middle=False, rule=BEST),
    "vllm": GroupRule(bits=4, group_size=32, symmetric=True, middle=True, rule=BEST),
    "awq": GroupRule(bits=4, group_size=32, symmetric=False, middle=False, zeros=True, rule=BEST, scale_dtype="F16"),
    "nvfp4": NVFP4,
    "mxfp4": FloatRule("mxfp4", 4, 32, BEST),
    "mxfp8": FloatRule("mxfp8", 8, 32, BEST),
}
BLOCKS: dict[str, BlockRule] = {kind: rule for kind, rule in BLOCK_TYPES.items() if rule.is_compensated}


def started(weights: Floats, rule: GroupRule | FloatRule | BlockRule, factor: MomentsFactor) -> Groups:
    """What weights are before they are compensated."""
    if isinstance(rule, BlockRule):
        return rule.quantize_weighted(weights, factor.importance)
    return rule.quantize(weights.reshape(-1))


def inputs(size: int, rows: int = 2000, seed: int = 1) -> Floats:
    """Correlated inputs with channels of different size."""
    mixed = gaussian(rows, size, seed=seed, scale=1) @ (np.eye(size) + gaussian(size, size, seed=seed + 1, scale=0.05))
    return (mixed * np.exp(gaussian(size, seed=seed + 2, scale=0.7))).astype(np.float32)


def ready(size: int, damping: float = 0.01) -> tuple[MomentsFactor, Floats]:
    """A factor of the moments of inputs, and the moments."""
    x = inputs(size)
    moments = (x.T @ x / np.float32(len(x))).astype(np.float32)
    moments = np.tril(moments) + np.tril(moments, -1).T
    order = order_of(np.diag(moments).copy())
    matrix = empty_matrix(size)
    matrix[:, :size] = moments[np.ix_(order, order)]
    diagonal = factorize(matrix, np.diag(moments)[order].copy(), damping)
    assert diagonal is not None
    return MomentsFactor(order=order, matrix=matrix, diagonal=diagonal), moments


def damped(factor: MomentsFactor, moments: Floats) -> Floats:
    """The moments in the order of a factor, with its diagonal."""
    result = moments[np.ix_(factor.order, factor.order)].copy()
    np.fill_diagonal(result, factor.diagonal)
    return result


@pytest.mark.parametrize("size", [16, 48, 96, 128, 160])
def test_factor_is_that_of_the_moments_and_keeps_them_below_the_diagonal(size: int) -> None:
    factor, moments = ready(size)
    wanted = damped(factor, moments).astype(np.float64)
    upper = np.triu(factor.matrix[:, :size]).astype(np.float64)
    assert np.abs(upper.T @ upper - wanted).max() < F32_SUM * wanted.max()
    assert np.array_equal(np.tril(factor.matrix[:, :size], -1), np.tril(wanted, -1).astype(np.float32))
    assert not factor.matrix[:, size:].any()


def test_another_damping_gives_what_it_gives_on_fresh_moments() -> None:
    factor, moments = ready(64, 0.5)
    fresh, _ = ready(64, 0.02)
    again = factorize(factor.matrix, np.diag(moments)[factor.order].copy(), 0.02)
    assert again is not None and np.array_equal(again, fresh.diagonal)
    assert np.array_equal(factor.matrix, fresh.matrix)


@pytest.mark.parametrize("bad", [-1.0, 0.0, np.nan, np.inf])
def test_moments_that_are_not_positive_definite_have_no_factor(bad: float) -> None:
    matrix, diagonal = empty_matrix(32), np.ones(32, dtype=np.float32)
    diagonal[20] = bad
    assert factorize(matrix, diagonal, 0.0) is None


@pytest.mark.parametrize("shape", [(30, 110), (32, 95), (32, 32)])
def test_matrix_that_the_kernels_would_leave_is_refused(shape: tuple[int, int]) -> None:
    """They take four columns together, and read 64 numbers more than a row has."""
    matrix, diagonal = np.zeros(shape, dtype=np.float32), np.ones(shape[0], dtype=np.float32)
    with raises(ValueError, 4, 64):
        factorize(matrix, diagonal, 0.01)


@pytest.mark.parametrize("kind", [*RULES, *BLOCKS])
def test_errors_are_those_of_the_decoded_weights(kind: str) -> None:
    rule: GroupRule | FloatRule | BlockRule = (RULES | BLOCKS)[kind]
    size = 5 * rule.group_size  # with groups of 32, not a multiple of what the kernel takes at once
    factor, _ = ready(size)
    weights = gaussian(70, size, seed=5)
    groups, left = compensate(weights, started(weights, rule, factor), rule, factor)
    errors = weights - rule.decode(groups).reshape(weights.shape)
    assert kind != "awq" or np.isin(groups.offsets, np.arange(16)).all()
    assert np.array_equal(left.rows_of(), errors[:, factor.order])
    part = NVFP4.group_size if kind == "NVFP4" else rule.group_size  # of which a block has four
    sums = sums_of_squares(errors.reshape(-1, part)).reshape(len(groups.errors), -1)
    assert np.array_equal(groups.errors, sums.sum(axis=1))


Doubles = npt.NDArray[np.float64]


def by_passes(
    weights: Floats, rule: GroupRule | FloatRule, start: Groups, factor: MomentsFactor, repeats: int
) -> Floats:
    """W - Q in the order of the factor, [N, K], with the scales and offsets of plain rounding."""
    if isinstance(rule, FloatRule):
        scales, offsets, codes, bits = rule.factors(start), np.zeros_like(start.scales), (0, 0), rule.bits
    else:
        scales, offsets, codes, bits = start.scales, start.offsets, rule.limits, 0
        offsets = -offsets * scales if rule.zeros else offsets
    rows = len(weights)
    numbers = [Tiles.of(each.reshape(rows, -1), 1.0).values for each in (scales, offsets)]
    errors, _ = round_tiles(
        Tiles.of(weights[:, factor.order]).values,
        (numbers[0], numbers[1]),
        factor.order // rule.group_size,
        factor,
        codes=codes,
        kind=bits,
        repeats=repeats,
    )
    return Tiles(errors, rows).rows_of()


def textbook(weights: Doubles, moments: Doubles, scales: Doubles, offsets: Doubles, numbers: Doubles) -> Doubles:
    """GPTQ as in the paper, column by column with the Cholesky factor of the inverse, without blocks: Q, [N, K].

    moments: damped, in the order in which columns are rounded
    scales, offsets: of each weight, [N, K]
    numbers: those that codes stand for
    """
    upper = np.linalg.cholesky(np.linalg.inv(moments)).T
    left, result = weights.copy(), np.empty_like(weights)
    for k in range(weights.shape[1]):
        wanted = (left[:, k] - offsets[:, k]) / scales[:, k]
        nearest = numbers[np.abs(wanted[:, None] - numbers).argmin(axis=1)]
        result[:, k] = nearest * scales[:, k] + offsets[:, k]
        left[:, k:] -= ((left[:, k] - result[:, k]) / upper[k, k])[:, None] * upper[k, k:]
    return result


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [(AFFINE, np.arange(-8.0, 8.0)), (NVFP4, np.outer([-1, 1], [0, 0.5, 1, 1.5, 2, 3, 4, 6]).reshape(-1))],
)
def test_first_pass_gives_the_codes_of_the_textbook_except_for_ties(
    rule: GroupRule | FloatRule, numbers: Doubles
) -> None:
    size, rows = 256, 64
    factor, moments = ready(size)
    weights = gaussian(rows, size, seed=6)
    start = rule.quantize(weights.reshape(-1))
    errors = by_passes(weights, rule, start, factor, repeats=0)
    order = factor.order[::-1]
    scales = rule.factors(start) if isinstance(rule, FloatRule) else start.scales
    scales, offsets = (
        np.repeat(each.reshape(rows, -1), rule.group_size, axis=1)[:, order].astype(np.float64)
        for each in (scales, start.offsets)
    )
    wanted = textbook(
        weights[:, order].astype(np.float64),
        damped(factor, moments)[::-1, ::-1].astype(np.float64),
        scales,
        offsets,
        numbers,
    )
    same = near(weights[:, order] - errors[:, ::-1], wanted, F32_FEW, F32_FEW).all(axis=1)
    # A tie that falls to the other side changes all later codes of its row.
    assert same.mean() > 0.9


@pytest.mark.parametrize("kind", RULES)
def test_every_pass_lowers_the_damped_error_of_every_row(kind: str) -> None:
    rule, size = RULES[kind], 128
    factor, moments = ready(size)
    weights, wanted = gaussian(64, size, seed=7), damped(factor, moments).astype(np.float64)
    start = rule.quantize(weights.reshape(-1))
    before = np.full(64, np.inf)
    for repeats in range(4):
        rows = by_passes(weights, rule, start, factor, repeats).astype(np.float64)
        after = np.einsum("ij,jk,ik->i", rows, wanted, rows)
        assert (after <= before * (1 + F32_SUM)).all()
        before = after
    plain = errors_of(weights, start, rule, factor).rows_of().astype(np.float64)
    assert before.sum() < 0.8 * np.einsum("ij,jk,ik->", plain, wanted, plain)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_keep_their_scales_and_err_less_at_the_outputs_than_without_correlations(kind: str) -> None:
    rule, size = BLOCKS[kind], 512
    factor, moments = ready(size)
    weights, wanted = gaussian(64, size, seed=7), damped(factor, moments).astype(np.float64)
    plain = rule.quantize(weights.reshape(-1))
    weighed = started(weights, rule, factor)
    found, _ = compensate(weights, weighed, rule, factor)
    errors = [errors_of(weights, each, rule, factor).rows_of().astype(np.float64) for each in (plain, weighed, found)]
    of_plain, of_weighed, of_found = (np.einsum("ij,jk,ik->", rows, wanted, rows) for rows in errors)
    assert of_found < 0.8 * of_weighed < 0.8 * of_plain
    none = np.zeros((len(found.codes), rule.group_size), dtype=np.uint8)
    assert np.array_equal(with_codes(kind, found.codes, none), with_codes(kind, weighed.codes, none))


@pytest.mark.parametrize("kind", BLOCKS)
def test_without_correlations_codes_of_blocks_are_the_nearest(kind: str) -> None:
    """Of all numbers that the gguf package decodes from a block with its scales, for each weight."""
    rule, size = BLOCKS[kind], 512
    weights, matrix, ones = gaussian(64, size, seed=4), empty_matrix(size), np.ones(size, dtype=np.float32)
    diagonal = factorize(matrix, ones, 0.0)
    assert diagonal is not None
    factor = MomentsFactor(order=np.arange(size), matrix=matrix, diagonal=diagonal)
    found, _ = compensate(weights, started(weights, rule, factor), rule, factor)
    none = np.zeros((len(found.codes), rule.group_size), dtype=np.uint8)
    numbers = np.stack([decode_blocks(kind, with_codes(kind, found.codes, none + n)) for n in range(2**rule.bits)])
    least = np.abs(numbers - weights.reshape(1, -1, rule.group_size)).min(axis=0)
    assert each_near(np.abs(rule.decode(found) - weights.reshape(-1, rule.group_size)), least, F32_FEW)


def test_output_errors_are_those_of_the_product() -> None:
    x, errors = inputs(48, rows=100), gaussian(70, 48, seed=3)
    found = output_errors(Tiles.of(errors), x)
    assert each_near(found, np.square(errors.astype(np.float64) @ x.T).sum(axis=1), F32_SUM)


def test_rows_are_independent_of_each_other() -> None:
    factor, _ = ready(128)
    weights = gaussian(130, 128, seed=9)
    whole, _ = compensate(weights, AFFINE.quantize(weights.reshape(-1)), AFFINE, factor)
    for first, count in ((0, 1), (64, 66), (129, 1)):
        part = np.ascontiguousarray(weights[first : first + count])
        found, _ = compensate(part, AFFINE.quantize(part.reshape(-1)), AFFINE, factor)
        assert np.array_equal(found.codes, whole.codes.reshape(130, 4, 32)[first : first + count].reshape(-1, 32))
