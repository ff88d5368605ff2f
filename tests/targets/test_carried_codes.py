"""Sources that were quantized already, through masters without loss: to every format of the same numbers unchanged.

Each source is an export of the vllm target, which the libraries of its format decode (test_vllm_formats.py). Exports in
the same format must have its very bytes; of others, the runtime's own package decodes the numbers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import helpers
import language_models
import numpy as np
import numpy.typing as npt
import pytest
from commands import done
from export_decoders import values_of
from helpers import read_all
from integer_exports import integer_names

from pqweights.checkpoint.source import open_local
from pqweights.convert.manifest import read_manifest
from pqweights.targets.vllm import FORMATS as VLLM_FORMATS

# Those of which a group or a row of the family's matrices fills more than one row of the format.
FORMATS = [name for name in VLLM_FORMATS if name not in ("w2a16", "w3a16")]


def source_of(base: Path, name: str, **options: object) -> Path:
    family = "gpt_oss" if name == "mxfp4-gpt-oss" else "llama"
    return families.exported(base, family, "vllm", format=name, **options)


def master_of(tmp_path: Path, source: Path) -> Path:
    shown = done("quantize", source, tmp_path / "master", "--lossless").stdout
    assert "a second rounding" not in shown
    return tmp_path / "master"


def numbers_of(source: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The weights that are quantized in a source."""
    found = {tensor.name: tensor for tensor in open_local(source).tensors}
    return {name: values_of(found[name]) for name in integer_names(source)}


def changed(source: Path, tmp_path: Path, change: Callable[[str, Any], Any]) -> Path:
    """A copy of a source, with other tensors."""
    from safetensors.torch import load_file, save_file

    copied = Path(shutil.copytree(source, tmp_path / "source"))
    for file in copied.glob("*.safetensors"):
        save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return copied


def identical(shown: str) -> int:
    """Of how many tensors an export says that they have exactly the values of the original."""
    found = re.search(r"bit-identical values: (\d+) of \d+ tensors", shown)
    return 0 if found is None else int(found[1])


def is_float8(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.float8_e4m3fn"


def exported(tmp_path: Path, source: Path, *options: object) -> tuple[Path, str]:
    shown = done("export", master_of(tmp_path, source), tmp_path / "out", *options).stdout
    return tmp_path / "out", " ".join(shown.split())


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_format_has_the_very_bytes_of_the_source(name: str, base: Path, tmp_path: Path) -> None:
    source = source_of(base, name)
    out, shown = exported(tmp_path, source, "--target", "vllm", "--format", name)
    expected, found = read_all(source), read_all(out)
    assert found.keys() == expected.keys()
    for stored, (dtype, array) in expected.items():
        assert (found[stored][0], found[stored][1].tobytes()) == (dtype, array.tobytes()), stored
    layers = integer_names(source)
    assert identical(shown) == len(layers)
    assert {record.relative_mse for record in read_manifest(out).records if record.name in layers} == {0}


@pytest.mark.parametrize(
    ("target", "name", "other"),
    [("vllm", "w4a16", "w8a16"), ("vllm", "fp8-block", "w4a16"), ("torchao", "int8", "fp8"), ("mlx", "q4", "q8")],
)
def test_what_the_source_keeps_plain_stays_plain_in_its_format(
    target: str, name: str, other: str, base: Path, tmp_path: Path
) -> None:
    plain = {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2)}
    source = families.exported(base, "llama", target, format=name, keep=("*.o_proj*",))
    out, shown = exported(tmp_path, source, "--target", target, "--format", name)
    expected, found = read_all(source), read_all(out)
    assert found.keys() == expected.keys() >= plain
    for stored, (dtype, array) in expected.items():
        assert (found[stored][0], found[stored][1].tobytes()) == (dtype, array.tobytes()), stored
    assert "the source, whose codes are taken over, keeps it plain" in shown
    for asked in (("--format", name, "--set", f"*.o_proj*={name}"), ("--format", other)):
        again = tmp_path / asked[-1].replace("*", "")
        done("export", tmp_path / "master", again, "--target", target, *asked)
        is_plain = {record.name for record in read_manifest(again).records if record.relative_mse is None}
        assert not plain & is_plain, asked


