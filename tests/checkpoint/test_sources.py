"""Sources of every kind: FP8, MXFP4, float64, pickles, and models of many families. Nothing is dropped or altered."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls import export, quantize
from helpers import Tensor, bf16, f32, gaussian, read_all, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local
from pqweights.common.options import Options
from pqweights.formats.packed import QuantizedTensor
from pqweights.planning.choice import choose_recipe

UP = "model.layers.0.mlp.up_proj.weight"


def master_of(source: Path, out: Path, bits: int = 5, **options: Any) -> dict[str, Tensor]:
    """Quantize a source, and return the stored tensors."""
    quantize(source, out, choose_recipe("q5", Options(bits=bits)), threads=2, **options)
    return read_all(out)


def save(folder: Path, *shards: Mapping[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint with the safetensors library."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(tensors), folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensor_of(folder: Path, name: str) -> LogicalTensor:
    (found,) = [tensor for tensor in open_local(folder).tensors if tensor.name == name]
    return found


def read(tensor: LogicalTensor, dtype: str = "F32", start: int = 0, count: int | None = None) -> bytes:
    count = element_count(tensor) - start if count is None else count
    raw = np.empty(count * {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}[dtype], dtype=np.uint8)
    tensor.read(start, count, dtype, raw)
    return raw.tobytes()


def raw_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- FP8 ---


def expanded(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> torch.Tensor:
    """Every scale repeated over its block, and cut to the shape, as in the code of the models themselves."""
    wide = scales.float()
    for dimension, (size, step) in enumerate(zip(shape, block, strict=True)):
        wide = wide.repeat_interleave(step, dim=dimension).narrow(dimension, 0, size)
    return wide


def random_fp8(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def random_scales(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randn(shape, generator=generator) * 3 - 5).to(dtype)


FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
FP8_LAYOUTS = [
    # weight, stored scales, suffix, shape of the scales before they are repeated, elements per scale
    ((256, 384), (2, 3), "_scale_inv", (2, 3), (128, 128)),
    ((129, 127), (2, 1), "_scale_inv", (2, 1), (128, 127)),
    ((5, 300), (1, 3), "_scale_inv", (1, 3), (5, 128)),
    ((3, 200, 130), (3, 2, 2), "_scale_inv", (3, 2, 2), (1, 128, 128)),
    ((2, 3, 128, 256), (2, 3, 1, 2), "_scale_inv", (2, 3, 1, 2), (1, 1, 128, 128)),
    ((40, 130), (), "_scale", (1, 1), (40, 130)),
    ((40, 130), (1, 1), "_scale_inv", (1, 1), (40, 130)),
    ((40, 130), (40, 1), "_scale", (40, 1), (1, 130)),
    ((40, 130), (40,), "_scale", (40, 1), (1, 130)),
    ((3, 40, 130), (3, 40, 1), "_scale", (3, 40, 1), (1, 1, 130)),
    ((3, 40, 130), (3, 40), "_scale", (3, 40, 1), (1, 1, 130)),
    ((3, 40, 130), (3, 1, 1), "_scale", (3, 1, 1), (1, 40, 130)),
    ((3, 200, 130), (1, 2, 2), "_scale_inv", (1, 2, 2), (3, 128, 128)),
    ((3, 40, 130), (3, 1, 130), "_scale", (3, 1, 130), (1, 40, 1)),
    ((130,), (1,), "_scale", (1,), (130,)),
    ((256, 384), (2, 3), ".scale", (2, 3), (128, 128)),
]


@pytest.mark.parametrize("layout", FP8_LAYOUTS, ids=lambda x: f"{x[0]}{x[1]}{x[2]}".replace(" ", ""))
def test_fp8_is_decoded_as_value_times_scale(layout: tuple[Any, ...], tmp_path: Path) -> None:
    shape, stored_scales, suffix, as_block, block = layout
    for dtype, scale_dtype in (
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e8m0fnu),
    ):
        weight, scales = random_fp8(shape, dtype), random_scales(stored_scales, scale_dtype)
        stem = UP.removesuffix(".weight") if suffix == ".scale" else UP
        source = save(tmp_path / f"{dtype}-{scale_dtype}", {UP: weight, stem + suffix: scales}, config=FP8_CONFIG)
        expected = weight.float() * expanded(scales.reshape(as_block), shape, block)
        tensor = tensor_of(source, UP)
        assert tensor.shape == shape
        assert read(tensor) == raw_bytes(expected)
        assert read(tensor, "BF16") == raw_bytes(expected.bfloat16())
    # Without configuration and scales, these are 1.
    assert read(tensor_of(save(tmp_path / "plain", {UP: weight}), UP)) == raw_bytes(weight.float())


# DeepSeek-V4 and V4.1 as published: names and shapes of runtime/convert.py beside the weights
# (https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash); tables of engrams have scales by rows.
V4 = [
    ("layers.0.attn.wq_a", "F8_E4M3", (256, 384), (2, 3), 128),
    ("layers.0.attn.wq_a", "F8_E4M3", (64, 96), (2, 3), 32),
    ("layers.0.attn.wq_a", "F8_E4M3", (70, 100), (3, 4), 32),
    ("layers.0.engram.embed", "F8_E4M3", (70, 96), (70, 3), 32),
    ("layers.0.ffn.experts.3.w2", "MXFP4", (48, 96), (48, 3), 128),
]


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize(("module", "dtype", "shape", "scale_shape", "block"), V4)
def test_deepseek_v4_is_decoded_as_by_transformers(
    module: str, dtype: str, shape: tuple[int, int], scale_shape: tuple[int, int], block: int,
    scale_dtype: torch.dtype, tmp_path: Path,
) -> None:  # fmt: skip
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = torch.exp2(torch.randint(-9, 3, scale_shape, generator=torch.Generator().manual_seed(1)).float())
    weight = random_fp8(shape, torch.float8_e4m3fn)
    if dtype == "MXFP4":
        scale_dtype, weight = torch.float8_e8m0fnu, weight.view(torch.int8)[:, ::2].contiguous()
    expected = Fp8Dequantize(None)._unpack_fp4(weight) if dtype == "MXFP4" else weight.float()
    steps = [size if count == 1 else -(-size // count) for size, count in zip(shape, scale_shape, strict=True)]
    steps = [step if step == 1 else 32 if dtype == "MXFP4" else block for step in steps]
    expected *= expanded(scales, shape, (steps[0], steps[1]))
    stored = {
        f"{module}.weight": weight,
        f"{module}.scale": scales.to(scale_dtype),
        f"{module}.input_scale": torch.ones(1),
    }
    settings = {"quant_method": "fp8", "weight_block_size": [block, block], "scale_fmt": "ue8m0"}
    source = save(tmp_path / "src", stored, config={"quantization_config": settings})
    opened = open_local(source)
    assert [(tensor.name, tensor.dtype) for tensor in opened.tensors] == [(f"{module}.weight", dtype)]
    assert opened.left_out_tensors.keys() == {f"{module}.input_scale"}
    assert read(opened.tensors[0]) == raw_bytes(expected)
    assert read(opened.tensors[0], "F32", 33, 101) == raw_bytes(expected.reshape(-1)[33:134])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_fp8_of_any_shape_can_be_read_from_any_element(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=3), "shape"))
    steps = tuple(data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=2), "block"))
    block = (1,) * (len(shape) - 2) + steps
    weight = random_fp8(shape, torch.float8_e4m3fn)
    scales = random_scales(tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True)), torch.float32)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": steps}}
    folder = tmp_path_factory.mktemp("fp8") / "src"
    save(folder, {UP: weight, UP + "_scale_inv": scales}, config=config)
    expected = raw_bytes(weight.float() * expanded(scales, shape, block))
    start = data.draw(st.integers(0, weight.numel() - 1), "start")
    count = data.draw(st.integers(1, weight.numel() - start), "count")
    assert read(tensor_of(folder, UP), "F32", start, count) == expected[4 * start : 4 * (start + count)]


def test_fp8_source_and_decoded_source_give_the_same_master(tmp_path: Path) -> None:
    """Kept FP8 becomes BF16; neither scales nor the source's quantization_config are left."""
    mtp = "mtp.layers.0.mlp.up_proj.weight"
    weight, scales = random_fp8((200, 300), torch.float8_e4m3fn), random_scales((2, 3), torch.float32)
    kept, kept_scale = random_fp8((16, 40), torch.float8_e5m2, 2), random_scales((), torch.bfloat16, 3)
    tensors = {UP: weight, UP + "_scale_inv": scales, mtp: kept, mtp + "_scale": kept_scale}
    source = save(tmp_path / "src", tensors, config={"model_type": "x", "torch_dtype": "bfloat16", **FP8_CONFIG})
    decoded = weight.float() * expanded(scales, (200, 300), (128, 128))
    plain = save(tmp_path / "plain", {UP: decoded})
    found, expected = master_of(source, tmp_path / "out"), master_of(plain, tmp_path / "plain-out")
    assert set(found) == {UP + "_codes", UP + "_norms", mtp}
    for name in (UP + "_codes", UP + "_norms"):
        assert found[name][1].tobytes() == expected[name][1].tobytes()
    assert found[mtp][0] == "BF16"
    assert found[mtp][1].tobytes() == raw_bytes((kept.float() * kept_scale.float()).bfloat16())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "pqweights"
    assert config["quantization_config"]["dtype"] == "F8_E4M3"
    assert config["dtype"] == "bfloat16"
    export(tmp_path / "out", tmp_path / "bf16", "bf16", threads=1)
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    assert {name: t[0] for name, t in read_all(tmp_path / "bf16").items()} == {UP: "BF16", mtp: "BF16"}


