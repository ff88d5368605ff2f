"""Models of configurations that state positions in some way, and what transformers and mlx-lm compute with them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import torch
import transformers

from pqweights.checkpoint.source import open_local
from pqweights.models import described

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
VISION = {
    "depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
SEEING: dict[str, dict[str, Any]] = dict.fromkeys(
    ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"), UNTIED | {"vision_config": VISION}
) | {"qwen2_vl": UNTIED | {"vision_config": VISION | {"hidden_size": 128}}}
SEEING["llama4"] = UNTIED | {"vision_config": {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}}  # fmt: skip


def saved(folder: Path, stated: dict[str, Any]) -> Any:
    """A model of a configuration, with random weights, saved in F32 beside that configuration; transformers' logits.

    What is stated of a model that also sees is its text_config.
    """
    config = {**SIZES, **stated}
    if (model_type := config["model_type"]) in SEEING:
        text = {key: value for key, value in config.items() if key != "model_type"}
        config = {**SEEING[model_type], "model_type": model_type, "text_config": text | UNTIED}
    path = folder / "config.json"
    folder.mkdir()
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    model = loader(config).from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif not parameter.any():
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    path.write_text(json.dumps(_as_stated(json.loads(path.read_text()), config)))
    return model


def loader(config: dict[str, Any]) -> Any:
    """The class of transformers that loads a model of a configuration."""
    return transformers.AutoModelForImageTextToText if "text_config" in config else transformers.AutoModelForCausalLM


def _as_stated(written: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """What transformers wrote, with positions and kinds of layers as they were stated, or not at all."""
    kept = {key: value for key, value in written.items() if key not in ("rope_parameters", "layer_types")}
    parts = {key: _as_stated(written[key], part) for key, part in stated.items() if key.endswith("_config")}
    return kept | stated | parts


def read_by_mlx(folder: Path) -> Any:
    """What the export reads off mlx-lm's model."""
    from pqweights.formats.mlx import mlx_format
    from pqweights.targets.mlx_model import read_model

    checkpoint = open_local(folder)
    return read_model(
        json.loads((folder / "config.json").read_text()),
        generation_config=None,
        weights=frozenset(),
        tensors={tensor.name: tensor for tensor in checkpoint.tensors},
        dtypes={tensor.name: "F32" for tensor in checkpoint.tensors},
        default=mlx_format("affine", 8, 32),
        smaller=(),
    )


def ids(length: int) -> list[int]:
    return [(7 * n * n + 3) % 128 for n in range(length)]


def logits(model: Any, length: int) -> npt.NDArray[np.float32]:
    """What transformers computes for a text of some length."""
    with torch.no_grad():
        found: npt.NDArray[np.float32] = model(torch.tensor([ids(length)])).logits[0].numpy()
    return found


def logits_of_mlx(config: dict[str, Any], folder: Path, *lengths: int) -> list[npt.NDArray[np.float32]]:
    """What mlx-lm computes for texts of some lengths, with the configuration of an export and the source's weights."""
    from mlx_lm.utils import load_model

    from pqweights.targets.mlx_model import CONVERTERS

    exported = folder.parent / "exported"
    exported.mkdir(exist_ok=True)
    layout = described(json.loads((folder / "config.json").read_text())["model_type"]).mlx.layout
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(exported / "model.safetensors"), weights if layout is None else CONVERTERS[layout](weights))
    plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
    (exported / "config.json").write_text(json.dumps(plain))
    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = load_model(exported)
    return [np.array(model(mx.array([ids(length)])))[0] for length in lengths]


def distance(model: Any, read: Any, folder: Path, length: int) -> float:
    """How far the logits of mlx-lm are from those of transformers, for a text of some length."""
    expected, (found,) = logits(model, length), logits_of_mlx(read.config, folder, length)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
