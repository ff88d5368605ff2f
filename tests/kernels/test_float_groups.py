"""Groups of short floats: the least squared error of all scales, by a search in float64 over every byte.

The error is that of the weights as they are enlarged before, those of NVFP4 by two thirds of a percent, and in MXFP4 it
counts by the square of the weight, unless columns count unequally.
"""

from __future__ import annotations

import gguf
import hard_weights
import numpy as np
import numpy.typing as npt
import pytest
import torch
from closeness import F32_FEW, F32_MATRIX, F32_SOLVED, F32_SUM, F64_SUM, SMALLEST, approx, each_near

from pqweights.kernels.groups import BEST, FLOAT_GAINS, FloatRule

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

SIZES = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
BITS = {"mxfp4": 4, "mxfp8": 8, "nvfp4": 4}

E4M3: Doubles = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
E8M0: Doubles = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).double().numpy()
# gguf has the values of E2M1 twice as large, as integers.
E2M1: Doubles = np.array(gguf.quants.MXFP4.kvalues, np.float64) / 2


def rule(kind: str, name: str = BEST, unit: float = 1.0) -> FloatRule:
    return FloatRule(kind, BITS[kind], SIZES[kind], name, unit)


def weights(kind: str, seed: int = 0) -> Floats:
    """Some groups of each of three kinds of weights, [groups, size]."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((40, SIZES[kind]))
    tails = rng.standard_t(3, (40, SIZES[kind]))
    sizes = np.exp(rng.uniform(-5, 0, (80, 1)))
    return (np.concatenate([normal, tails]) * sizes).astype(np.float32)


def decoded(kind: str, codes: npt.NDArray[np.uint8], scales: Floats, unit: float) -> Doubles:
    """The weights as the formats define them."""
    elements = E2M1 if kind != "mxfp8" else E4M3
    of_group = (E4M3 if kind == "nvfp4" else E8M0)[scales.astype(np.uint8)]
    return elements[codes] * (of_group * np.float64(np.float32(unit)))[:, None]


def enlarged(kind: str, values: Floats) -> Doubles:
    """What codes and scales are chosen for."""
    return values.astype(np.float64) * FLOAT_GAINS.get(kind, 1)


def counts(kind: str, values: Floats) -> Doubles:
    """How much the errors of weights count, if all columns count alike."""
    return values.astype(np.float64) ** 2 if kind == "mxfp4" else np.ones(values.shape)


def least_errors(kind: str, values: Doubles, unit: float, importance: Doubles | float = 1.0) -> Doubles:
    """The least squared error of each group, over all bytes of scales."""
    magnitudes = np.abs(values)
    elements = np.unique(np.abs(E2M1 if kind != "mxfp8" else E4M3[np.isfinite(E4M3)]))
    middles = (elements[1:] + elements[:-1]) / 2
    scales = E4M3[1:127] if kind == "nvfp4" else E8M0[100:140]
    errors = []
    for scale in scales * np.float64(np.float32(unit)):
        nearest = elements[np.searchsorted(middles, magnitudes / scale)] * scale
        errors.append((importance * (magnitudes - nearest) ** 2).sum(axis=-1))
    return np.min(errors, axis=0)


CASES = [("mxfp4", 1.0), ("mxfp8", 1.0), ("nvfp4", 1.0), ("nvfp4", 1 / 300)]


@pytest.mark.parametrize(("kind", "unit"), CASES)
def test_no_scale_is_better(kind: str, unit: float) -> None:
    values = weights(kind)
    groups = rule(kind, unit=unit).quantize(values.reshape(-1))
    back = decoded(kind, groups.codes, groups.scales, unit)
    assert each_near(rule(kind, unit=unit).decode(groups), back, F32_FEW)
    errors = ((values - back) ** 2).sum(axis=1)
    assert each_near(groups.errors, errors, F32_SUM)
    assert each_near(groups.energies, (values.astype(np.float64) ** 2).sum(axis=1), F64_SUM)
    errors = (counts(kind, values) * (enlarged(kind, values) - back) ** 2).sum(axis=1)
    least = least_errors(kind, enlarged(kind, values), unit, counts(kind, values))
    # The scales that are tried hold the best one for nearly all groups.
    assert (errors >= least * (1 - F64_SUM)).all()
    assert (errors <= least * 1.00001).mean() > 0.97 and errors.sum() < 1.002 * least.sum()


@pytest.mark.parametrize("kind", SIZES)
def test_importance_weighs_the_errors_of_columns(kind: str) -> None:
    size = SIZES[kind]
    values, importance = weights(kind).reshape(-1, 2 * size), np.ones(2 * size, np.float32)
    importance[: size // 2] = 100
    plain, weighted = (
        rule(kind).quantize(values.reshape(-1)),
        rule(kind).quantize_weighted(values.reshape(-1), importance),
    )
    factors = np.tile(importance.reshape(2, size), (len(values), 1)).astype(np.float64)
    found = [
        (
            factors * (enlarged(kind, values).reshape(-1, size) - decoded(kind, groups.codes, groups.scales, 1.0)) ** 2
        ).sum(axis=1)
        for groups in (plain, weighted)
    ]
    assert (found[1] <= found[0] * 1.00001).all()
    least = least_errors(kind, enlarged(kind, values).reshape(-1, size), 1.0, factors)
    assert found[1].sum() < 1.02 * least.sum()
    alike = rule(kind).quantize_weighted(values.reshape(-1), np.full(2 * size, 7, np.float32))
    if kind == "mxfp4":
        assert (alike.errors <= plain.errors * (1 + F32_SUM)).all() and alike.errors.sum() < plain.errors.sum()
    else:
        assert np.array_equal(alike.codes, plain.codes) and np.array_equal(alike.scales, plain.scales)


@pytest.mark.parametrize("kind", SIZES)
def test_a_group_depends_on_no_other_and_any_number_is_taken(kind: str) -> None:
    values = weights(kind)
    whole = rule(kind).quantize(values.reshape(-1))
    for count in (0, 1, 15, 16, 17, 33):
        some = rule(kind).quantize(np.ascontiguousarray(values[-count:] if count else values[:0]).reshape(-1))
        for name in ("codes", "scales", "energies", "errors"):
            assert np.array_equal(getattr(some, name), getattr(whole, name)[len(values) - count :])


@pytest.mark.parametrize("kind", SIZES)
def test_hard_weights_have_finite_numbers_and_no_larger_error_than_with_mlx(kind: str) -> None:
    values = hard_weights.all_families(SIZES[kind])
    values = values[np.abs(values).max(axis=1) < 1e30]
    ours, theirs = (rule(kind, name).quantize(np.ascontiguousarray(values).reshape(-1)) for name in (BEST, "mlx"))
    assert np.isfinite(rule(kind).decode(ours)).all() and np.isfinite(ours.errors).all()
    weighs = counts(kind, values)
    errors = [(weighs * (enlarged(kind, values) - rule(kind).decode(g)) ** 2).sum(axis=1) for g in (ours, theirs)]
    assert (errors[0] <= errors[1] * (1 + F32_SUM) + SMALLEST**2).all()


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_products_with_normal_weights_keep_their_size(kind: str) -> None:
    """Least squares alone make them smaller by the share that is the error, a percent."""
    values = np.random.default_rng(1).standard_normal((4096, SIZES[kind]), np.float32)
    back = rule(kind).decode(rule(kind).quantize(values.reshape(-1)))
    assert (values * back).sum() / (values * values).sum() == approx(1, 0, 1.5 * F32_SOLVED)


@pytest.mark.parametrize("unit", [1.0, 3e-3])
def test_rule_of_a_runtime_counts_scales_in_units(unit: float) -> None:
    values = weights("nvfp4")
    groups = rule("nvfp4", "compressed-tensors", unit).quantize(values.reshape(-1))
    errors = np.square(values - decoded("nvfp4", groups.codes, groups.scales, unit)).sum(axis=1)
    assert each_near(groups.errors, errors, F32_MATRIX)
    assert errors.sum() < 0.02 * groups.energies.sum()
    assert groups.energies.sum() == approx(np.square(values, dtype=np.float64).sum(), F32_FEW)