@pytest.mark.parametrize(("name", "target"), [("mxfp4a16", "vllm"), ("mxfp4a16", "mlx"), ("fp8-deepseek", "vllm")])
def test_codes_of_deepseek_v4_are_taken_over(name: str, target: str, base: Path, tmp_path: Path) -> None:
    """FP4 in I8 and FP8, with scales in E8M0 that are called `.scale`."""
    import torch
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(source_of(base, name), tmp_path / "source"))
    numbers = numbers_of(source)
    for file in source.glob("*.safetensors"):
        tensors = {}
        for stored, tensor in load_file(file).items():
            if stored.endswith(("_scale_inv", "_scale")):
                exponents = tensor if tensor.dtype == torch.uint8 else tensor.log2().round().add(127).to(torch.uint8)
                tensors[stored.rpartition(".weight")[0] + ".scale"] = exponents.view(torch.float8_e8m0fnu)
            elif stored.endswith("_packed"):
                tensors[stored.removesuffix("_packed")] = tensor.view(torch.int8)
            else:
                tensors[stored] = tensor
        save_file(tensors, file, {"format": "pt"})
    (source / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    (source / "config.json").write_text(json.dumps(config))
    read = {tensor.name: tensor for tensor in open_local(source).tensors}
    assert name != "mxfp4a16" or all(np.array_equal(values_of(read[of]), numbers[of]) for of in numbers)
    asked = name.removesuffix("a16") if target == "mlx" else name
    _, shown = exported(tmp_path, source, "--target", target, "--format", asked)
    assert identical(shown) == len(numbers)


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "mxfp4a16", "nvfp4a16", "w4a16"])
def test_a_source_has_its_codes_taken(name: str, base: Path, tmp_path: Path) -> None:
    """Also if the codes of FP8 do not use their whole range, so that rounding would find others."""
    source = changed(source_of(base, name), tmp_path, lambda n, t: (t.float() * 0.7).to(t.dtype) if is_float8(t) else t)
    done("export", source, tmp_path / "out", "--target", "vllm", "--format", name)
    expected, found, layers = read_all(source), read_all(tmp_path / "out"), integer_names(source)
    modules = {layer.removesuffix(".weight") for layer in layers}
    for stored in (stored for stored in expected if stored.rpartition(".")[0] in modules):
        assert found[stored][1].tobytes() == expected[stored][1].tobytes(), stored
    records = [record for record in read_manifest(tmp_path / "out").records if record.name in layers]
    assert {(record.relative_mse, record.total_mse) for record in records} == {(0, 0)}


@pytest.mark.parametrize(("factor", "fits"), [(1, True), (1.01, False)])
def test_scales_of_tiles_in_float32_are_taken_where_bfloat16_holds_them(
    factor: float, fits: bool, base: Path, tmp_path: Path
) -> None:
    """DeepSeek-V3 has them in F32, compressed-tensors in the dtype of the model."""
    source = changed(
        source_of(base, "fp8-deepseek"), tmp_path, lambda name, t: t * factor if name.endswith("_scale_inv") else t
    )
    master = master_of(tmp_path, source)
    for name, is_carried in (("fp8-deepseek", True), ("fp8-block", fits)):
        shown = " ".join(done("export", master, tmp_path / name, "--target", "vllm", "--format", name).stdout.split())
        assert (identical(shown) > 0) == is_carried


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("mxfp4a16", {}, "MXFP4"),
        ("w4a16", {"group_size": 32}, "Q4_0"),
        ("w4a16", {"group_size": 32}, "Q4_1"),
        ("w8a16", {"group_size": 32}, "Q8_0"),
    ],
)
def test_blocks_of_gguf_hold_the_numbers_of_the_source(
    name: str, options: dict[str, Any], kind: str, base: Path, tmp_path: Path
) -> None:
    import gguf

    copied = Path(shutil.copytree(source_of(base, name, **options), tmp_path / "source"))
    source = language_models.with_tokenizer(copied)
    out, shown = exported(tmp_path, source, "--target", "gguf", "--type", "Q8_0", "--set", f"blk.*={kind}")
    (file,) = out.glob("*.gguf")
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    numbers = numbers_of(source)
    assert identical(shown) == len(numbers)
    for layer in range(2):
        for ours, theirs in (("mlp.down_proj", "ffn_down"), ("mlp.up_proj", "ffn_up"), ("self_attn.v_proj", "attn_v")):
            tensor = held[f"blk.{layer}.{theirs}.weight"]
            assert tensor.tensor_type.name == kind
            decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(decoded, numbers[f"model.layers.{layer}.{ours}.weight"])


