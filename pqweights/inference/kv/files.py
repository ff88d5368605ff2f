"""A cache in a safetensors file, so that a long prompt is read once and continued many times.

The JSON under `pqweights_kv` in the metadata of the file names the method, the model as far as its configuration tells,
and how many tokens each chunk holds. docs/kv-cache.md has the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicSlidingWindowLayer

from pqweights.common.strict_json import is_number, parse_json
from pqweights.errors import OptionError, OutputError, RecipeError, SourceError
from pqweights.inference.kv.bases import is_same_summary, summary
from pqweights.inference.kv.cache import KVCache, kv_cache
from pqweights.inference.kv.layer import PackedLayer
from pqweights.inference.kv.model import CachedModel
from pqweights.inference.kv.schemes import parse_spec
from pqweights.inference.kv.states import Chunk, PackedStates, Parts, StateQuantizer, tensor_bytes, used_rows

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
# What specs of earlier versions may say, methods and an option, that this one does not have.
WITHDRAWN = ("kivi", "absmax", "qjl")
# What the weights say, for methods that need it.
WEIGHTS = "weights"
# Of states that are not packed.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 200


def save_kv_cache(cache: KVCache, path: str | os.PathLike[str], *, ids: Tensor | None = None) -> None:
    """Write a cache to a safetensors file, which appears under its name when it is complete.

    ids: the tokens that the cache has read, [sequences, tokens], for whoever loads it; they are not needed

    Raises OptionError for an empty cache, for one with recurrent states, and for ids of another shape; OutputError if
    it cannot be written.
    """
    target = Path(path)
    if not target.name:
        raise OutputError(f"{path}: expected the name of a file")
    tensors: dict[str, Tensor] = {}
    layers = [_saved_layer(number, layer, tensors) for number, layer in enumerate(cache.layers)]
    if not any(layers):
        raise OptionError(f"{target}: expected a cache that has read tokens, found an empty one")
    if ids is not None:
        sequences = len(next(iter(tensors.values())))
        if ids.dim() != 2 or len(ids) != sequences:
            raise OptionError(f"ids: expected tokens of {sequences} sequences, found the shape {list(ids.shape)}")
        tensors[IDS] = ids.to(torch.int64)
    about = {"version": VERSION, "spec": cache.spec, "model": _identity(cache), "layers": layers}
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, partial, metadata={KEY: json.dumps(about)})
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{target}: cannot write the cache: {error}") from None
    finally:
        if partial.exists():
            partial.unlink()


def load_kv_cache(path: str | os.PathLike[str], model: Any, *, on_codes: bool = False) -> tuple[KVCache, Tensor | None]:
    """Load a cache for a model: the cache, and the tokens that were saved with it, if any.

    model: a PreTrainedModel, or its configuration, as for `kv_cache`. What is not packed takes the dtype of the model.
    on_codes: see `kv_cache`

    Raises SourceError for a file that is damaged or no cache, or of another model; OptionError like `kv_cache`.
    """
    file = Path(path)
    about, tensors = _read(file)
    _check_not_withdrawn(file, about["spec"])
    try:
        parse_spec(about["spec"])
    except OptionError as error:
        raise SourceError(f"{file}: {shown(str(error))}") from None
    cache = kv_cache(model, about["spec"], on_codes=on_codes)
    expected = _identity(cache)
    for name in (*IDENTITY, WEIGHTS):
        stated = about["model"].get(name)
        if not _agrees(name, stated, expected.get(name)):
            raise SourceError(
                f"{file}: it is the cache of another model: {name} is {shown(stated)}, that of this model "
                f"{shown(expected.get(name))}"
            )
    dtype = None if getattr(model, "config", None) is None else model.dtype
    parts = SavedParts(file, tensors, dtype)
    ids = tensors.get(IDS)
    _load_layers(parts, cache, about["layers"], ids)
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
            about = parse_json((opened.metadata() or {}).get(KEY, "null").encode())
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise SourceError(f"{file}: cannot read the cache: {shown(str(error))}") from None
    if not isinstance(about, dict):
        raise SourceError(f"{file}: expected a cache that save_kv_cache wrote, found another file")
    if about.get("version") != VERSION:
        raise SourceError(f"{file}: it has version {shown(about.get('version'))}; this pqweights reads {VERSION}")
    json_types = {"spec": str, "model": dict, "layers": list}
    for name, json_type in json_types.items():
        if not isinstance(about.get(name), json_type):
            raise SourceError(f"{file}: {name}: expected a {json_type.__name__}, found {shown(about.get(name))}")
    return about, tensors


def _check_not_withdrawn(file: Path, spec: str) -> None:
    method, _, options = spec.partition(":")
    for word in (method, *options.split(",")):
        if word in WITHDRAWN:
            raise SourceError(
                f"{file}: it was saved with {shown(spec)}, and pqweights no longer has {word}; read the prompt again"
            )


def _identity(cache: KVCache) -> dict[str, Any]:
    """Return what tells the model of a cache from others."""
    model: CachedModel = cache.model
    identity = {name: getattr(model.config, name) for name in IDENTITY if getattr(model.config, name, None) is not None}
    if cache.bases:
        identity[WEIGHTS] = summary(dict(cache.bases))
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain


def _agrees(name: str, stated: Any, expected: Any) -> bool:
    """Whether what a file says of its model is what the model says."""
    if name != WEIGHTS or not isinstance(stated, list) or not isinstance(expected, list):
        return bool(stated == expected)
    return all(is_number(number) for number in stated) and is_same_summary(stated, expected)


def _saved_layer(number: int, layer: Any, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """Add the tensors of a layer, and return what else it takes to load them; None for an empty layer."""
    if type(layer) is DummyLayer:
        return None
    if type(layer) not in (PackedLayer, DynamicSlidingWindowLayer):
        raise OptionError(f"a cache with recurrent states cannot be saved: layer {number} is a {type(layer).__name__}")
    if not layer.is_initialized or not layer.get_seq_length():
        return None
    if not isinstance(layer, PackedLayer):
        # A layer that may be cropped holds more than the next token sees.
        kept = slice(-layer.sliding_window + 1, None)
        tensors[f"{number}.keys"], tensors[f"{number}.values"] = layer.keys[:, :, kept], layer.values[:, :, kept]
        return {"tokens": layer.get_seq_length()}
    chunks = []
    for name, states in zip(("keys", "values"), layer.states, strict=True):
        assert states.window is not None
        tensors[f"{number}.{name}.window"] = states.window
        for index, chunk in enumerate(states.chunks):
            for part, tensor in _named_parts(states, chunk):
                tensors[f"{number}.{name}.{index}.{part}"] = tensor
        chunks.append([chunk.tokens for chunk in states.chunks])
    return {"chunks": chunks}


def _named_parts(states: PackedStates, chunk: Chunk) -> Iterator[tuple[str, Tensor]]:
    assert states.quantizer is not None
    for name, part in used_rows(chunk, states.quantizer.step).items():
        yield f"rows.{name}", part
    for name, part in chunk.shared.items():
        # Chunks may share tensors, which the format does not allow.
        yield f"shared.{name}", part.clone()


def _load_layers(parts: SavedParts, cache: KVCache, saved: list[Any], ids: Tensor | None) -> None:
    """Load all layers, which must hold the same number of tokens of the same number of sequences."""
    if len(saved) != len(cache.layers):
        raise parts.damaged(f"expected {len(cache.layers)} layers, found {len(saved)}")
    held = {
        _load_layer(number, layer, stated, parts)
        for number, (layer, stated) in enumerate(zip(cache.layers, saved, strict=True))
        if stated is not None
    }
    if len(held) != 1:
        raise parts.damaged("expected as many tokens in all layers" if held else "expected tokens, found none")
    ((sequences, _),) = held
    if ids is not None and (ids.dtype != torch.int64 or ids.dim() != 2 or len(ids) != sequences):
        raise parts.damaged(f"{IDS}: expected int64 tokens of {sequences} sequences, found {list(ids.shape)}")


def _load_layer(number: int, layer: Any, saved: Any, parts: SavedParts) -> tuple[int, int]:
    """Load a layer, and return how many sequences and tokens it has."""
    if type(layer) is PackedLayer:
        return _load_packed(number, layer, saved, parts)
    if type(layer) is not DynamicSlidingWindowLayer:
        raise parts.damaged(f"layer {number}: expected nothing, as the model's is a {type(layer).__name__}")
    keys, values = (parts.states(f"{number}.{name}") for name in ("keys", "values"))
    tokens = saved.get("tokens") if isinstance(saved, dict) else None
    kept = tokens if isinstance(tokens, int) and tokens < layer.sliding_window else layer.sliding_window - 1
    if (
        not isinstance(tokens, int)
        or not keys.shape[2] == values.shape[2] == kept
        or keys.shape[:2] != values.shape[:2]
    ):
        raise parts.damaged(f"layer {number}: {list(keys.shape)} and {list(values.shape)} do not fit {shown(saved)}")
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, tokens
    return len(keys), tokens


def _load_packed(number: int, layer: PackedLayer, saved: Any, parts: SavedParts) -> tuple[int, int]:
    """Load a layer with packed keys and values, and return how many sequences and tokens it has."""
    chunks = saved.get("chunks") if isinstance(saved, dict) else None
    if not isinstance(chunks, list) or len(chunks) != 2 or not all(isinstance(counts, list) for counts in chunks):
        raise parts.damaged(f"layer {number}: expected the chunks of keys and values, found {shown(saved)}")
    names = [f"{number}.{name}" for name in ("keys", "values")]
    windows = [parts.states(f"{name}.window") for name in names]
    if windows[0].shape[:2] != windows[1].shape[:2] or windows[0].dtype != windows[1].dtype:
        raise parts.damaged(f"layer {number}: the windows of keys and values have different shapes or dtypes")
    try:
        layer.lazy_initialization(*windows)
    except OptionError as error:
        raise parts.damaged(str(error)) from None
    for name, states, window, tokens in zip(names, layer.states, windows, chunks, strict=True):
        states.window = window
        states.chunks = parts.chunks(name, states.quantizer, window, tokens)
    keys, values = layer.states
    if keys.tokens != values.tokens or not keys.tokens:
        raise parts.damaged(f"layer {number}: {keys.tokens} keys and {values.tokens} values")
    return layer.batch_size, keys.tokens


def shown(value: object) -> str:
    """Return a value, or a message, as a part of a line."""
    return " ".join((value if isinstance(value, str) else repr(value)).split())[:LONGEST]


@dataclass(frozen=True)
class SavedParts:
    """The tensors of a file by name. dtype: of states that are not packed; None to leave it as it is"""

    file: Path
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype | None

    def damaged(self, said: str) -> SourceError:
        """Return an error that says what of the file is wrong."""
        return SourceError(f"{self.file}: the cache is damaged: {said}")

    def states(self, name: str) -> Tensor:
        """Return states that are not packed, [batch, heads, tokens, size]."""
        states = self._tensor(name)
        shape = states.shape
        if states.dtype not in DTYPES or len(shape) != 4 or not all((shape[0], shape[1], shape[3])):
            raise self.damaged(f"{name}: expected states, found {list(shape)} of {states.dtype}")
        # A window may have no tokens, and then any shape; but a vector takes a bit for each coordinate somewhere.
        if shape[0] * shape[1] * shape[3] > 8 * sum(tensor_bytes(tensor) for tensor in self.tensors.values()):
            raise self.damaged(f"{name}: the file has no states of {list(shape)}")
        return states if self.dtype not in DTYPES else states.to(self.dtype)

    def chunks(self, name: str, quantizer: StateQuantizer | None, window: Tensor, tokens: list[Any]) -> list[Chunk]:
        """Return the chunks of keys or values. tokens: how many each chunk has, as the file says"""
        result: list[Chunk] = []
        if not tokens:
            return result
        if quantizer is None or not all(type(count) is int and count > 0 for count in tokens):
            raise self.damaged(f"{name}: {shown(tokens)} tokens in chunks")
        batch, heads, _, size = window.shape
        zeros = torch.zeros(batch, heads, quantizer.first, size, device="cpu")
        expected = quantizer.fit(zeros, None, 0)
        start = 0
        for index, count in enumerate(tokens):
            prefix = f"{name}.{index}"
            shared = self._parts(f"{prefix}.shared", expected, None)
            first = self._first_row(prefix, quantizer, zeros[:, :, : quantizer.step], shared)
            rows = self._parts(f"{prefix}.rows", first, -(-count // quantizer.step))
            result.append(Chunk(rows=rows, shared=shared, start=start, tokens=count))
            start += count
        return result

    def _first_row(self, prefix: str, quantizer: StateQuantizer, zeros: Tensor, shared: Parts) -> Parts:
        """Return a row that is encoded with the shared parts of the file, which shows whether they hold numbers."""
        try:
            return quantizer.encode(zeros, shared, 0)
        except (RuntimeError, IndexError, ValueError, RecipeError) as error:
            raise self.damaged(f"{prefix}: {shown(str(error))}") from None

    def _parts(self, prefix: str, expected: Parts, rows: int | None) -> dict[str, Tensor]:
        """Return the tensors that are like the expected ones, but have `rows` rows if that is given."""
        parts = {}
        for name, like in expected.items():
            part = self._tensor(f"{prefix}.{name}")
            shape = list(like.shape) if rows is None else [*like.shape[:2], rows, *like.shape[3:]]
            if list(part.shape) != shape or part.dtype != like.dtype:
                raise self.damaged(
                    f"{prefix}.{name}: expected {shape} of {like.dtype}, found {list(part.shape)} of {part.dtype}"
                )
            if part.is_floating_point() and not part.isfinite().all():
                raise self.damaged(f"{prefix}.{name}: expected finite numbers, found NaN or an infinity")
            parts[name] = part
        return parts

    def _tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self.damaged(f"it has no tensor {name}")
        return self.tensors[name]
