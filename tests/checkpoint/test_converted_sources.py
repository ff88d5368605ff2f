"""Sources as MLX, torchao and bitsandbytes write them: decoded to what these libraries decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import export, quantize
from commands import answer, done, raises
from packed_cases import (
    GATE,
    MODULE,
    UP,
    Made,
    assert_any_range_is_read,
    bitsandbytes,
    converted_source,
    llm_int8,
    mlx,
    tensor_of,
    torchao,
    values,
)

from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError
from pqweights.formats.packed import QuantizedTensor
from pqweights.planning.recipe import load_recipe
from pqweights.results.verify import verify

AFFINE = [(bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
SHORT_FLOATS = {"mxfp4": (4, 32, "MXFP4"), "mxfp8": (8, 32, "F8_E4M3"), "nvfp4": (4, 16, "NVFP4")}


def assert_decoded(made: Made, folder: Path, dtype: str, plain: str = "BF16") -> None:
    source = converted_source(folder, made)
    tensor, expected = tensor_of(source), torch.as_tensor(made[2])
    assert [found.name for found in open_local(source).tensors if found.name != GATE] == [UP]
    assert (tensor.dtype, tensor.shape, tensor.plain_dtype) == (dtype, tuple(expected.shape), plain)
    assert torch.equal(values(tensor, "F32").reshape(expected.shape), expected.float())
    assert torch.equal(values(tensor, "BF16").reshape(expected.shape), expected.to(torch.bfloat16))
    assert_any_range_is_read(tensor)


@pytest.mark.parametrize(("bits", "group"), AFFINE)
def test_integers_of_mlx_are_scale_times_code_plus_bias(bits: int, group: int, tmp_path: Path) -> None:
    assert_decoded(mlx("affine", bits, group), tmp_path / "src", f"MLX{bits}")


@pytest.mark.parametrize(("dtype", "plain"), [("float16", "F16"), ("float32", "F32")])
def test_scales_of_mlx_may_have_other_dtypes(dtype: str, plain: str, tmp_path: Path) -> None:
    assert_decoded(mlx("affine", 4, 64, dtype=dtype), tmp_path / "src", "MLX4", plain)


@pytest.mark.parametrize("mode", SHORT_FLOATS)
def test_short_floats_of_mlx_are_decoded_as_by_mlx(mode: str, tmp_path: Path) -> None:
    bits, group, dtype = SHORT_FLOATS[mode]
    assert_decoded(mlx(mode, bits, group), tmp_path / "src", dtype)


@pytest.mark.parametrize("own", [{"bits": 6, "group_size": 32}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}])
def test_a_module_of_mlx_may_have_settings_of_its_own(own: dict[str, Any], tmp_path: Path) -> None:
    tensors, _, expected = mlx(own.get("mode", "affine"), own["bits"], own["group_size"])
    settings = {"quantization": {"group_size": 64, "bits": 4, MODULE: own, "lm_head": False}}
    tensor = tensor_of(converted_source(tmp_path / "src", (tensors, settings, expected)))
    assert torch.equal(values(tensor, "F32").reshape(expected.shape), torch.from_numpy(expected))


def torchao_configs() -> dict[str, Any]:
    from torchao import quantization

    rows = quantization.PerRow()
    return {
        "int8": quantization.Int8WeightOnlyConfig(version=2, granularity=rows),
        "float8": quantization.Float8WeightOnlyConfig(),
    }


@pytest.mark.parametrize(("name", "dtype"), [("int8", "AO8"), ("float8", "F8_E4M3")])
def test_torchao_is_decoded_as_by_torchao(name: str, dtype: str, tmp_path: Path) -> None:
    tensors, settings, held = torchao(torchao_configs()[name])
    source = converted_source(tmp_path / "src", (tensors, settings, None))
    tensor = tensor_of(source)
    assert (tensor.dtype, tensor.shape) == (dtype, tuple(held.shape))
    assert torch.equal(values(tensor, "BF16").reshape(held.shape), held.dequantize())
    assert_any_range_is_read(tensor)


@pytest.mark.parametrize("nested", [None, 32, 256])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_is_number_times_scale_of_the_block(
    kind: str, nested: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizedTensor, "BAND_ELEMENTS", 1000)
    assert_decoded(bitsandbytes(kind, nested=nested), tmp_path / "src", kind.upper())
    assert_decoded(bitsandbytes(kind, (7, 9), nested=nested, dtype="float16"), tmp_path / "odd", kind.upper(), "F16")


def test_llm_int8_is_code_times_scale_of_the_row(tmp_path: Path) -> None:
    assert_decoded(llm_int8(), tmp_path / "src", "SCB8")
    tensors, *rest = llm_int8()
    tensors["weight_format"] += 2  # col_turing
    with pytest.raises(SourceError, match="weight_format': expected 0, for codes in rows, found 2"):
        assert_decoded((tensors, *rest), tmp_path / "turing", "SCB8")


def test_an_export_says_what_it_rounds_again(tmp_path: Path) -> None:
    """Not if it takes the codes over, and not before it is known."""
    converted_source(tmp_path / "src", llm_int8((256, 256)))
    asked, again = ("export", tmp_path / "src", tmp_path / "out", "-t", "vllm", "--format"), "already quantized to"
    assert again not in done(*asked, "w4a16", "--dry-run").stdout
    assert f"1 weight {again} 8 bits by" in done(*asked, "w4a16").stdout
    converted_source(tmp_path / "same", mlx("mxfp4", 4, 32, (256, 256)))
    taken_over = done("export", tmp_path / "same", tmp_path / "other", "-t", "vllm", "--format", "mxfp4a16").stdout
    assert again not in taken_over and "bit-identical values: 1 of 1" in taken_over


# --- all of them ---

EACH = {
    "mlx": lambda: mlx("affine", 4, 64, (256, 256)),
    "mlx-mxfp8": lambda: mlx("mxfp8", 8, 32, (256, 256)),
    "torchao": lambda: (*torchao(torchao_configs()["int8"], (256, 256))[:2], None),
    "nf4": lambda: bitsandbytes("nf4", (256, 256), nested=256),
    "llm-int8": lambda: llm_int8((256, 256)),
}


@pytest.mark.parametrize("name", EACH)
def test_masters_have_the_values_of_the_source(name: str, tmp_path: Path) -> None:
    source = converted_source(tmp_path / "src", EACH[name]())
    original = values(tensor_of(source), "F32")
    for recipe, most in (("q5", 5e-3), ("--lossless", 0)):
        master = tmp_path / recipe
        if most:
            quantize(source, master, load_recipe(recipe), threads=1)
        else:
            done("quantize", source, master, recipe)
        assert verify(master, threads=1).ok
        assert "quantization" not in json.loads((master / "config.json").read_text())
        result = values(tensor_of(master), "F32")
        assert (result - original).square().sum() <= most * original.square().sum()
    export(tmp_path / "--lossless", tmp_path / "bf16", "bf16", threads=1)
    assert torch.equal(values(tensor_of(tmp_path / "bf16"), "BF16"), original.to(torch.bfloat16))


def test_experts_of_mlx_are_refused(tmp_path: Path) -> None:
    tensors, settings, _ = mlx("affine", 4, 64)
    with raises(SourceError, "MLX", "switch_mlp"):
        open_local(
            converted_source(tmp_path / "src", (tensors, settings, None), "model.layers.0.mlp.switch_mlp.up_proj")
        )


@pytest.mark.parametrize("card", ["", "---\nbase_model: org/model\n---\n", "---\nbase_model: [org/model]\n---\n"])
@pytest.mark.parametrize(
    ("name", "bits", "format_name"), [("mlx", 4, "MLX"), ("nf4", 4, "bitsandbytes"), ("mlx-mxfp8", 8, "FP8")]
)
def test_a_second_rounding_is_said_with_the_original(
    name: str, bits: int, format_name: str, card: str, tmp_path: Path
) -> None:
    source = converted_source(tmp_path / "src", EACH[name]())
    (source / "README.md").write_text(card)
    for command in (("plan", source), ("quantize", source, tmp_path / "out")):
        shown = " ".join(done(*command).stdout.split())
        assert (
            f"1 weight already quantized to {bits} bits by {format_name}: a second rounding adds to its loss" in shown
        )
        assert ("give the original, org/model, or" in shown) == bool(card)
        stated = answer(*command)["already_quantized"]
        assert stated["formats"] == [{"format": format_name, "bits": bits, "tensors": 1}]
        assert stated["original"] == ("org/model" if card else None)
    assert "already_quantized" not in answer("plan", source, "--lossless")