@pytest.mark.parametrize(
    ("name", "options", "asked", "how"),
    [
        ("mxfp4a16", {}, ("--format", "mxfp4"), {"mode": "mxfp4", "group_size": 32, "bits": 4}),
        ("mxfp8a16", {}, ("--format", "mxfp8"), {"mode": "mxfp8", "group_size": 32, "bits": 8}),
        ("w4a16", {"group_size": 32}, ("--format", "q4", "--group-size", "32"), {"group_size": 32, "bits": 4}),
        ("w8a16", {"group_size": 64}, ("--format", "q8", "--group-size", "32"), {"group_size": 32, "bits": 8}),
    ],
)
def test_mlx_decodes_the_numbers_of_the_source(
    name: str, options: dict[str, Any], asked: tuple[str, ...], how: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    import mlx.core as mx

    source = source_of(base, name, **options)
    out, shown = exported(tmp_path, source, "--target", "mlx", *asked)
    numbers = numbers_of(source)
    assert identical(shown) == len(numbers)
    loaded = mx.load(str(next(out.glob("*.safetensors"))))
    for weight, expected in numbers.items():
        module = weight.removesuffix(".weight")
        parts = loaded[weight], loaded[f"{module}.scales"], loaded.get(f"{module}.biases")
        scales, biases = (None if part is None or "mode" in how else part.astype(mx.float32) for part in parts[1:])
        decoded = mx.dequantize(
            parts[0], parts[1] if scales is None else scales, biases, **how, dtype=mx.float32, stream=mx.cpu
        )
        assert np.array_equal(np.array(decoded), expected), weight


def test_only_codes_of_a_source_are_called_identical(tmp_path: Path) -> None:
    """Zeros are rounded without an error, whatever they come from."""
    zeros = {"model.layers.0.mlp.up_proj.weight": helpers.bf16(np.zeros((256, 256), dtype=np.float32))}
    source = helpers.write_checkpoint(tmp_path / "source", zeros, config={"model_type": "llama", "dtype": "bfloat16"})
    out, shown = exported(tmp_path, source, "--target", "vllm", "--format", "w8a16")
    assert [record.relative_mse for record in read_manifest(out).records] == [0]
    assert not identical(shown)


def test_experts_of_gpt_oss_are_the_same_numbers_split_and_transposed(base: Path, tmp_path: Path) -> None:
    """The source has gate and up in alternating rows, and matrices that the model holds transposed."""
    import mlx.core as mx
    import torch
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(families.model(base, "gpt_oss"), tmp_path / "source"))
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, depth, rows = tensors.pop(name).shape
        shape = (experts, rows, depth // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, shape, generator=generator).to(torch.uint8)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    out, shown = exported(tmp_path, source, "--target", "mlx", "--format", "mxfp4")
    assert identical(shown) == 6
    loaded = mx.load(str(next(out.glob("*.safetensors"))))
    originals = {tensor.name: values_of(tensor) for tensor in open_local(source).tensors if tensor.dtype == "MXFP4"}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        both = originals[f"{experts}.gate_up_proj"].swapaxes(1, 2)
        expected = {"gate_proj": both[:, ::2], "up_proj": both[:, 1::2]}
        expected["down_proj"] = originals[f"{experts}.down_proj"].swapaxes(1, 2)
        for name, values in expected.items():
            weight, scales = (loaded[f"{experts}.{name}.{part}"] for part in ("weight", "scales"))
            how: Any = {"mode": "mxfp4", "group_size": 32, "bits": 4, "dtype": mx.float32, "stream": mx.cpu}
            assert np.array_equal(np.array(mx.dequantize(weight, scales, **how)), values), name


def test_another_grid_is_rounded_to_and_not_called_identical(base: Path, tmp_path: Path) -> None:
    source = source_of(base, "mxfp4a16")
    out, shown = exported(tmp_path, source, "--target", "vllm", "--format", "w4a16", "--group-size", "32")
    assert not identical(shown)
    layers = integer_names(source)
    assert all(record.relative_mse for record in read_manifest(out).records if record.name in layers)


def test_larger_groups_than_those_of_the_source_are_rounded_to(base: Path, tmp_path: Path) -> None:
    source = source_of(base, "w4a16", group_size=32)
    _, shown = exported(tmp_path, source, "--target", "vllm", "--format", "w4a16", "--group-size", "64")
    assert not identical(shown)


def test_smaller_groups_than_those_of_the_source_have_its_scales(base: Path, tmp_path: Path) -> None:
    source = source_of(base, "w4a16", group_size=64)
    _, shown = exported(tmp_path, source, "--target", "vllm", "--format", "w4a16", "--group-size", "32")
    layers = len(integer_names(source))
    assert identical(shown) == layers
