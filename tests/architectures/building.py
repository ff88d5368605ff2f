"""Building, loading and running the models of known_architectures.py, as they are and packed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from closeness import assert_near
from helpers import Array
from known_architectures import Architecture
from safetensors.torch import load_file, save_file

import pqweights
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local

# Settings that a model reads although the class of its configuration does not name them.
READ_BY_MODEL = ("position_buckets", "rope_theta")
# transformers cuts or joins some of their weights as it loads them; these are decoded where others stay packed.
REARRANGED = (
    "GteConfig",
    "HrmTextConfig",
    "Inkling2TextConfig",
    "InklingConfig",
    "JinaEmbeddingsV3Config",
    "NomicBertConfig",
)
IDS = [5, 77, 3, 9, 100, 42, 7, 7]


def build(about: Architecture, folder: Path) -> None:
    """A model with random weights, biases and norms, saved in BF16."""
    torch.manual_seed(3)
    config = getattr(transformers, about.config)(**about.settings)
    model = getattr(transformers, about.model)(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif not parameter.any():
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    if about.published:
        rename(folder / "model.safetensors", about.published)
    path = folder / "config.json"
    saved = json.loads(path.read_bytes())
    _drop_unknown(saved, about.settings, config)
    path.write_text(json.dumps(saved))


def rename(path: Path, published: dict[str, str]) -> None:
    """Give tensors the names that they have in published files."""
    tensors = load_file(path)
    for pattern, name in published.items():
        tensors = {re.sub(pattern, name, old): tensor for old, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _drop_unknown(saved: dict[str, Any], settings: dict[str, Any], config: Any) -> None:
    """Drop settings that the class of a configuration does not have.

    transformers saves any argument that it is given, but a configuration that it makes by itself lacks them.
    """
    known = {*type(config)().to_dict(), *READ_BY_MODEL}
    for key, value in settings.items():
        if isinstance(value, dict) and key in config.sub_configs:
            _drop_unknown(saved[key], value, getattr(config, key))
        elif key not in known and key not in config.attribute_map:
            saved.pop(key, None)


def load(about: Architecture, folder: Path, dtype: Any = None) -> Any:
    """The model in transformers; no weight is missing, none is left over."""
    model, info = getattr(transformers, about.model).from_pretrained(
        folder, dtype=dtype or torch.float32, output_loading_info=True
    )
    assert not {kind: sorted(names) for kind, names in info.items() if names}
    return model.eval()


def computed(about: Architecture, model: Any) -> Array:
    """What a model makes of fixed inputs."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"image": ("pixel_values", 1, 3, 32, 32), "sound": ("input_values", 1, 800)}
    shapes |= {"image and ids": shapes["image"], "features": ("input_features", 1, 16, 64)}
    inputs: dict[str, Any] = {}
    if about.takes in shapes:
        name, *shape = shapes[about.takes]
        inputs[name] = torch.randn(*shape, generator=generator).to(model.dtype)
    if about.takes in ("ids", "seq2seq", "image and ids"):
        inputs["input_ids"] = torch.tensor([IDS])
    if about.takes in ("seq2seq", "features"):
        inputs["decoder_input_ids"] = torch.tensor([IDS[:5]])
    with torch.no_grad():  # weights that a first call decodes in inference mode cannot be converted
        found = model(**inputs)
    names = ("logits", "image_embeds", "last_hidden_state")
    values: Array = next(found[name] for name in names if getattr(found, name, None) is not None).float().numpy()
    assert np.isfinite(values).all()
    return values


def open_master(folder: Path, **options: Any) -> Any:
    """Load a master with the only implementation of experts that packed weights have."""
    return pqweights.load_model(folder, experts_implementation="eager", **options).eval()


def memory(model: Any) -> tuple[int, int]:
    """Return the bytes of packed and of ordinary parameters and buffers."""
    from pqweights.runtime.loading.packed import PackedTensor

    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values()
    packed = sum(tensor.stored_bytes for tensor in tensors if isinstance(tensor, PackedTensor))
    plain = sum(tensor.numel() * tensor.element_size() for tensor in tensors if not isinstance(tensor, PackedTensor))
    return packed, plain


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the codes and norms of a master."""
    return sum(
        part.byte_count
        for tensor in open_local(folder).tensors
        if isinstance(tensor, EncodedTensor)
        for part in tensor.parts
    )


def check_packed(about: Architecture, folder: Path, decoded: Any, expected: Array) -> None:
    """Every quantized weight stays packed, and the output is that of the decoded model."""
    from pqweights.runtime.loading.packed import PackedTensor

    packed = open_master(folder, dtype="float32", packed=True)
    in_codes, plain = memory(packed)
    # The matrices are the same, but torch may add up products in another order for fewer rows.
    assert_near(computed(about, packed), expected, "torch")
    if about.config in REARRANGED:
        assert packed.hf_quantizer.decoded_weights != () and in_codes < stored_bytes(folder)
        return
    assert packed.hf_quantizer.decoded_weights == ()
    assert in_codes == stored_bytes(folder)
    quantized = {name for name, tensor in packed.named_parameters() if isinstance(tensor, PackedTensor)}
    kept = {
        id(tensor): tensor.numel() * tensor.element_size()
        for name, tensor in [*decoded.named_parameters(remove_duplicate=False), *decoded.named_buffers()]
        if name not in quantized
    }
    assert plain <= sum(kept.values())
