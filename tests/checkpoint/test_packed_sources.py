"""Sources in the packed formats of other tools: decoded to what the libraries of the formats decode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls import export, quantize
from commands import done, raises
from packed_cases import (
    FLOATS,
    GATE,
    INTEGERS,
    MODULE,
    UP,
    assert_any_range_is_read,
    awq,
    compress,
    gptq,
    save,
    scheme,
    settings_of,
    source_of,
    tensor_of,
    transposed_source,
    values,
)

from pqweights.common.dtypes import PACKED_DTYPES
from pqweights.errors import SourceError
from pqweights.formats.packed import QuantizedTensor
from pqweights.planning.recipe import load_recipe
from pqweights.results.verify import verify

# --- compressed-tensors ---


@pytest.mark.parametrize(("group", "shape"), INTEGERS + FLOATS)
def test_compressed_tensors_are_decoded_as_by_the_library(
    group: dict[str, Any], shape: tuple[int, int], tmp_path: Path
) -> None:
    packed, expected = compress(shape, group)
    source = source_of(tmp_path / "src", packed, settings_of(group))
    tensor = tensor_of(source)
    assert tensor_of(source, GATE).dtype == "BF16"
    bits, kind = group["weights"]["num_bits"], group["format"].partition("-")[0]
    dtype = {"mxfp4": "MXFP4", "nvfp4": "NVFP4", "mxfp8": "F8_E4M3"}.get(kind, f"INT{bits}")
    assert (tensor.shape, tensor.dtype, tensor.plain_dtype) == (shape, dtype, "BF16")
    assert torch.equal(values(tensor, "BF16").reshape(shape), expected.to(torch.bfloat16))
    assert_any_range_is_read(tensor)


# Of the first and the third, 128 x 128 would give as many scales.
@pytest.mark.parametrize(
    ("tile", "shape", "more"),
    [
        ((96, 128), (192, 256), {"strategy": "block", "block_structure": [96, 128]}),
        ((64, 64), (128, 130), {"strategy": "block", "block_structure": "64x64"}),
        ((1, 100), (64, 200), {"strategy": "group", "group_size": 100}),
    ],
)
def test_tiles_of_float8_are_those_of_the_configuration(
    tile: tuple[int, int], shape: tuple[int, int], more: dict[str, Any], tmp_path: Path
) -> None:
    """compressed-tensors: quantization/lifecycle/forward.py multiplies each tile by its scale."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    counts = [-(-size // step) for size, step in zip(shape, tile, strict=True)]
    scales = torch.rand(counts, generator=generator) + 0.5
    expected = (
        codes.float() * scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]
    )
    group = scheme("float-quantized", 8, "float", **more)
    packed = {"weight": codes, "weight_scale": scales}
    source = source_of(tmp_path / "src", packed, settings_of(group))
    assert torch.equal(values(tensor_of(source), "F32").reshape(shape), expected)
    other = source_of(tmp_path / "other", {**packed, "weight_scale": torch.ones(3, 3)}, settings_of(group))
    with pytest.raises(SourceError, match=f"block of {re.escape(str(list(shape)))}"):
        tensor_of(other)


def test_groups_of_integers_are_those_of_the_configuration(tmp_path: Path) -> None:
    group = scheme("int-quantized", 8, group=32)
    packed = {"weight": torch.zeros(64, 100, dtype=torch.int8), "weight_scale": torch.ones(64, 4)}
    with pytest.raises(SourceError, match="one for each group of 32 columns"):  # not four of 25
        tensor_of(source_of(tmp_path / "src", packed, settings_of(group)))


def test_schemes_that_fit_the_same_tensors_are_told_apart_by_the_shape(tmp_path: Path) -> None:
    both = [scheme("pack-quantized", bits, group=size) for bits, size in ((4, 64), (8, 32))]
    for number, group in enumerate(both):
        columns = 256 >> number
        packed, expected = compress((40, columns), group)
        tensor = tensor_of(source_of(tmp_path / str(number), packed, settings_of(*both)))
        assert torch.equal(values(tensor, "BF16").reshape(40, columns), expected)


