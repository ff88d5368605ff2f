"""The tower for images of a model, as llama.cpp holds it: the metadata and the tensors of an mmproj file.

What is stated beside the configuration is how images are normalized, in preprocessor_config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.regrouped import in_words_of
from pqweights.checkpoint.gguf.settings import value_of
from pqweights.checkpoint.gguf.tokens import read_tokenizer
from pqweights.checkpoint.gguf.views import InterleavedTensor, RenamedTensor, ReorderedTensor, one_added
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_json_object
from pqweights.checkpoint.views import MovedTensor
from pqweights.errors import ExportError
from pqweights.models import text_config
from pqweights.models.description import ModelDescription
from pqweights.models.llama_cpp import Architecture, keys_of
from pqweights.models.settings import Settings
from pqweights.models.towers import TOWERS, Tower

ARCHITECTURE = "clip"
# Where image processors are stated: alone, and as a part of a processor.
PROCESSORS = (
    ("preprocessor_config.json", "media_proc_cfg"), ("preprocessor_config.json", None),
    ("processor_config.json", "image_processor"),
)  # fmt: skip
PARTS = (
    "visual.", "vision_tower.", "vision_model.", "embed_vision.", "multi_modal_projector.", "mm_projector.",
    "vit_large_projector.", "patch_merge_mlp.", "connector.",
)  # fmt: skip
# Keys beside the vision_config that say how a tower computes.
BESIDE = (
    "projector_hidden_act", "mm_tokens_per_image", "spatial_merge_size", "vision_feature_layer", "scale_factor",
    "vision_feature_select_strategy", "downsample_factor", "downsample_ratio", "projection_layer_norm_eps",
    "understand_projector_stride",
)  # fmt: skip
# Other keys of published configurations.
RENAMED = {"projector_ln_eps": "projection_layer_norm_eps", "hidden_activation": "hidden_act"}
RENAMED |= {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
RENAMED |= {f"init_pos_emb_{side}": f"pos_emb_{side}" for side in ("height", "width")}
# How many positions a square image has.
POSITIONS = ("num_position_embeddings", "num_patches")
# What divides the sides of an image in patches; the reciprocal of it.
SCALES = ("pooling_kernel_size", "merge_kernel_size", "downsample_factor", "scale_factor")
RATIOS = ("pixel_shuffle_ratio", "downsample_ratio")
# Computed with in float32: embeddings of patches and positions, and what has one dimension.
PLAIN = re.compile(r"v\.(patch_embd|position_embd|token_embd|class_embd)(\..*)?")
BREAK = "[IMG_BREAK]"
# The last part of the names of tensors: of weights, biases, and of the numbers between which a layer's values are cut.
SUFFIX = re.compile(r"(.*)\.(weight|bias|(?:input|output)_(?:min|max))")


def gguf_tower(checkpoint: Checkpoint) -> tuple[Any, tuple[LogicalTensor, ...], str] | None:
    """Return the tower of a checkpoint; None if it has none.

    It is a GGUFWriter with its metadata, its tensors under their names in the file, and what llama.cpp does otherwise.

    Raises ExportError if llama.cpp would compute it otherwise, or something is missing.
    """
    config = checkpoint.config or {}
    named = [(tensor.name.removeprefix("model."), tensor) for tensor in checkpoint.tensors]
    parts = [(name, tensor) for name, tensor in named if name.startswith(PARTS)]
    if not parts or not isinstance(vision := config.get("vision_config"), dict):
        return None
    model_type = str(config.get("model_type"))
    tower = TOWERS.get(f"{model_type} {vision.get('model_type')}", TOWERS.get(model_type))
    if tower is None:
        raise ExportError(f"pqweights does not know the tower of {model_type}")
    settings = tower_settings(tower, vision, config)
    writer = gguf_package().GGUFWriter(None, ARCHITECTURE)
    writer.add_type(gguf_package().GGUFType.MMPROJ)
    add_hyper_parameters(tower, settings, writer, config, _image_processor(checkpoint))
    blocks = settings.number("depth" if settings.get("depth") else "num_hidden_layers")
    # It takes the numbers of a projection for those of blocks.
    names = gguf_package().get_tensor_name_map(gguf_package().MODEL_ARCH.MMPROJ, max(blocks, 3))
    tensors = [view for name, tensor in parts for view in views_of_tower(name, tensor, names, tower, settings)]
    if tower.breaks:
        tensors.append(_break(checkpoint))
    return writer, tuple(tensors), tower.remark


def tower_settings(tower: Tower, vision: dict[str, Any], config: dict[str, Any]) -> Settings:
    """Return the configuration of a tower, with what follows from it. Raises ExportError for values of other models."""
    known = ModelDescription(defaults=tower.defaults)
    values = {key: config[key] for key in BESIDE if key in config}
    values |= {key.removeprefix("vt_"): value for key, value in vision.items() if value is not None}
    values |= {new: values[old] for old, new in RENAMED.items() if old in values}
    rope = values.get("rope_parameters")
    values["rope_theta"] = rope.get("rope_theta") if isinstance(rope, dict) else values.get("rope_theta")
    shell = Architecture(name="MMPROJ")
    settings = Settings(model_type=str(config.get("model_type")), model=known, architecture=shell, values=values)
    for key, taken in tower.values.items():
        if settings.get(key) not in taken:
            raise settings.refusal(f"llama.cpp supports its tower only with {key} {taken[0]!r}")
    for one, other in tower.equal:
        if settings.number(one) != settings.number(other):
            raise settings.refusal(
                f"llama.cpp supports its tower only with equal {' x '.join(keys_of(one))} and {other}"
            )
    values["uses_gelu"] = str(settings.get("hidden_act")).startswith("gelu")
    values["uses_silu"] = settings.get("hidden_act") == "silu"
    if positions := next(filter(settings.get, POSITIONS), None):
        values["image_size"] = math.isqrt(settings.number(positions)) * settings.number("patch_size")
    if settings.get("pos_emb_height"):
        values["image_size"] = settings.number("pos_emb_height") * settings.number("patch_size")
    if isinstance(settings.get("mlp_ratio"), float):
        values["intermediate_size"] = int(settings.number("hidden_size") * settings.real("mlp_ratio"))
    if (scale := _scale(settings)) is not None:
        values["scale"] = scale
    if isinstance(full := values.get("fullatt_block_indexes"), list):
        values["full_attention_interval"] = first = full[0] + 1 if full and isinstance(full[0], int) else 0
        if first < 1 or full != list(range(first - 1, settings.number("depth"), first)):
            raise settings.refusal("llama.cpp supports full attention only in every n-th layer of its tower")
    return settings


def _scale(settings: Settings) -> int | None:
    """Return how many patches on a side become one vector; None for towers that state it otherwise."""
    if settings.get("mm_tokens_per_image") is not None:
        side = math.isqrt(settings.number("mm_tokens_per_image"))
        return settings.number("image_size") // settings.number("patch_size") // side
    if ratio := next(filter(settings.get, RATIOS), None):
        return round(1 / settings.real(ratio))
    return next((settings.number(key) for key in SCALES if settings.get(key)), None)


def add_hyper_parameters(
    tower: Tower, settings: Settings, writer: Any, config: Mapping[str, Any] | None, processor: Mapping[str, Any]
) -> None:
    """Write what a tower is, and how images are normalized. processor: preprocessor_config.json"""
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(getattr(gguf_package().VisionProjectorType, tower.projector, tower.projector))
    text = text_config(config).get("hidden_size")
    writer.add_vision_projection_dim(int(settings.positive(text, "hidden_size of the text model")))
    for setting in tower.settings:
        getattr(writer, f"add_{setting.parameter}")(value_of(setting, settings))
    if isinstance(layers := settings.get("deepstack_visual_indexes"), list):
        depth = settings.number("depth")
        writer.add_vision_is_deepstack_layers([layer in layers for layer in range(depth)])
    for key in ("image_mean", "image_std"):
        numbers = processor.get(key)
        if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
            raise ExportError(f"preprocessor_config.json: expected a list of numbers as {key}, found {numbers!r:.80}")
        getattr(writer, f"add_vision_{key}")([float(number) for number in numbers])
    if tower.resizes:
        size = processor.get("size")
        side = size.get("longest_edge") if isinstance(size, dict) else None
        fits = isinstance(side, int) and 0 < side < 1 << 31
        writer.add_vision_preproc_image_size(side if fits else settings.number("image_size"))


def _image_processor(checkpoint: Checkpoint) -> dict[str, Any]:
    for file, part in PROCESSORS:
        if file in checkpoint.companions:
            stated = read_json_object(checkpoint.storage, file)
            stated = stated.get(part, {}) if part else stated
            if isinstance(stated, dict) and stated:
                return stated
    raise ExportError("preprocessor_config.json, which says how images are normalized, is missing")


def views_of_tower(
    name: str, tensor: LogicalTensor, names: Any, tower: Tower, settings: Settings
) -> Iterator[LogicalTensor]:
    """Yield what the file holds of a tensor of the tower."""
    known = name_in_file(name, names, tower, settings)
    if known is None:
        return
    if not known:
        raise ExportError(f"tensor {tensor.name!r}: llama.cpp's tower of {settings.model_type} has no such tensor")
    if len(tensor.shape) == 5:  # two frames
        yield from _frames(known, tensor)
    elif ".attn_qkv." in known and not tower.joined:
        rows = np.arange(_multiple(tensor, 0, 3)).reshape(3, -1)
        for index, part in enumerate(("attn_q", "attn_k", "attn_v")):
            yield _rows(known.replace("attn_qkv", part), tensor, rows[index])
    elif ".attn_qkv." in known and tower.by_axis:
        heads = settings.number("num_attention_heads")
        yield _rows(known, tensor, by_axis(_multiple(tensor, 0, 12 * heads), heads))
    elif tower.three_axes and re.search(r"\.attn_[qk]\.", known):
        heads = settings.number("num_attention_heads")
        yield _rows(known, tensor, three_axes(_multiple(tensor, 0, heads), heads))
    elif tower.interleaved and re.search(r"\.attn_[qk]\.", known):
        heads = settings.number("num_attention_heads")
        yield InterleavedTensor.of(known, tensor, head_rows=_multiple(tensor, 0, 2 * heads) // heads)
    elif tower.colors_last and known == "v.patch_embd.weight":
        yield _colors_first(known, tensor, settings.number("patch_size"))
    elif tower.class_first and known == "v.position_embd.weight":
        yield _rows(known, tensor, np.roll(np.arange(math.prod(tensor.shape[:-1])), -1))
    elif tower.offset and name.startswith(tower.offset):
        yield one_added(known, tensor)
    else:
        yield RenamedTensor.of(known, tensor, shape=_shape(known, tensor.shape, tower))


def name_in_file(name: str, names: Any, tower: Tower, settings: Settings) -> str | None:
    """Return the name in the file of a tensor of the tower; "" if it has none, None if it is not needed."""
    stem, suffix = match.groups() if (match := SUFFIX.fullmatch(name)) else (name, "")
    if re.fullmatch(tower.unused, stem):
        return None
    renamed = in_words_of(tower.modules, stem)
    stem = stem if renamed is None else renamed
    known = f"{stem}.{suffix}" if suffix else stem
    if not stem.startswith(("v.", "mm.")):
        named = (names.get_name(f"{prefix}{stem}") for prefix in ("", "model."))
        known = known.replace(stem, next(filter(None, named), ""))
    if match := re.match(r"v\.deepstack\.(\d+)", known):
        layers, number = settings.get("deepstack_visual_indexes"), int(match[1])
        if not isinstance(layers, list) or number >= len(layers):
            raise settings.refusal(f"expected a layer for {name!r} in deepstack_visual_indexes, found {layers}")
        known = f"v.deepstack.{layers[number]}{known[match.end() :]}"
    return known if known.startswith(("v.", "mm.")) else ""


def _multiple(tensor: LogicalTensor, axis: int, of: int) -> int:
    """Return the size of an axis. Raises ExportError if it is not a multiple of what the configuration says."""
    size = tensor.shape[axis] if tensor.shape else 1
    if size % of:
        raise ExportError(f"tensor {tensor.name!r} {list(tensor.shape)}: config.json asks for a multiple of {of}")
    return size


def _shape(name: str, shape: tuple[int, ...], tower: Tower) -> tuple[int, ...]:
    """Return the shape in the file: that of a class token without leading dimensions of 1, of a number with one."""
    if name == "v.position_embd.weight" and tower.flat_positions:
        return (math.prod(shape[:-1]), shape[-1])
    return shape[-1:] if name == "v.class_embd" else shape or (1,)


def _frames(name: str, tensor: LogicalTensor) -> Iterator[LogicalTensor]:
    """Yield the kernels of the two frames of a convolution, [outputs, channels, frames, height, width]."""
    outputs, channels, frames, height, width = tensor.shape
    kernels = RenamedTensor.of(name, tensor, shape=(math.prod(tensor.shape[:3]), height * width))
    for frame, ending in enumerate(("", ".1")[:frames]):
        rows = range(frame, kernels.shape[0], frames)
        view = MovedTensor.of(name + ending, (len(rows), kernels.shape[1]), [(kernels, rows)])
        yield RenamedTensor.of(view.name, view, shape=(outputs, channels, height, width), dtype=tensor.dtype)


def _colors_first(name: str, tensor: LogicalTensor, side: int) -> LogicalTensor:
    """Return the kernels of a convolution whose weights are a matrix, [outputs, height * width * channels]."""
    order = np.arange(_multiple(tensor, -1, side * side)).reshape(side, side, -1).transpose(2, 0, 1)
    shape = (tensor.shape[0], *order.shape)
    return replace(ReorderedTensor.of(name, tensor, order=order.reshape(-1)), shape=shape)


def by_axis(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Return the order of rows of queries, keys and values in which both axes have half of the channels of each head.

    In the checkpoint, pairs of channels are turned by the axes in turns.
    """
    queries, keys, values = np.arange(rows).reshape(3, -1)
    moved = (part.reshape(heads, -1, 2, 2).swapaxes(1, 2).reshape(-1) for part in (queries, keys))
    return np.concatenate([*moved, values])


