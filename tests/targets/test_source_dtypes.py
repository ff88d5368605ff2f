"""Sources in every dtype of safetensors: each export is made, or refused with one line that names the tensor."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import raises
from gguf_files import CONFIG, llama_tensors
from helpers import as_float32, write_checkpoint
from language_models import VOCABULARY, with_tokenizer

import pqweights
from pqweights.common.dtypes import DTYPE_BITS, FLOAT_DTYPES
from pqweights.errors import ExportError, SourceError

TARGETS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "gguf": {"type": "q8_0"},
    "vllm": {"format": "w8a16"},
    "torchao": {"packing": "plain"},
    "mlx": {"format": "q8"},
}
SIZES = CONFIG | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"vocab_size": VOCABULARY}
NORM, BUFFER = "model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"


def write_source(folder: Path, tensors: dict[str, Any]) -> Path:
    return with_tokenizer(write_checkpoint(folder, tensors, config=SIZES))


def available() -> list[str]:
    return [name for name in TARGETS if name != "mlx" or importlib.util.find_spec("mlx_lm")]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16"])
def test_model_of_any_floating_dtype_is_exported_to_every_target(dtype: str, tmp_path: Path) -> None:
    kind = {"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype]
    tensors = {name: (dtype, as_float32(of).astype(kind)) for name, of in llama_tensors(VOCABULARY, SIZES).items()}
    pqweights.quantize(write_source(tmp_path / "source", tensors), tmp_path / "master", bits=8)
    for target in available():
        pqweights.export(tmp_path / "master", tmp_path / target, target=target, **TARGETS[target])


@pytest.mark.parametrize(
    ("name", "dtype"), [*((NORM, dtype) for dtype in DTYPE_BITS), *((BUFFER, dtype) for dtype in ("F32", "I64", "F4"))]
)
def test_kept_tensor_of_any_dtype_is_exported_or_named_in_one_line(name: str, dtype: str, tmp_path: Path) -> None:
    count = 128 if name == NORM else 32
    raw = np.ones(count * DTYPE_BITS[dtype] // 8, dtype=np.uint8)
    item = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}.get(DTYPE_BITS[dtype])
    tensors = llama_tensors(VOCABULARY, SIZES)
    tensors[name] = (dtype, _OfShape(raw, (count,)) if item is None else raw.view(item))
    pqweights.quantize(write_source(tmp_path / "source", tensors), tmp_path / "master", bits=8)
    refused = {}
    for target in available():
        try:
            pqweights.export(tmp_path / "master", tmp_path / target, target=target, **TARGETS[target])
        except ExportError as error:
            refused[target] = str(error)
    assert refused.keys() <= {"gguf", "mlx"}
    assert all(name in line and dtype in line for line in refused.values())
    assert not refused or dtype not in FLOAT_DTYPES


class _OfShape:
    """Bytes of elements that are less than a byte, or no whole number of them."""

    def __init__(self, raw: Any, shape: tuple[int, ...]) -> None:
        self.shape, self.nbytes, self._raw = shape, raw.nbytes, raw

    def tobytes(self) -> bytes:
        """The bytes."""
        return bytes(self._raw)


def test_numbers_beyond_f16_are_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    values = {name: as_float32(of).astype(np.float32) for name, of in llama_tensors(VOCABULARY, SIZES).items()}
    values["model.layers.0.mlp.down_proj.weight"][1, 2] = 1e5
    source = write_source(tmp_path / "source", {name: ("F32", of) for name, of in values.items()})
    with raises(SourceError, "blk.0.ffn_down.weight", "100000"):
        pqweights.export(source, tmp_path / "f16", target="gguf", type="f16")
    pqweights.export(source, tmp_path / "bf16", target="gguf", type="bf16")
