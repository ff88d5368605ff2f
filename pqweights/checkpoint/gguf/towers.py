"""The tower for images of a model, as llama.cpp holds it: the metadata and the tensors of an mmproj file.

What is stated beside the configuration is how images are normalized, in preprocessor_config.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.settings import Settings, value_of
from pqweights.checkpoint.gguf.views import InterleavedTensor, OffsetTensor, RenamedTensor, ReorderedTensor
from pqweights.checkpoint.models import text_config
from pqweights.checkpoint.models.description import ModelDescription
from pqweights.checkpoint.models.llama_cpp import Architecture
from pqweights.checkpoint.models.llama_cpp_towers import TOWERS, Tower
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_file
from pqweights.checkpoint.views import MatrixCache, MovedTensor, Segment
from pqweights.errors import ExportError

ARCHITECTURE = "clip"
# Where image processors are stated: alone, and as a part of a processor.
PROCESSORS = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
PARTS = ("visual.", "vision_tower.", "multi_modal_projector.")
# Computed with in float32: embeddings of patches and positions, and what has one dimension.
PLAIN = re.compile(r"v\.(patch_embd|position_embd|token_embd)\..*")
BREAK = "[IMG_BREAK]"


class GgufTower(NamedTuple):
    """A tower.

    writer: a GGUFWriter with its metadata
    tensors: under their names in the file
    """

    writer: Any
    tensors: tuple[LogicalTensor, ...]


def gguf_tower(checkpoint: Checkpoint) -> GgufTower | None:
    """Return the tower of a checkpoint; None if it has none.

    Raises ExportError if llama.cpp would compute it otherwise, or something is missing.
    """
    config = checkpoint.config or {}
    named = [(tensor.name.removeprefix("model."), tensor) for tensor in checkpoint.tensors]
    parts = [(name, tensor) for name, tensor in named if name.startswith(PARTS)]
    if not parts or not isinstance(vision := config.get("vision_config"), dict):
        return None
    tower = TOWERS.get(str(config.get("model_type")))
    if tower is None:
        raise ExportError(f"pqweights does not know the tower of {config.get('model_type')}")
    settings = _settings(tower, vision, config)
    writer = gguf_package().GGUFWriter(None, ARCHITECTURE)
    writer.add_type(gguf_package().GGUFType.MMPROJ)
    _add_hyper_parameters(tower, settings, writer, checkpoint)
    blocks = settings.number("depth" if settings.get("depth") else "num_hidden_layers")
    # It takes the numbers of a projection for those of blocks.
    names = gguf_package().get_tensor_name_map(gguf_package().MODEL_ARCH.MMPROJ, max(blocks, 3))
    tensors = [view for name, tensor in parts for view in _views(name, tensor, names, tower, settings)]
    if tower.breaks:
        tensors.append(_break(checkpoint))
    return GgufTower(writer, tuple(tensors))


def _settings(tower: Tower, vision: dict[str, Any], config: dict[str, Any]) -> Settings:
    """Return the configuration of a tower, with what follows from it. Raises ExportError for values of other models."""
    known = ModelDescription(defaults=tower.defaults)
    values = {key: value for key, value in config.items() if key in ("projector_hidden_act", "mm_tokens_per_image")}
    values |= {key: value for key, value in vision.items() if value is not None}
    if "spatial_merge_size" in config:
        values["spatial_merge_size"] = config["spatial_merge_size"]
    shell = Architecture(name="MMPROJ")
    settings = Settings(model_type=str(config.get("model_type")), model=known, architecture=shell, values=values)
    for key, taken in tower.values.items():
        if settings.get(key) not in taken:
            raise settings.refusal(f"llama.cpp computes its tower with {key} {taken[0]!r} only")
    values["uses_gelu"] = str(settings.get("hidden_act")).startswith("gelu")
    if (positions := settings.get("num_position_embeddings")) is not None:
        values["image_size"] = math.isqrt(positions) * settings.number("patch_size")
    if (tokens := settings.get("mm_tokens_per_image")) is not None:
        values["pooled"] = settings.number("image_size") // settings.number("patch_size") // math.isqrt(tokens)
    if isinstance(full := values.get("fullatt_block_indexes"), list):
        values["full_attention_interval"] = full[0] + 1
        if full != list(range(full[0], settings.number("depth"), full[0] + 1)):
            raise settings.refusal("llama.cpp has full attention in every n-th layer of its tower only")
    return settings


def _add_hyper_parameters(tower: Tower, settings: Settings, writer: Any, checkpoint: Checkpoint) -> None:
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(getattr(gguf_package().VisionProjectorType, tower.projector))
    text = text_config(checkpoint.config).get("hidden_size")
    writer.add_vision_projection_dim(int(settings.positive(text, "hidden_size of the text model")))
    for setting in tower.settings:
        getattr(writer, f"add_{setting.parameter}")(value_of(setting, settings))
    if isinstance(layers := settings.get("deepstack_visual_indexes"), list):
        depth = settings.number("depth")
        writer.add_vision_is_deepstack_layers([layer in layers for layer in range(depth)])
    processor = _image_processor(checkpoint)
    for key in ("image_mean", "image_std"):
        numbers = processor.get(key)
        if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
            raise ExportError(f"preprocessor_config.json: expected a list of numbers as {key}, found {numbers!r:.80}")
        getattr(writer, f"add_vision_{key}")([float(number) for number in numbers])


def _image_processor(checkpoint: Checkpoint) -> dict[str, Any]:
    for file, part in PROCESSORS:
        if file in checkpoint.companions:
            stated = json.loads(read_file(checkpoint.storage, file))
            stated = stated.get(part, {}) if part and isinstance(stated, dict) else stated
            if isinstance(stated, dict) and stated:
                return stated
    raise ExportError("preprocessor_config.json, which says how images are normalized, is missing")


def _views(name: str, tensor: LogicalTensor, names: Any, tower: Tower, settings: Settings) -> Iterator[LogicalTensor]:
    """Yield what the file holds of a tensor of the tower."""
    if re.match(r"vision_tower\.(vision_model\.)?head\.", name):  # of SigLIP, which no model of images and text reads
        return
    stem, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
    matches = ((re.fullmatch(expression, stem), known) for expression, known in tower.modules.items())
    stem = next((match.expand(known) for match, known in matches if match), stem)
    known = f"{stem}{dot}{suffix}"
    if not stem.startswith(("v.", "mm.")):
        known = names.get_name(known, try_suffixes=(".weight", ".bias")) or ""
    if match := re.match(r"v\.deepstack\.(\d+)", known):
        layer = settings.get("deepstack_visual_indexes")[int(match[1])]
        known = f"v.deepstack.{layer}{known[match.end() :]}"
    if not known:
        raise ExportError(f"tensor {tensor.name!r}: llama.cpp's tower of {settings.model_type} has no such tensor")
    if len(tensor.shape) == 5:  # two frames
        yield from _frames(known, tensor)
    elif ".attn_qkv." in known and not tower.joined:
        rows = tensor.shape[0] // 3
        for place, part in enumerate(("attn_q", "attn_k", "attn_v")):
            yield _rows(known.replace("attn_qkv", part), tensor, place * rows, rows)
    elif tower.interleaved and re.search(r"\.attn_[qk]\.", known):
        heads = settings.number("num_attention_heads")
        yield InterleavedTensor.of(known, tensor, head_rows=tensor.shape[0] // heads)
    elif tower.offset and name.startswith(tower.offset):
        yield OffsetTensor.of(known, tensor, offset=1.0, dtype="F32", plain_dtype="F32")
    else:
        yield RenamedTensor.of(known, tensor)


def _frames(name: str, tensor: LogicalTensor) -> Iterator[LogicalTensor]:
    """Yield the kernels of the two frames of a convolution, [outputs, channels, frames, height, width]."""
    outputs, channels, frames, height, width = tensor.shape
    flat = RenamedTensor.of(name, tensor, shape=(outputs, math.prod(tensor.shape[1:])))
    places = np.arange(flat.shape[1]).reshape(channels, frames, height * width)
    for frame, ending in enumerate(("", ".1")[:frames]):
        view = ReorderedTensor.of(name + ending, flat, order=places[:, frame].reshape(-1))
        yield replace(view, shape=(outputs, channels, height, width))


def _rows(name: str, tensor: LogicalTensor, first: int, count: int) -> MovedTensor:
    """Return some rows of a matrix, or elements of a bias."""
    segments = (Segment(tensor=tensor, first=first, step=1, count=count),)
    columns = range(tensor.shape[-1])
    if len(tensor.shape) == 1:
        segments, columns = (Segment(tensor=tensor, first=0, step=1, count=1),), range(first, first + count)
    return MovedTensor(
        name=name, shape=(count, *tensor.shape[1:]), dtype=tensor.plain_dtype, segments=segments, columns=columns,
        transposed=False, cache=MatrixCache(),
    )  # fmt: skip


def _break(checkpoint: Checkpoint) -> LogicalTensor:
    """Return the embedding of the token that ends a row of an image."""
    there = "tokenizer.json" in checkpoint.companions
    added = json.loads(read_file(checkpoint.storage, "tokenizer.json")).get("added_tokens", []) if there else []
    number = next((token["id"] for token in added if token.get("content") == BREAK), None)
    embeddings = next((t for t in checkpoint.tensors if t.name.endswith("embed_tokens.weight")), None)
    if number is None or embeddings is None:
        raise ExportError(f"tokenizer.json: {BREAK}, which llama.cpp puts behind each row of an image, is missing")
    return replace(_rows("v.token_embd.img_break", embeddings, number, 1), shape=embeddings.shape[1:])
