"""Groups to integers: the kernels against a numpy reference bit by bit, the rules of runtimes against the runtimes."""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import replace
from typing import Any

import helpers
import numpy as np
import numpy.typing as npt
import pytest
from blocks import examples, same_bits
from closeness import F32_FEW, F64_SUM, each_near, near, rounding
from export_decoders import untiled
from hard_weights import LARGEST, all_families, counts, errors_that_count, families, nearest_bf16
from hypothesis import example, given
from hypothesis import strategies as st

from pqweights.common.dtypes import from_float32, to_float32
from pqweights.kernels.groups import (
    BEST,
    FLOAT_MODES,
    MOST_WEIGHTS,
    RUNTIME_RULES,
    FloatRule,
    GroupRule,
    Groups,
    _empty_groups,
    pack_bits,
    pack_tiles,
    rotate,
    round_groups,
)

Floats = npt.NDArray[np.float32]

BITS = range(2, 9)
# symmetric, middle, zeros
KINDS = {
    "affine from 0": (False, False, False),
    "affine from middle": (False, True, False),
    "symmetric": (True, True, False),
    "asymmetric": (False, False, True),
}
KIND_OF_RUNTIME = {
    "mlx": "affine from 0",
    "torchao": "affine from middle",
    "compressed-tensors": "symmetric",
    "compressed-tensors-asymmetric": "asymmetric",
}


def best(kind: str, bits: int, size: int, scale_dtype: str = "BF16") -> GroupRule:
    return rule_of(bits, size, kind, BEST, scale_dtype)


def rule_of(bits: int, size: int, kind: str, rule: str, scale_dtype: str = "BF16") -> GroupRule:
    symmetric, middle, zeros = KINDS[kind]
    return GroupRule(
        bits=bits, group_size=size, symmetric=symmetric, middle=middle, zeros=zeros, rule=rule, scale_dtype=scale_dtype
    )


def nearest_of(dtype: str, numbers: Floats) -> Floats:
    """The nearest numbers of BF16 or F16, saturated."""
    if dtype == "BF16":
        return nearest_bf16(numbers)
    return np.clip(numbers, -65504, 65504).astype(np.float16).astype(np.float32)


def errors_of_range(rule: GroupRule, values: Floats) -> npt.NDArray[np.float64]:
    """Weighted squared errors, scale and offset being those of the range of the weights, rounded as they are stored."""
    wide, half = values.reshape(-1, rule.group_size).astype(np.float64), 2 ** (rule.bits - 1)
    smallest, largest = wide.min(1, keepdims=True), wide.max(1, keepdims=True)
    lowest = np.full_like(smallest, -half if rule.symmetric or rule.middle else 0)
    if rule.symmetric:
        scale, offset = np.where(-smallest >= largest, -smallest, -largest) / half, np.zeros_like(smallest)
    elif rule.zeros:
        smallest, largest = np.minimum(smallest, 0), np.maximum(largest, 0)
        scale, offset = (largest - smallest) / (2 * half - 1), np.zeros_like(smallest)
        lowest = np.rint(smallest / np.where(scale == 0, 1, scale))
    else:
        scale = (largest - smallest) / (2 * half - 1)
        offset = smallest + half * scale if rule.middle else smallest
    scale, offset = (nearest_of(rule.scale_dtype, numbers).astype(np.float64) for numbers in (scale, offset))
    codes = np.clip(np.rint((wide - offset) / np.where(scale == 0, 1, scale)), lowest, lowest + 2 * half - 1)
    return np.asarray((counts(wide, rule) * (wide - codes * scale - offset) ** 2).sum(1))


def quantize(rule: GroupRule, values: Floats) -> Groups:
    return rule.quantize(np.ascontiguousarray(values).reshape(-1))


FIELDS = ("codes", "scales", "offsets", "energies", "errors")


def arrays(groups: Any) -> list[npt.NDArray[Any]]:
    return [getattr(groups, name) for name in FIELDS]


def assert_same_groups(ours: Any, truth: Any, where: object = "") -> None:
    for name, a, b in zip(FIELDS, arrays(ours), arrays(truth), strict=True):
        assert same_bits(a, b), (name, where)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_begin_at_any_address(kind: str) -> None:
    """At any address that 4 divides."""
    rule, count = best(kind, 5, 64), 33 * 64
    there = np.resize(families(64)["heavy tails"].reshape(-1), count)
    truth = rule.quantize(there)
    for offset in range(16):
        values = np.empty(count + 16, np.float32)[offset : offset + count]
        values[:] = there
        assert_same_groups(rule.quantize(values), truth, offset)


