"""Models of configurations that state positions in some way, and what transformers and mlx-lm compute with them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import torch
import transformers

from pqweights.checkpoint.source import open_local

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip


def saved(folder: Path, stated: dict[str, Any]) -> Any:
    """A model of a configuration, with random weights, saved in F32 beside that configuration; transformers' logits."""
    config = {**SIZES, **stated}
    path = folder / "config.json"
    folder.mkdir()
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    model.save_pretrained(folder)
    written = json.loads(path.read_text())
    written = {key: value for key, value in written.items() if key not in ("rope_parameters", "layer_types")}
    path.write_text(json.dumps(written | config))
    return model


def read_by_mlx(folder: Path) -> Any:
    """What the export reads off mlx-lm's model."""
    from pqweights.targets.mlx_model import QuantizedModule, read_model

    checkpoint = open_local(folder)
    return read_model(
        json.loads((folder / "config.json").read_text()),
        generation_config=None,
        weights=frozenset(),
        tensors={tensor.name: tensor for tensor in checkpoint.tensors},
        dtypes={tensor.name: "F32" for tensor in checkpoint.tensors},
        default=QuantizedModule(8, 32, "affine"),
        smaller=(),
    )


def logits_of_mlx(config: dict[str, Any], folder: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    """What mlx-lm computes with the configuration of an export and the weights of the source."""
    from mlx_lm.utils import load_model

    exported = folder.parent / "exported"
    if not exported.exists():
        exported.mkdir()
        shutil.copy(folder / "model.safetensors", exported)
        plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
        (exported / "config.json").write_text(json.dumps(plain))
    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = load_model(exported)
    return np.array(model(mx.array([ids])))[0]


def distance(model: Any, read: Any, folder: Path, length: int) -> float:
    """How far the logits of mlx-lm are from those of transformers, for a text of some length."""
    ids = [(7 * n * n + 3) % 128 for n in range(length)]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = logits_of_mlx(read.config, folder, ids)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