FP8_METHODS = [
    {"quant_method": "fbgemm_fp8"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
]


@pytest.mark.parametrize("method", FP8_METHODS, ids=lambda m: m["quant_method"])
def test_fp8_of_every_method_is_read(method: dict[str, Any], tmp_path: Path) -> None:
    weight, scales = random_fp8((40, 130), torch.float8_e4m3fn), random_scales((40, 1), torch.float32)
    config = {"quantization_config": method}
    for place, stated in (("top", config), ("text", {"text_config": config})):
        source = save(tmp_path / place, {UP: weight, UP + "_scale": scales}, config=stated)
        assert read(tensor_of(source, UP)) == raw_bytes(weight.float() * scales)
        master_of(source, tmp_path / f"{place}-out")
        result = json.loads((tmp_path / f"{place}-out/config.json").read_text())
        assert result.pop("quantization_config")["quant_method"] == "pqweights"
        assert "quantization_config" not in result.get("text_config", {})


# --- MXFP4 ---

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
MXFP4_CONFIG = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}


def mxfp4(experts: int, rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, groups), generator=generator, dtype=torch.uint8)
    return blocks, scales


def decoded_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    result: torch.Tensor = convert_moe_packed_tensors(blocks, scales)
    return result


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 96, 3), (3, 70, 5)], ids=str)
@pytest.mark.parametrize("band", [500, 1 << 20])
def test_mxfp4_matches_transformers(
    shape: tuple[int, int, int], band: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizedTensor, "BAND_ELEMENTS", band)
    blocks, scales = mxfp4(*shape)
    source = save(tmp_path / "src", {EXPERTS + "_blocks": blocks, EXPERTS + "_scales": scales}, config=MXFP4_CONFIG)
    expected = decoded_mxfp4(blocks, scales)
    tensor = tensor_of(source, EXPERTS)
    assert tensor.shape == tuple(expected.shape)
    assert read(tensor, "BF16") == raw_bytes(expected)
    assert read(tensor, "F32") == raw_bytes(expected.float())
    whole, count = raw_bytes(expected), expected.numel()
    for start in range(0, count, 997):
        part = min(1009, count - start)
        assert read(tensor, "BF16", start, part) == whole[2 * start : 2 * (start + part)]