# --- least squares ---


def assert_sound(rule: GroupRule, values: Floats, where: object = "") -> None:
    """Check that numbers are finite, codes in range, and errors those of the decoded weights."""
    groups = quantize(rule, values)
    for name, numbers in (("scales", groups.scales), ("offsets", groups.offsets)):
        assert np.isfinite(numbers).all(), (name, where)
        assert same_bits(nearest_of(rule.scale_dtype, numbers), numbers), (name, where)
    assert (np.abs(groups.scales) >= 2.0**-126).all(), where
    assert int(groups.codes.max()) < 2**rule.bits, where
    if rule.symmetric:
        assert not groups.offsets.any(), where
    if rule.zeros:
        assert np.isin(groups.offsets, np.arange(2**rule.bits)).all() and (groups.scales > 0).all(), where
    decoded = rule.decode(groups)
    assert np.isfinite(decoded).all(), where
    wide = values.reshape(decoded.shape).astype(np.float64)
    assert each_near(groups.energies, (wide**2).sum(axis=1), F64_SUM), where
    errors = ((wide - decoded) ** 2).sum(axis=1)
    # The kernel divides a group by the power of two of its largest weight. What then is below the smallest number of
    # float32, 2**-149, is 0, and so is what it adds to the error.
    lost = wide.shape[1] * groups.energies * 2.0**-298
    assert (near(groups.errors, errors, F32_FEW) | (np.maximum(groups.errors, errors) <= lost)).all(), where


ORDINARY = ("gaussian", "heavy tails", "one outlier", "positive", "negative")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "BF16") for kind in KINDS), ("symmetric", "F16"), ("asymmetric", "F16")]
)
def test_every_family_has_finite_numbers_and_true_errors(kind: str, dtype: str, bits: int) -> None:
    """In groups of all sizes."""
    for size in range(16, MOST_WEIGHTS + 1, 16):
        for name, values in families(size).items() if size in (16, 128, 256) else [("all", all_families(size))]:
            rule = best(kind, bits, size, dtype)
            assert_sound(rule, values, (name, size))
            if name in ORDINARY:
                found = errors_that_count(values, rule, quantize(rule, values))
                assert found.sum() <= errors_of_range(rule, values).sum(), name


some_floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-126, LARGEST, -LARGEST, 0.0125]),
)
# Short lists are repeated: constant groups, few values, ties.
some_groups = st.lists(st.lists(some_floats, min_size=1, max_size=64), min_size=1, max_size=20)
any_rule = st.builds(best, st.sampled_from(list(KINDS)), st.integers(2, 8), st.sampled_from([16, 32, 64, 80]))


def made_of(lists: list[list[float]], size: int) -> Floats:
    return np.array([list(itertools.islice(itertools.cycle(few), size)) for few in lists], dtype=np.float32)


@examples(200)
@given(some_groups, any_rule)
@example([[2.0, 1.4e-45]], best("symmetric", 4, 16))
def test_property_any_groups_have_finite_numbers_and_true_errors(lists: list[list[float]], rule: GroupRule) -> None:
    assert_sound(rule, made_of(lists, rule.group_size))


@examples(50)
@given(some_groups, any_rule, st.randoms(use_true_random=False), st.lists(st.integers(0, 60), max_size=4))
def test_property_a_group_is_independent_of_other_groups(
    lists: list[list[float]], rule: GroupRule, random: Any, cuts: list[int]
) -> None:
    """Of its neighbours, its place, and the number of groups in a call."""
    own = made_of(lists, rule.group_size)
    values = np.concatenate([own, families(rule.group_size)["mixed scales"], families(rule.group_size)["constant"]])
    whole = arrays(quantize(rule, values))
    order = list(range(len(values)))
    random.shuffle(order)
    for a, b in zip(arrays(quantize(rule, values[order])), whole, strict=True):
        assert same_bits(a, b[order])
    places = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [arrays(quantize(rule, values[a:b])) for a, b in itertools.pairwise(places)]
    for i, array in enumerate(whole):
        assert same_bits(np.concatenate([part[i] for part in parts]), array)


whole_weights = st.lists(st.integers(-(2**12), 2**12), min_size=16, max_size=16)


