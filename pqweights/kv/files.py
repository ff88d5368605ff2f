"""A cache in a safetensors file, so that a long prompt is read once and continued many times.

The JSON under `pqweights_kv` in the metadata of the file names the method, the model as far as its configuration tells,
and how many tokens each chunk holds. docs/kv-cache.md has the format.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pqweights.errors import OptionError, OutputError, SourceError
from pqweights.kv.bases import digest
from pqweights.kv.cache import KVCache, kv_cache
from pqweights.kv.layer import PackedHybridLayer, PackedLayer
from pqweights.kv.model import CachedModel
from pqweights.kv.states import Chunk, PackedStates, used_rows

KEY = "pqweights_kv"
VERSION = 1
IDS = "ids"
# What tells models apart, of those attributes that their configuration has.
IDENTITY = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_parameters",
    "sliding_window",
)


def save_kv_cache(cache: KVCache, path: str | os.PathLike[str], *, ids: Tensor | None = None) -> None:
    """Write a cache to a safetensors file, which appears under its name when it is complete.

    ids: the tokens that the cache has read, [sequences, tokens], for whoever loads it; they are not needed

    Raises OptionError for an empty cache, and for one with recurrent states; OutputError if it cannot be written.
    """
    target = Path(path)
    tensors: dict[str, Tensor] = {} if ids is None else {IDS: ids.to(torch.int64)}
    layers = [_saved_layer(number, layer, tensors) for number, layer in enumerate(cache.layers)]
    if not any(layers):
        raise OptionError(f"{target}: expected a cache that has read tokens, found an empty one")
    about = {"version": VERSION, "spec": cache.spec, "model": _identity(cache), "layers": layers}
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, partial, metadata={KEY: json.dumps(about)})
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OutputError(f"{target}: cannot write the cache: {error}") from None


def load_kv_cache(path: str | os.PathLike[str], model: Any) -> tuple[KVCache, Tensor | None]:
    """Load a cache for a model: the cache, and the tokens that were saved with it, if any.

    model: a PreTrainedModel, or its configuration, as for `kv_cache`

    Raises SourceError for a file that is damaged or no cache, or of another model; OptionError like `kv_cache`.
    """
    file = Path(path)
    about, tensors = _read(file)
    cache = kv_cache(model, about["spec"])
    expected = _identity(cache)
    for name, found in about["model"].items():
        if expected.get(name) != found:
            raise SourceError(f"{file}: it is the cache of another model: {name} is {found}, that of this model "
                              f"{expected.get(name)}")  # fmt: skip
    try:
        for number, (layer, saved) in enumerate(zip(cache.layers, about["layers"], strict=True)):
            _load_layer(number, layer, saved, tensors)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
        raise SourceError(f"{file}: the cache is damaged: {' '.join(str(error).split())[:200]}") from None
    ids = tensors.get(IDS)
    device = getattr(model, "device", None)
    if device is not None and torch.device(device).type != "cpu":
        for layer in cache.layers:
            layer.device = torch.device(device)
            layer.prefetch()
    return cache, ids


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what the metadata of a file says, and its tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {}).get(KEY, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise SourceError(f"{file}: cannot read the cache: {' '.join(str(error).split())}") from None
    if not isinstance(about, dict):
        raise SourceError(f"{file}: expected a cache that save_kv_cache wrote, found another file")
    if about.get("version") != VERSION:
        raise SourceError(f"{file}: it has version {about.get('version')!r}; this pqweights reads {VERSION}")
    kinds = {"spec": str, "model": dict, "layers": list}
    for name, kind in kinds.items():
        if not isinstance(about.get(name), kind):
            raise SourceError(f"{file}: {name}: expected a {kind.__name__}, found {about.get(name)!r}")
    return about, tensors


def _identity(cache: KVCache) -> dict[str, Any]:
    """Return what tells the model of a cache from others."""
    model: CachedModel = cache.model
    found = {name: getattr(model.config, name) for name in IDENTITY if getattr(model.config, name, None) is not None}
    if cache.bases:
        found["weights"] = digest(dict(cache.bases))
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def _saved_layer(number: int, layer: Any, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """Add the tensors of a layer, and return what else it takes to load them; None for an empty layer."""
    if isinstance(layer, PackedHybridLayer) or not isinstance(layer, DynamicLayer):
        raise OptionError(f"a cache with recurrent states cannot be saved: layer {number} is a {type(layer).__name__}")
    if not layer.is_initialized or not layer.get_seq_length():
        return None
    if not isinstance(layer, PackedLayer):
        tensors[f"{number}.keys"], tensors[f"{number}.values"] = layer.keys, layer.values
        return {"tokens": layer.get_seq_length()}
    chunks = []
    for name, states in zip(("keys", "values"), layer.states, strict=True):
        assert states.window is not None
        tensors[f"{number}.{name}.window"] = states.window
        for place, chunk in enumerate(states.chunks):
            for part, tensor in _named_parts(states, chunk):
                tensors[f"{number}.{name}.{place}.{part}"] = tensor
        chunks.append([chunk.tokens for chunk in states.chunks])
    return {"chunks": chunks}


def _named_parts(states: PackedStates, chunk: Chunk) -> Iterator[tuple[str, Tensor]]:
    assert states.quantizer is not None
    for name, part in used_rows(chunk, states.quantizer.step).items():
        yield f"rows.{name}", part
    for name, part in chunk.shared.items():
        # Chunks may share tensors, which the format does not allow.
        yield f"shared.{name}", part.clone()


def _load_layer(number: int, layer: Any, saved: dict[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    if saved is None:
        return
    if not isinstance(layer, PackedLayer):
        keys, values = tensors[f"{number}.keys"], tensors[f"{number}.values"]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = int(saved["tokens"])
        return
    windows = [tensors[f"{number}.{name}.window"] for name in ("keys", "values")]
    layer.lazy_initialization(*windows)
    for name, states, window, chunks in zip(("keys", "values"), layer.states, windows, saved["chunks"], strict=True):
        states.window = window
        start = 0
        for place, tokens in enumerate(chunks):
            prefix = f"{number}.{name}.{place}."
            rows, shared = (
                {
                    key.removeprefix(prefix + kind): part
                    for key, part in tensors.items()
                    if key.startswith(prefix + kind)
                }
                for kind in ("rows.", "shared.")
            )
            states.chunks.append(Chunk(rows=rows, shared=shared, start=start, tokens=int(tokens)))
            start += int(tokens)
        decoded = states.decoded()  # damaged parts show here
        if decoded is None or decoded.shape[2] != start + window.shape[2]:
            raise ValueError(f"layer {number}: expected {start + window.shape[2]} tokens of {name}")