def test_what_is_kept_of_an_expert_is_not_that_of_another_folder(tmp_path: Path) -> None:
    blocks, scales = mxfp4(1, 90, 3)
    for place, changed in (("first", blocks), ("second", blocks ^ 1)):
        stored = {EXPERTS + "_blocks": changed, EXPERTS + "_scales": scales}
        source = save(tmp_path / place, stored, config=MXFP4_CONFIG)
        assert read(tensor_of(source, EXPERTS), "BF16") == raw_bytes(decoded_mxfp4(changed, scales))


@pytest.mark.parametrize("chunk", [384, 1 << 20])
def test_mxfp4_source_and_decoded_source_give_the_same_master(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end inside a row of groups, and blocks and scales lie in different shards."""
    monkeypatch.setattr("pqweights.convert.jobs.CHUNK_WEIGHTS", chunk)
    blocks, scales = mxfp4(2, 90, 3)
    source = save(tmp_path / "src", {EXPERTS + "_blocks": blocks}, {EXPERTS + "_scales": scales}, config=MXFP4_CONFIG)
    plain = save(tmp_path / "plain", {EXPERTS: decoded_mxfp4(blocks, scales)})
    found, expected = master_of(source, tmp_path / "out", 3), master_of(plain, tmp_path / "plain-out", 3)
    assert set(found) == {EXPERTS + "_codes", EXPERTS + "_norms"}
    assert {name: t[1].tobytes() for name, t in found.items()} == {name: t[1].tobytes() for name, t in expected.items()}
    assert tensor_of(tmp_path / "out", EXPERTS).shape == (2, 96, 90)


# --- float64 ---


def test_float64_weights_are_rounded_once_and_vectors_kept(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 130))
    vector = np.random.default_rng(1).standard_normal(7)
    source = write_checkpoint(tmp_path / "src", {UP: ("F64", weight), "model.norm.weight": ("F64", vector)})
    plain = write_checkpoint(tmp_path / "plain", {UP: f32(weight.astype(np.float32))})
    found, expected = master_of(source, tmp_path / "out"), master_of(plain, tmp_path / "plain-out")
    for name in (UP + "_codes", UP + "_norms"):
        assert found[name][1].tobytes() == expected[name][1].tobytes()
    assert found["model.norm.weight"][0] == "F64"
    assert found["model.norm.weight"][1].tobytes() == vector.tobytes()


# --- pickles ---


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(6, 4, 128, generator=generator)
    return {
        "model.embed_tokens.weight": torch.randn(40, 130, generator=generator).bfloat16(),
        UP: torch.randn(8, 128, generator=generator).half(),
        "model.layers.0.mlp.down_proj.weight": large[2],  # a view in the middle of a larger storage
        "model.layers.0.mlp.gate_proj.weight": large[4],
        "model.layers.1.mlp.up_proj.weight": torch.randn(8, 128, generator=generator).double(),
        "model.layers.1.mlp.down_proj.weight": (torch.randn(8, 128, generator=generator)).to(torch.float8_e4m3fn),
        "model.norm.weight": torch.ones(5),
        "model.position_ids": torch.arange(9),
        "model.mask": torch.tensor([True, False, True]),
        "model.small": torch.arange(3, dtype=torch.int8),
        "model.bytes": torch.arange(3, dtype=torch.uint8),
    }


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("parameters", [False, True], ids=["tensors", "parameters"])
def test_pickles_and_safetensors_give_the_same_master(shards: int, parameters: bool, tmp_path: Path) -> None:
    tensors = {name: t.clone() for name, t in state().items()}
    expected = master_of(save(tmp_path / "safe", tensors), tmp_path / "safe-out")
    values = {n: torch.nn.Parameter(t) if parameters and t.dtype.is_floating_point else t for n, t in state().items()}
    (tmp_path / "src").mkdir()
    weight_map = {}
    for number in range(shards):
        file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{number + 1:05d}-of-00002.bin"
        part = {name: values[name] for name in list(values)[number::shards]}
        torch.save(part, tmp_path / "src" / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (tmp_path / "src/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"step": 3}, tmp_path / "src/optimizer.pt")  # training state is ignored
    found = master_of(tmp_path / "src", tmp_path / "out", allow_pickle=True)
    assert found.keys() == expected.keys() and not list((tmp_path / "out").glob("*.bin"))
    for name, (dtype, stored) in expected.items():
        assert (found[name][0], found[name][1].tobytes()) == (dtype, stored.tobytes())


# --- nothing dropped ---


@pytest.mark.parametrize("stored_twice", [False, True])
def test_tied_embeddings_are_stored_as_often_as_in_the_source(stored_twice: bool, tmp_path: Path) -> None:
    weight = bf16(gaussian(40, 130))
    tensors = {"model.embed_tokens.weight": weight} | ({"lm_head.weight": weight} if stored_twice else {})
    found = master_of(write_checkpoint(tmp_path / "src", tensors), tmp_path / "out")
    assert found.keys() == {name + part for name in tensors for part in ("_codes", "_norms")}
    if stored_twice:
        for part in ("_codes", "_norms"):
            assert found["lm_head.weight" + part][1].tobytes() == found["model.embed_tokens.weight" + part][1].tobytes()