@examples(100)
@given(whole_weights, st.sampled_from(list(KINDS)), st.integers(2, 8), st.integers(-90, 90))
def test_property_a_power_of_two_scales_the_scales_and_keeps_the_codes(
    few: list[int], kind: str, bits: int, k: int
) -> None:
    """Offsets that are not codes are scaled, too. A constant group has the scale 1."""
    values, rule = np.array(few, dtype=np.float32), best(kind, bits, 16)
    before, after = rule.quantize(values), rule.quantize(values * np.float32(2.0**k))
    if len(set(few)) == 1:
        return
    assert same_bits(before.codes, after.codes)
    factor = np.float32(2.0**k)
    offsets = before.offsets if rule.zeros else before.offsets * factor
    assert same_bits(before.scales * factor, after.scales) and same_bits(offsets, after.offsets)
    assert np.array_equal(before.errors * 4.0**k, after.errors)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [16, 128])
def test_constant_groups_are_restored(kind: str, bits: int, size: int) -> None:
    """BF16 constants exactly, others to the nearest BF16; without offset, not near the float32 limits."""
    rng = np.random.default_rng(bits)
    constants = (rng.choice([-1, 1], 200) * 10.0 ** rng.uniform(-30, 36, 200)).astype(np.float32)
    ends = np.array([0.0, -0.0, 2.0**-133, -(2.0**-126), 1e-40, -3.38e38, LARGEST, -LARGEST], dtype=np.float32)
    rule = best(kind, bits, size)
    for numbers in (constants, constants[:0] if rule.symmetric or rule.zeros else ends):
        for values in (nearest_bf16(numbers), numbers):
            decoded = rule.decode(quantize(rule, np.repeat(values, size)))
            assert (decoded == decoded[:, :1]).all()
            bound = np.abs(nearest_bf16(values).astype(np.float64) - values)
            assert (np.abs(decoded[:, 0].astype(np.float64) - values) <= bound).all()
            if values is not numbers:
                assert np.array_equal(decoded[:, 0], values)
    zeros = quantize(rule, np.zeros(2 * size, np.float32))
    assert zeros.scales.tolist() == [1, 1] and not zeros.errors.any() and not zeros.energies.any()
    assert set(zeros.codes.reshape(-1).tolist()) == {2 ** (bits - 1) if rule.middle or rule.zeros else 0}


# Relative squared error of Gaussian weights in groups of 128, as measured.
GAUSSIAN = {
    "affine from 0": {2: 0.1132, 3: 0.03209, 4: 0.008258, 5: 0.002041, 6: 5.044e-4, 7: 1.266e-4, 8: 3.244e-5},
    "affine from middle": {2: 0.1132, 3: 0.03208, 4: 0.008249, 5: 0.002033, 6: 4.981e-4, 7: 1.234e-4, 8: 3.108e-5},
    "asymmetric": {2: 0.1376, 3: 0.03598, 4: 0.009175, 5: 0.002243, 6: 5.422e-4, 7: 1.323e-4, 8: 3.269e-5},
    "symmetric": {2: 0.1415, 3: 0.03626, 4: 0.009583, 5: 0.002477, 6: 6.214e-4, 7: 1.545e-4, 8: 3.861e-5},
}  # fmt: skip