def three_axes(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Return the order of rows of queries or keys in which both channels of the pairs of an axis lie together.

    In the checkpoint, the first channels of all axes come before the second ones. What is not turned is last.
    """
    numbers = np.arange(rows).reshape(heads, -1)
    pairs = numbers.shape[1] // 3 // 2
    turned = numbers[:, : 6 * pairs].reshape(heads, 2, 3, pairs).swapaxes(1, 2).reshape(heads, -1)
    return np.concatenate([turned, numbers[:, 6 * pairs :]], axis=1).reshape(-1)


def _rows(name: str, tensor: LogicalTensor, order: npt.NDArray[np.int64]) -> LogicalTensor:
    """Return some rows of a matrix, or elements of a vector. order: their numbers"""
    if order.shape == tensor.shape:
        return ReorderedTensor.of(name, tensor, order=order)
    if len(tensor.shape) == 1:
        column = _rows(name, RenamedTensor.of(name, tensor, shape=(*tensor.shape, 1)), order)
        return RenamedTensor.of(name, column, shape=order.shape, dtype=tensor.dtype)
    runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    segments = ((tensor, range(int(run[0]), int(run[0]) + len(run))) for run in runs)
    return MovedTensor.of(name, (len(order), tensor.shape[-1]), segments)


def _break(checkpoint: Checkpoint) -> LogicalTensor:
    """Return the embedding of the token that ends a row of an image."""
    there = "tokenizer.json" in checkpoint.companions
    added = read_tokenizer(checkpoint.storage).get("added_tokens") or [] if there else []
    number = next((token.get("id") for token in added if token["content"] == BREAK), None)
    embeddings = next((t for t in checkpoint.tensors if t.name.endswith("embed_tokens.weight")), None)
    if embeddings is None or not isinstance(number, int) or not 0 <= number < embeddings.shape[0]:
        raise ExportError(f"tokenizer.json: {BREAK}, which llama.cpp puts behind each row of an image, is missing")
    row = _rows("v.token_embd.img_break", embeddings, np.array([number]))
    return RenamedTensor.of(row.name, row, shape=embeddings.shape[1:])