def test_groups_of_several_widths_are_told_apart(tmp_path: Path) -> None:
    four, eight = scheme("pack-quantized", 4, group=32), scheme("pack-quantized", 8)
    (packed, expected), (others, other) = compress((40, 96), four), compress((40, 96), eight)
    tensors = {UP.removesuffix("weight") + name: tensor for name, tensor in packed.items()}
    tensors |= {"lm_head." + name: tensor for name, tensor in others.items()}
    source = save(tmp_path / "src", tensors, settings_of(four, eight, layout="mixed-precision"))
    assert torch.equal(values(tensor_of(source), "BF16").reshape(40, 96), expected)
    assert torch.equal(values(tensor_of(source, "lm_head.weight"), "BF16").reshape(40, 96), other)


def test_large_rows_are_decoded_in_bands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuantizedTensor, "BAND_ELEMENTS", 70)
    for number, group in enumerate((scheme("pack-quantized", 3, group=32, symmetric=False), FLOATS[1][0])):
        packed, expected = compress((37, 96), group)
        tensor = tensor_of(source_of(tmp_path / str(number), packed, settings_of(group)))
        assert torch.equal(values(tensor, "BF16").reshape(37, 96), expected.to(torch.bfloat16))
        assert_any_range_is_read(tensor)


# --- ModelOpt ---