@functools.cache
def gaussian_weights() -> Floats:
    return helpers.gaussian(2**20, seed=5, scale=1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_gaussian_weights_have_a_smaller_error_than_by_their_range(kind: str, bits: int) -> None:
    rule = best(kind, bits, 128)
    groups = rule.quantize(gaussian_weights())
    measured = groups.errors.sum() / groups.energies.sum()
    assert abs(measured / GAUSSIAN[kind][bits] - 1) < 0.01
    found = errors_that_count(gaussian_weights(), rule, groups)
    assert found.sum() <= 0.945 * errors_of_range(rule, gaussian_weights()).sum()


# --- the rules of the runtimes ---


def bf16_families(size: int) -> dict[str, Floats]:
    """The families as BF16 weights."""
    return {name: nearest_bf16(values) for name, values in families(size).items()}


def rounded_as(runtime: str, values: Floats, bits: int, scale_dtype: str = "BF16") -> Groups:
    return quantize(rule_of(bits, values.shape[1], KIND_OF_RUNTIME[runtime], runtime, scale_dtype), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_rule_of_mlx_is_that_of_mlx(size: int, bits: int) -> None:
    """mx.quantize of BF16 weights, and its packing."""
    import mlx.core as mx

    for name, values in bf16_families(size).items():
        weights = mx.array((values.view(np.uint32) >> 16).astype(np.uint16)).view(mx.bfloat16)
        words, scales, biases = mx.quantize(weights, group_size=size, bits=bits, stream=mx.cpu)
        scales, biases = (np.array(numbers.astype(mx.float32)).reshape(-1) for numbers in (scales, biases))
        groups = rounded_as("mlx", values, bits)
        assert same_bits(groups.scales, scales) and same_bits(groups.offsets, biases), name
        assert pack_bits(groups.codes, bits).tobytes() == np.array(words).tobytes(), name


@pytest.mark.parametrize(("kind", "bits", "size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_the_floating_modes_of_mlx_are_those_of_mlx(kind: str, bits: int, size: int) -> None:
    """Codes, scale bytes and decoded weights match within the range of the mode; beyond it mlx overflows."""
    import mlx.core as mx

    rule, reach = FloatRule(kind, bits, size), 448 * 6 if kind == "nvfp4" else 1e30
    for name, values in bf16_families(size).items():
        most = np.abs(values).max(axis=1)
        values = values[(most == 0) | ((most > 1e-30) & (most <= reach))]
        if not len(values):
            continue
        values = np.resize(values, (64, size))
        weights = mx.array((values.view(np.uint32) >> 16).astype(np.uint16)).view(mx.bfloat16)
        words, scales = mx.quantize(weights, group_size=size, bits=bits, mode=kind, stream=mx.cpu)
        groups = rule.quantize(values.reshape(-1))
        assert np.array_equal(groups.scales, np.array(scales).reshape(-1)), name
        assert pack_bits(groups.codes, bits).tobytes() == np.array(words).tobytes(), name
        decoded = mx.dequantize(words, scales, group_size=size, bits=bits, mode=kind, dtype=mx.float32, stream=mx.cpu)
        assert np.array_equal(rule.decode(groups), np.array(decoded)), name
        wide = values.astype(np.float64)
        assert each_near(groups.energies, (wide**2).sum(axis=1), F64_SUM), name
        assert each_near(groups.errors, ((wide - rule.decode(groups)) ** 2).sum(axis=1), F32_FEW), name


@pytest.fixture(scope="module")
def torchao_primitives() -> Any:
    """The functions of torchao that the rule repeats."""
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    from torchao.quantization import quant_primitives

    return quant_primitives


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_the_rule_of_torchao_is_that_of_torchao(size: int, torchao_primitives: Any) -> None:
    """The functions behind its tinygemm layout, on BF16 weights. Where a range overflows, both results overflow."""
    import torch

    how = (torch.int32, 0, 15)
    for name, values in bf16_families(size).items():
        weights = torch.from_numpy(values).bfloat16()
        scales, zeros = torchao_primitives._choose_qparams_affine_tinygemm(
            weights,
            torchao_primitives.MappingType.ASYMMETRIC,
            (1, size),
            *how,
            scale_dtype=torch.bfloat16,
            zero_point_dtype=torch.bfloat16,
        )
        codes = torchao_primitives._quantize_affine_tinygemm(weights, (1, size), scales, zeros, *how)
        groups = rounded_as("torchao", values, 4)
        finite = np.isfinite(groups.scales)
        assert finite.all() == (name != "near the largest")
        assert same_bits(groups.scales, scales.float().numpy().reshape(-1)), name
        assert same_bits(groups.offsets[finite], zeros.float().numpy().reshape(-1)[finite]), name
        assert np.array_equal(groups.codes[finite], codes.numpy()[finite]), name


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("runtime", ["compressed-tensors", "compressed-tensors-asymmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, 128, 256])
def test_the_rules_of_compressed_tensors_are_those_of_compressed_tensors(
    size: int, bits: int, runtime: str, dtype: str
) -> None:
    """Of weights in BF16 or F16, whose dtype scales get. Of F16, where no range overflows."""
    import compressed_tensors.quantization as quantization
    import torch
    from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    symmetric, half = runtime == "compressed-tensors", 2 ** (bits - 1)
    args = quantization.QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=size
    )
    for name, values in bf16_families(size).items():
        weights = torch.from_numpy(values).bfloat16()
        if dtype == "F16":
            weights = weights.clip(-3e4, 3e4).half()
        scales, zeros = calculate_qparams(weights.amin(1, keepdim=True), weights.amax(1, keepdim=True), args)
        codes = their_quantize(weights, scales, zeros, args).float().numpy() + half
        groups = rounded_as(runtime, weights.float().numpy(), bits, dtype)
        assert same_bits(groups.scales, scales.float().numpy().reshape(-1)), name
        theirs = np.zeros_like(groups.offsets) if symmetric else zeros.float().numpy().reshape(-1) + half
        assert np.array_equal(groups.offsets, theirs), name
        assert np.array_equal(groups.codes, codes), name


@pytest.mark.parametrize("runtime", RUNTIME_RULES)
def test_errors_by_the_rules_of_runtimes_are_those_of_what_is_decoded(runtime: str) -> None:
    """Without the families of which a runtime makes scales of 0 (weights far below its 1e-7, subnormal weights)."""
    for size, name in itertools.product((16, 128), ("gaussian", "heavy tails", "one outlier", "far from zero", "1e37")):
        values = bf16_families(size)[name]
        groups = rounded_as(runtime, values, 4)
        decoded = rule_of(4, size, KIND_OF_RUNTIME[runtime], runtime).decode(groups)
        wide = values.astype(np.float64)
        assert each_near(groups.energies, (wide**2).sum(axis=1), F64_SUM), name
        assert each_near(groups.errors, ((wide - decoded) ** 2).sum(axis=1), F32_FEW), name


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_rows_get_the_scale_of_least_error_of_eight(dtype: str) -> None:
    """It is never larger than by the rule of compressed-tensors, whose BF16 quotients cost a tenth more."""
    for name in ("gaussian", "heavy tails", "one outlier", "far from zero", "zeros"):
        values = np.resize(bf16_families(128)[name], (37, 2000)) * np.float32(2.0**-4)
        rule = GroupRule(bits=8, group_size=2000, symmetric=True, middle=True, scale_dtype=dtype)
        found = rule.quantize(values.reshape(-1))
        wide, most = values.astype(np.float64), np.abs(values).max(axis=1)
        shares = np.float32(127.5) * (1 + np.arange(8, dtype=np.float32) / 64)
        scales = to_float32(from_float32((most[:, None] / shares).reshape(-1), dtype), dtype).reshape(37, 8)
        scales[scales == 0] = 2.0 ** (-10 if dtype == "F16" else -7)
        steps = np.clip(np.rint(values[:, None] / scales[..., None]), -128, 127)
        errors = ((wide[:, None] - steps * scales[..., None].astype(np.float64)) ** 2).sum(axis=2)
        assert each_near(found.errors, errors.min(axis=1), F32_FEW), name
        assert each_near(found.errors, ((wide - rule.decode(found)) ** 2).sum(axis=1), F32_FEW), name
        other = replace(rule, rule="compressed-tensors").quantize(values.reshape(-1))
        assert found.errors.sum() <= other.errors.sum() * (0.92 if (name, dtype) == ("gaussian", "BF16") else 1), name


# --- rotation ---


def test_rotating_multiplies_by_the_sylvester_matrix() -> None:
    """To within nine roundings (seven sums, a product, the factor) of 2**-24 of the sum of magnitudes, each way."""
    normal = np.concatenate([families(128)[name] for name in ("gaussian", "one outlier", "heavy tails", "zeros")])
    values = normal.reshape(-1).copy()
    rotate(values)
    wide = normal.astype(np.float64)
    bound = rounding("F32", 9) * np.abs(wide).sum(axis=1, keepdims=True)
    exact = wide @ helpers.sylvester() / np.sqrt(128)
    assert (np.abs(values.reshape(-1, 128) - exact) <= bound / np.sqrt(128)).all()
    assert np.abs(exact).max() > 1e3 * bound.max()
    rotate(values)
    assert (np.abs(values.reshape(-1, 128) - wide) <= 2 * bound).all()


@pytest.mark.parametrize("size", [1, 5, 16, 24, 31])
@pytest.mark.parametrize("rule", [*RUNTIME_RULES, *FLOAT_MODES])
def test_rules_take_groups_of_any_size(rule: str, size: int) -> None:
    """A group that is there twice has the same scale, offset and codes; 37 groups are not a multiple of 16."""
    values = np.resize(np.concatenate(list(bf16_families(48).values())), (37, size)) * np.float32(2.0**-4)

    def rounded(values: Floats) -> Groups:
        out = _empty_groups(values.reshape(-1), values.shape[1])
        round_groups(values.reshape(-1), out, bits=4, rule=(RUNTIME_RULES | FLOAT_MODES)[rule])
        return out

    once, twice = rounded(values), rounded(np.tile(values, (1, 2)))
    assert same_bits(once.scales, twice.scales) and same_bits(once.offsets, twice.offsets)
    assert same_bits(np.tile(once.codes, (1, 2)), twice.codes)
    wide = values.astype(np.float64)
    assert each_near(once.energies, (wide**2).sum(axis=1), F64_SUM)
    for group in (0, 15, 16, 36):
        for one, all_of_them in zip(arrays(rounded(values[group : group + 1])), arrays(once), strict=True):
            assert same_bits(one[0], all_of_them[group])


# --- packings ---


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_are_packed_as_one_stream(bits: int) -> None:
    for shape in ((0, 8), (1, 8), (3, 24), (16, 256)):
        codes = np.random.default_rng(bits).integers(0, 2**bits, shape).astype(np.uint8)
        digits = (codes.reshape(-1, 1) >> np.arange(bits, dtype=np.uint8)) & 1
        assert same_bits(pack_bits(codes, bits), np.packbits(digits, bitorder="little"))
    # The example in the documentation of Parquet's encodings.
    assert pack_bits(np.arange(8, dtype=np.uint8), 3).tolist() == [0b10001000, 0b11000110, 0b11111010]


@pytest.mark.parametrize("shape", [(8, 128), (8, 384), (24, 128), (40, 512)])
def test_tiles_are_those_of_tinygemm(shape: tuple[int, int]) -> None:
    codes = np.random.default_rng(shape[0]).integers(0, 16, shape).astype(np.uint8)
    words = pack_tiles(codes).view(np.int32).reshape(shape[0] // 8, shape[1] // 128, 32, 4)
    assert np.array_equal(untiled(words), codes)


def test_tiles_multiply_correctly_in_the_pytorch_kernel() -> None:
    """Thread 4 * (n % 8) + k % 8 / 2 of a tile, word k / 32 % 4; in it, k / 8 % 4, and 4 more where k is odd."""
    codes, rng = np.zeros((16, 256), np.uint8), np.random.default_rng(1)
    for n, k in zip(rng.integers(0, 16, 50), rng.integers(0, 256, 50), strict=True):
        codes[n, k] = 15
        words = pack_tiles(codes).view(np.uint32).reshape(2, 2, 32, 4)
        word = words[n // 8, k // 128, 4 * (n % 8) + k % 8 // 2, k // 32 % 4]
        assert np.count_nonzero(words) == 1 and word == 15 << 4 * (k // 8 % 4 + 4 * (k % 2))
        codes[n, k] = 0


# --- what is refused ---


def test_arrays_that_cannot_be_rotated_or_packed_are_refused() -> None:
    codes = np.zeros((8, 256), np.uint8)
    for wrong in (
        lambda: rotate(np.zeros(256)),
        lambda: rotate(np.zeros(512, np.float32)[::2]),
        lambda: rotate(np.zeros(257, np.float32)),
        lambda: rotate(np.frombuffer(bytes(1024), np.float32)),
        *(lambda shape=shape: pack_tiles(np.zeros(shape, np.uint8)) for shape in ((12, 128), (8, 192))),
        *(lambda wrong=wrong: pack_tiles(wrong) for wrong in (codes[:, ::2], codes.astype(np.float16))),
        *(
            lambda wrong=wrong: pack_bits(wrong, 4)
            for wrong in (codes[:, ::2], codes.astype(np.float16), codes[0, :12])
        ),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()


@pytest.mark.parametrize("rule", [BEST, "torchao"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_pytorch_multiplies_by_the_decoded_weights(rule: str, size: int) -> None:
    """PyTorch's 4-bit product on the CPU, which packs codes in its own order, with our codes, scales and zeros."""
    import torch

    rows, columns = 64, 512
    weights, x = helpers.gaussian(rows, columns, seed=1), helpers.gaussian(32, columns, seed=2, scale=1)
    x = nearest_bf16(x)
    how = rule_of(4, size, "affine from middle", rule)
    groups = quantize(how, nearest_bf16(weights))
    codes = torch.from_numpy(groups.codes.reshape(rows, columns).astype(np.int32))
    numbers = np.stack([groups.scales, groups.offsets], axis=-1).reshape(rows, columns // size, 2)
    numbers = torch.from_numpy(numbers).bfloat16().transpose(0, 1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.from_numpy(x).bfloat16(), packed, size, numbers)
    exact = x.astype(np.float64) @ how.decode(groups).reshape(rows, columns).astype(np.float64).T
    difference = product.float().numpy() - exact
    assert np.linalg.norm(difference) <= 4e-3 * np.linalg.norm(exact)
