"""Weights whose scales are not finite: no target writes them, and each says which stored tensor is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from commands import raises, refused
from gguf_files import write_gguf, write_llama
from helpers import f32
from packed_cases import (
    FLOATS,
    INTEGERS,
    UP,
    awq,
    bitsandbytes,
    compress,
    converted_source,
    gptq,
    llm_int8,
    mlx,
    save,
    settings_of,
    source_of,
    tensor_of,
    transposed_source,
    values,
)
from safetensors.torch import load_file, save_file

from pqweights.errors import SourceError
from pqweights.formats.packed import QuantizedTensor
from pqweights.kernels.gguf_encoding import BLOCK_TYPES


def _fp8(folder: Path, scales: Any) -> Path:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn((256, 256), generator=generator).to(torch.float8_e4m3fn)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return save(folder, {UP: codes, f"{UP}_scale_inv": scales}, settings)


def _compressed(number: int, cases: list[Any]) -> Callable[[Path], Path]:
    group, shape = cases[number]
    return lambda folder: source_of(folder, compress(shape, group)[0], settings_of(group))


SOURCES: dict[str, Callable[[Path], Path]] = {
    "fp8": lambda folder: _fp8(folder, torch.rand(2, 2) + 0.5),
    "pack-quantized": _compressed(2, INTEGERS),
    "mxfp4": _compressed(0, FLOATS),
    "nvfp4": _compressed(1, FLOATS),
    "mxfp8": _compressed(2, FLOATS),
    "gptq": lambda folder: transposed_source(folder, *gptq(4, "gptq")[:2]),
    "awq": lambda folder: transposed_source(folder, *awq()[:2]),
    "mlx": lambda folder: converted_source(folder, mlx("affine", 4, 64)),
    "mlx-nvfp4": lambda folder: converted_source(folder, mlx("nvfp4", 4, 16)),
    "nf4": lambda folder: converted_source(folder, bitsandbytes("nf4")),
    "nested-nf4": lambda folder: converted_source(folder, bitsandbytes("nf4", nested=256)),
    "llm-int8": lambda folder: converted_source(folder, llm_int8()),
}


def _damaged(source: Path, name: str) -> None:
    """Make the numbers of a stored tensor NaNs."""
    tensors = load_file(source / "model.safetensors")
    tensors[name].reshape(-1).view(torch.uint8).fill_(0xFF)
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("made", SOURCES)
def test_a_scale_that_is_not_finite_is_refused_by_the_name_of_its_weight(made: str, tmp_path: Path) -> None:
    source = SOURCES[made](tmp_path / "src")
    tensor = tensor_of(source)
    assert isinstance(tensor, QuantizedTensor)
    is_float = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0")
    beside = [of for of in tensor.parts[1:] if of.dtype in is_float or "scale" in of.name]
    assert beside
    held = (source / "model.safetensors").read_bytes()
    for part in beside:
        _damaged(source, part.name)
        damaged = tensor_of(source)
        with raises(SourceError, "model.safetensors", UP):
            values(damaged, "BF16")
        assert isinstance(damaged, QuantizedTensor)
        with raises(SourceError, repr(part.name)):
            damaged.check_scales()
        (source / "model.safetensors").write_bytes(held)
    tensor_of(source).check_scales()  # type: ignore[attr-defined]


COMMANDS = (
    "quantize {} {}", "quantize {} {} --lossless", "export {} {} --target bf16", "export {} {} --target mlx",
    "export {} {} --target vllm --format w4a16", "export {} {} --target vllm --format fp8-block",
    "export {} {} --target torchao --format int8", "export {} {} --target gguf --type q4_k_m --without-tokenizer",
)  # fmt: skip


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_command_makes_a_result_of_such_scales(bad: float, tmp_path: Path) -> None:
    scales = np.ones((2, 2), dtype=np.float32)
    scales[1, 0] = bad
    codes = np.random.default_rng(1).integers(0, 0x70, (256, 256), dtype=np.uint8)
    weight = {UP.replace(".", "__"): ("F8_E4M3", codes), f"{UP}_scale_inv".replace(".", "__"): f32(scales)}
    sizes = {"hidden_size": 256, "intermediate_size": 256, "quantization_config": {"quant_method": "fp8"}}
    source = write_llama(tmp_path / "src", sizes=sizes, **weight)
    for number, line in enumerate(COMMANDS):
        out = tmp_path / f"out{number}"
        says = refused(*line.format(source, out).split())
        assert "model.safetensors" in says and UP in says
        assert not list(tmp_path.glob(f"out{number}/*.safetensors"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ2_XXS", "MXFP4", "Q1_0"])
def test_blocks_of_gguf_with_such_scales_are_refused(kind: str, tmp_path: Path) -> None:
    made = write_llama(tmp_path / "model", sizes={"hidden_size": 256, "intermediate_size": 256})
    file = write_gguf(made, kind)
    up = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.ffn_up.weight")
    raw = bytearray(file.read_bytes())
    kind_bytes = BLOCK_TYPES[kind].block_bytes
    raw[up.data_offset : up.data_offset + kind_bytes] = b"\xff" * kind_bytes
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "m.gguf").write_bytes(raw)
    for line in ("quantize {} {}", "export {} {} --target bf16"):
        says = refused(*line.format(tmp_path / "src", tmp_path / "out").split())
        assert "m.gguf" in says and "blk.0.ffn_up.weight" in says