def test_nvfp4_of_modelopt_is_the_float_times_both_scales(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (40, 48), generator=generator).to(torch.uint8)
    scales, unit = (torch.rand(40, 6, generator=generator) * 400).to(torch.float8_e4m3fn), torch.tensor(0.0123)
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": unit, "input_scale": torch.tensor(1.0)}
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    tensor = tensor_of(source_of(tmp_path / "src", parts, settings))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(40, 96).int()
    floats = table[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    expected = floats * (scales.float() * unit).repeat_interleave(16, dim=1)
    assert (tensor.shape, tensor.dtype) == ((40, 96), "NVFP4")
    assert torch.equal(values(tensor, "F32").reshape(40, 96), expected)
    assert_any_range_is_read(tensor)


# --- GPTQ and AWQ ---


def assert_transposed(folder: Path, made: tuple[dict[str, Any], dict[str, Any], Any], dtype: str) -> None:
    tensors, settings, expected = made
    tensor = tensor_of(transposed_source(folder, tensors, settings))
    assert (tensor.shape, tensor.dtype, tensor.plain_dtype) == (expected.shape, dtype, "F16")
    assert np.array_equal(values(tensor, "F32").numpy().reshape(expected.shape), expected)
    assert np.array_equal(values(tensor, "F16").numpy().reshape(expected.shape), expected.astype(np.float16))
    assert_any_range_is_read(tensor)


@pytest.mark.parametrize("is_banded", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_code_minus_zero_times_scale(
    bits: int, version: str, is_banded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_banded:  # of 32 columns of the stored matrix
        monkeypatch.setattr(QuantizedTensor, "KEPT_BYTES", 96 * bits * 4)
        monkeypatch.setattr(QuantizedTensor, "BAND_ELEMENTS", 500)
    assert_transposed(tmp_path / "src", gptq(bits, version, order=is_banded), f"GPTQ{bits}")


def test_gptq_without_an_order_has_groups_of_the_configured_size(tmp_path: Path) -> None:
    tensors, settings, expected = gptq(4, "gptq")
    del tensors["g_idx"]
    assert_transposed(tmp_path / "src", (tensors, settings, expected), "GPTQ4")


@pytest.mark.parametrize("is_banded", [False, True])
def test_awq_is_code_minus_zero_times_scale(is_banded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_banded:
        monkeypatch.setattr(QuantizedTensor, "KEPT_BYTES", 96 * 16)
        monkeypatch.setattr(QuantizedTensor, "BAND_ELEMENTS", 500)
    assert_transposed(tmp_path / "src", awq(), "AWQ4")


AUTO_ROUND_LAYOUTS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptq:exllamav2": "gptq",
    "gptq:exllamav2": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:tritonv2": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
}


@pytest.mark.parametrize("layout", AUTO_ROUND_LAYOUTS)
@pytest.mark.parametrize("bits", [2, 4])
def test_auto_round_has_the_zeros_of_the_layout_that_it_names(layout: str, bits: int, tmp_path: Path) -> None:
    tensors, settings, expected = gptq(bits, AUTO_ROUND_LAYOUTS[layout])
    del tensors["g_idx"]
    key, method = ("backend", "intel/auto-round") if "exllamav2" in layout else ("packing_format", "auto-round")
    named = {"quant_method": method, key: layout, "bits": bits, "group_size": settings["group_size"], "sym": False}
    assert_transposed(tmp_path / "src", (tensors, named, expected), f"GPTQ{bits}")


@pytest.mark.parametrize("layout", ["auto_round:auto_awq", "auto_round:awq", "auto_round:awq:gemm"])
def test_auto_round_in_the_layout_of_awq_is_decoded(layout: str, tmp_path: Path) -> None:
    tensors, settings, expected = awq()
    named = {"quant_method": "auto-round", "packing_format": layout, "bits": 4, "group_size": settings["group_size"]}
    assert_transposed(tmp_path / "src", (tensors, named, expected), "AWQ4")


def test_auto_round_may_pack_a_module_in_another_width(tmp_path: Path) -> None:
    tensors, settings, expected = gptq(8, "gptq")
    del tensors["g_idx"]
    own = {MODULE: {"bits": 8, "group_size": settings["group_size"]}}
    named = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 48}
    assert_transposed(tmp_path / "src", (tensors, named | {"extra_config": own}, expected), "GPTQ8")


@pytest.mark.parametrize("named", [{"packing_format": "auto_round:fp8"}, {"data_type": "mx_fp"}, {}])
def test_auto_round_in_other_layouts_is_refused_by_name(named: dict[str, Any], tmp_path: Path) -> None:
    tensors, _, _ = gptq(4, "gptq")
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4} | named
    with raises(SourceError, "AutoRound", "packing_format"):
        tensor_of(transposed_source(tmp_path / "src", tensors, settings))


def test_gptq_groups_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    tensors, settings, _ = gptq(4, "gptq")
    tensors["g_idx"][5] = 3
    tensor = tensor_of(transposed_source(tmp_path / "src", tensors, settings))
    with raises(SourceError, f"{MODULE}.g_idx", "0 to 2", "0 to 3"):
        values(tensor, "F32")


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("stated", [-1, 48, 64, 0])
def test_gptq_groups_are_those_of_the_scales(stated: int, order: bool, tmp_path: Path) -> None:
    """A configuration states one size, and single modules may have other groups."""
    tensors, settings, expected = gptq(4, "gptq", order=order)
    assert_transposed(tmp_path / "src", (tensors, settings | {"group_size": stated}, expected), "GPTQ4")


def test_gptq_scales_of_no_groups_are_refused(tmp_path: Path) -> None:
    tensors, settings, _ = gptq(4, "gptq")
    tensors["scales"] = tensors["scales"][[0, 1, 2, 2, 2]]
    with raises(SourceError, f"'{MODULE}.scales'"):
        tensor_of(transposed_source(tmp_path / "src", tensors, settings))


# --- all of them ---


def assert_masters_hold(source: Path, folder: Path) -> None:
    """Quantize, verify and export a source to BF16, and compare with its values."""
    shown = " ".join(done("plan", source).stdout.split())
    bits, called = PACKED_DTYPES[tensor_of(source, UP).dtype]
    assert f"1 weight already quantized to {bits} bits by {called}: " in shown
    for recipe, most in (("q5", 5e-3), ("t4", 2e-2)):
        quantize(source, folder / recipe, load_recipe(recipe), threads=1)
        assert verify(folder / recipe, threads=1).ok
        export(folder / recipe, folder / f"{recipe}-bf16", "bf16", threads=1)
        original, result = (values(tensor_of(at, UP), "F32") for at in (source, folder / f"{recipe}-bf16"))
        assert (result - original).square().sum() < most * original.square().sum()


@pytest.mark.parametrize("group", [INTEGERS[2][0], FLOATS[1][0]])
def test_masters_of_compressed_tensors(group: dict[str, Any], tmp_path: Path) -> None:
    packed, _ = compress((256, 256), group)
    assert_masters_hold(source_of(tmp_path / "src", packed, settings_of(group)), tmp_path)


@pytest.mark.parametrize("made", [gptq(4, "gptq", order=True, shape=(256, 256)), awq((256, 256))], ids=["gptq", "awq"])
def test_masters_of_gptq_and_awq(made: tuple[dict[str, Any], dict[str, Any], Any], tmp_path: Path) -> None:
    assert_masters_hold(transposed_source(tmp_path / "src", made[0], made[1]), tmp_path)
