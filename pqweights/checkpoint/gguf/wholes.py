"""A text model and its tower for images, two GGUF files, as the one model that they were made from.

It is the inverse of towers.py, whose views say of which rows of the model each tensor of the file is made. The metadata
are written again, and compared with the file of the tower: so nothing of that is overlooked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.configurations import key_of, same_value, shortest, solve
from pqweights.checkpoint.gguf.contents import GgufContents, MetadataList
from pqweights.checkpoint.gguf.inverse import AbsentTensor, Piece, assembled, pieces_of
from pqweights.checkpoint.gguf.towers import (
    ARCHITECTURE,
    BESIDE,
    POSITIONS,
    RATIOS,
    SCALES,
    add_hyper_parameters,
    name_in_file,
    tower_settings,
    views_of_tower,
)
from pqweights.checkpoint.gguf.views import RenamedTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.errors import ExportError
from pqweights.models.settings import Settings
from pqweights.models.towers import TOWERS, Tower
from pqweights.models.wholes import WHOLES, Whole, names_of_tower

# Keys of the tower that say nothing of the computation, or what its tensors say.
SAY_NOTHING = (
    "image_min_pixels", "image_max_pixels", "preproc_image_size", "preproc_min_tiles", "preproc_max_tiles",
    "has_text_encoder", "has_llava_projector", "has_audio_encoder", "projector_type", "window_size", "feature_layer",
)  # fmt: skip
# What llama.cpp takes where files do not say (tools/mtmd/clip.cpp).
TAKEN = {"vision.projector.scale_factor": {"GEMMA3": 4}, "vision.spatial_merge_size": {"QWEN2VL": 2, "QWEN25VL": 2}}
# What states the width of tensors, and one of these.
WIDTHS = {"vision_embedding_length": "v.patch_embd.weight", "vision_feed_forward_length": "v.blk.0.ffn_up.weight"}
BREAK = "v.token_embd.img_break"


def whole_models(
    tower: GgufContents, text: GgufContents, config: Mapping[str, Any], tokens: Sequence[Any]
) -> Iterator[tuple[Whole, dict[str, Any]]]:
    """Yield the models that two files may be of, each with its config.json.

    config: that of the text model alone
    tokens: the texts of its tokens

    Raises ExportError if there is none.
    """
    if tower.architecture != ARCHITECTURE or tower.metadata.get("clip.has_vision_encoder") is not True:
        raise ExportError("it holds no image tower")
    if tower.metadata.get("clip.has_audio_encoder") is True:
        raise ExportError("it also holds an audio tower")
    named = tower.text("clip.vision.projector_type") or tower.text("clip.projector_type")
    types = vars(gguf_package().VisionProjectorType)
    fitting = [
        whole for whole in WHOLES if named == types.get(TOWERS[whole.tower].projector, TOWERS[whole.tower].projector)
    ]
    held = {tensor.name: tensor.shape for tensor in tower.tensors}
    fitting = [whole for whole in fitting if config["model_type"] in whole.texts and whole.needs in held]
    if not fitting:
        raise ExportError(f"a tower of type {named!r:.40} beside a {config['model_type']} is not read")
    for whole in fitting:
        yield whole, _config(whole, tower, text, config, tokens, held)


def _value(tower: GgufContents, key: str) -> Any:
    value = tower.metadata.get(f"clip.{key}")
    return [*map(shortest, value.first)] if isinstance(value, MetadataList) else shortest(value)


def _config(
    whole: Whole,
    tower: GgufContents,
    text: GgufContents,
    config: Mapping[str, Any],
    tokens: Sequence[Any],
    held: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Return the config.json of a whole model."""
    of_text = {key: value for key, value in config.items() if key != "architectures"}
    if renamed := whole.texts[config["model_type"]]:
        of_text["model_type"] = renamed
        sections = text.metadata.get(f"{text.architecture}.rope.dimension_sections")
        rope = of_text.get("rope_parameters") or {"rope_type": "default", "rope_theta": of_text.get("rope_theta")}
        if isinstance(sections, MetadataList):
            of_text["rope_parameters"] = {**rope, "mrope_section": [*sections.first[:3]]}
    result = {
        "architectures": [whole.class_name],
        "model_type": whole.model_type,
        "dtype": of_text.pop("dtype", "bfloat16"),
        "tie_word_embeddings": of_text.get("tie_word_embeddings", False),
        "text_config": of_text,
    }
    ids = {token: number for number, token in reversed([*enumerate(tokens)]) if isinstance(token, str)}
    result |= {key: ids[token] for key, token in whole.tokens.items() if token in ids}
    vision = {**_vision(TOWERS[whole.tower], tower), **whole.stated}
    result |= {key: vision.pop(key) for key in BESIDE if key in vision}
    vision = {whole.keys.get(key, key): value for key, value in vision.items()}
    result["vision_config"] = {"model_type": whole.vision_type, **vision}
    for key, (name, axis) in whole.sizes.items():
        section = result["vision_config"] if key.startswith("vision_config.") else result
        shape = held.get(name)
        if axis is None:
            section[key.removeprefix("vision_config.")] = shape is not None
        elif shape is None or axis >= len(shape):
            raise ExportError(f"tensor {name!r} is missing, or has another number of dimensions")
        else:
            section[key.removeprefix("vision_config.")] = shape[axis]
    return result


def _vision(tower: Tower, contents: GgufContents) -> dict[str, Any]:
    """Return what the metadata of a tower say, by the keys of its configuration."""
    values: dict[str, Any] = {}
    for setting in tower.settings:
        key = key_of(setting, ARCHITECTURE)
        value = _value(contents, key)
        value = TAKEN.get(key, {}).get(tower.projector) if value is None else value
        if setting.truth:
            values[setting.name] = bool(value)
        elif isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ExportError(f"clip.{key}: expected a positive number, found {value!r:.40}")
        else:
            solve(setting.key, value, values)
    _state_activation(tower, values)
    _state_sizes(tower, values)
    layers = _value(contents, "vision.is_deepstack_layers")
    if "deepstack_visual_indexes" in tower.defaults:
        values["deepstack_visual_indexes"] = [n for n, of in enumerate(layers or ()) if of]
    equal = [(one, other) for one, other in tower.equal if isinstance(one, str) and isinstance(other, str)]
    values |= {one: values[other] for one, other in equal if one not in values and other in values}
    for key, taken in tower.values.items():
        if key not in values and (key in BESIDE or tower.defaults.get(key) not in taken):
            values[key] = next(value for value in taken if value is not None)
    return values


def _state_activation(tower: Tower, values: dict[str, Any]) -> None:
    """State the activation, of which files say whether it is a GELU or a SiLU."""
    is_gelu, is_silu = values.pop("uses_gelu", None), values.pop("uses_silu", None)
    key = "hidden_activation" if "hidden_activation" in tower.values else "hidden_act"
    kinds = [kind for kind in tower.values.get(key, ()) if kind]
    fitting = [
        kind for kind in kinds if is_gelu in (None, kind.startswith("gelu")) and is_silu in (None, kind == "silu")
    ]
    if kinds and not fitting:
        raise ExportError(f"clip.use_gelu {is_gelu}, clip.use_silu {is_silu}: expected {' or '.join(kinds)}")
    if kinds:
        values[key] = fitting[0]


def _state_sizes(tower: Tower, values: dict[str, Any]) -> None:
    """State sizes as the configuration has them: the number of positions for that of the image, and the like."""
    if (every := values.pop("full_attention_interval", None)) is not None:
        values["fullatt_block_indexes"] = [*range(every - 1, values["depth"], every)]
    for key in (key for key in POSITIONS if key in tower.defaults):
        values[key] = (values["image_size"] // values["patch_size"]) ** 2
    if "pos_emb_height" in tower.defaults:
        values |= dict.fromkeys(("pos_emb_height", "pos_emb_width"), values["image_size"] // values["patch_size"])
    for key in ("image_size", "patch_size"):
        if isinstance(tower.defaults.get(key), list):
            values[key] = [values[key]] * 2
    if isinstance(tower.defaults.get("mlp_ratio"), float):
        values["mlp_ratio"] = values["intermediate_size"] / values["hidden_size"]
    scale = values.pop("scale", None)
    if scale is None or "scale" in tower.defaults:
        return
    if key := next((key for key in RATIOS if key in tower.defaults), ""):
        values[key] = 1 / scale
    elif key := next((key for key in SCALES if key in tower.defaults), ""):
        values[key] = [scale, scale] if isinstance(tower.defaults[key], list) else scale
    else:
        values["mm_tokens_per_image"] = (values["image_size"] // values["patch_size"] // scale) ** 2


def restored_tower(
    whole: Whole, config: dict[str, Any], contents: GgufContents, held: Mapping[str, LogicalTensor]
) -> list[LogicalTensor]:
    """Return the tensors of a tower as those of the model.

    held: the tensors of its file, by name

    Raises ExportError if they are not those of this model.
    """
    tower, vision = TOWERS[whole.tower], config["vision_config"]
    settings = tower_settings(tower, vision, config)
    blocks = settings.number("depth" if settings.get("depth") else "num_hidden_layers")
    if blocks > len(held):
        raise ExportError(f"clip.vision.block_count: expected at most {len(held)} layers, found {blocks}")
    _check_widths(tower, settings, held)
    _check(contents, config, tower, settings)
    names = gguf_package().get_tensor_name_map(gguf_package().MODEL_ARCH.MMPROJ, max(blocks, 3))
    shapes = {name: tensor.shape for name, tensor in held.items()}
    views: dict[str, LogicalTensor] = {}
    for name in names_of_tower(whole, blocks, len(vision.get("deepstack_visual_indexes", ()))):
        own = name.removeprefix("model.")
        known = name_in_file(own, names, tower, settings)
        if known and (shape := _shape_in_model(name, known, shapes, tower, settings)) is not None:
            of_tensor = views_of_tower(own, AbsentTensor(name=name, shape=shape), names, tower, settings)
            views |= {view.name: view for view in of_tensor}
    follows = {BREAK} if tower.breaks else set()
    for name in sorted((held.keys() ^ views.keys()) - follows):
        expected = "is missing" if name in views else "is not known"
        raise ExportError(f"tensor {name!r} of a tower of {whole.model_type} {expected}")
    pieces: dict[str, list[Piece]] = {}
    for name, view in views.items():
        if [size for size in view.shape if size != 1] != [size for size in shapes[name] if size != 1]:
            raise ExportError(f"tensor {name!r}: expected shape {list(view.shape)}, found {list(shapes[name])}")
        for piece in pieces_of(view, RenamedTensor.of(name, held[name], shape=view.shape)):
            pieces.setdefault(piece.of.name, []).append(piece)
    return [assembled(of_tensor) for of_tensor in pieces.values()]


def _shape_in_model(
    name: str, known: str, shapes: Mapping[str, tuple[int, ...]], tower: Tower, settings: Settings
) -> tuple[int, ...] | None:
    """Return the shape of a tensor of the model by what the file has of it; None if that is nothing.

    known: its name in the file
    shapes: those of the tensors of the file
    """
    if ".attn_qkv." in known and not tower.joined:
        parts = [known.replace("attn_qkv", part) for part in ("attn_q", "attn_k", "attn_v")]
        shape = shapes[parts[0]] if {*parts} <= shapes.keys() else ()
        return (3 * shape[0], *shape[1:]) if shape else None
    if (shape := shapes.get(known, (0,))) == (0,):
        return None
    if known == "v.patch_embd.weight" and len(shape) == 4 and f"{known}.1" in shapes:  # two frames
        return (*shape[:2], 2, *shape[2:])
    if known == "v.patch_embd.weight" and len(shape) == 4 and tower.colors_last:
        return shape[0], math.prod(shape[1:])
    if tower.class_first and known == "v.position_embd.weight" and name.endswith("position_embeddings"):
        return (1, *shape)
    if tower.flat_positions and known == "v.position_embd.weight":
        side = settings.number("pos_emb_height")
        return side, side, math.prod(shape) // side**2
    if name.endswith("cls_token"):
        return (1, 1, shape[-1])
    return () if known.endswith(("put_min", "put_max")) and shape == (1,) else shape


def _check_widths(tower: Tower, settings: Settings, held: Mapping[str, LogicalTensor]) -> None:
    """Raise ExportError if the tensors do not have the widths that the metadata state."""
    keys = {setting.parameter: setting.key for setting in tower.settings}
    for parameter, name in WIDTHS.items():
        rows = held[name].shape[:1] if name in held else ()
        if parameter in keys and rows != (expected := (settings.number(keys[parameter]),)):
            raise ExportError(f"tensor {name!r}: expected {expected[0]} rows by the metadata, found {[*rows]}")


def _check(contents: GgufContents, config: dict[str, Any], tower: Tower, settings: Settings) -> None:
    """Raise ExportError, which names the key, if a file of these settings would not have the metadata of this one."""
    writer = gguf_package().GGUFWriter(None, ARCHITECTURE)
    add_hyper_parameters(tower, settings, writer, config, processor_of(contents))
    written = {key.removeprefix("clip."): value.value for key, value in writer.kv_data[0].items()}
    keys = [key.removeprefix("clip.") for key in contents.metadata if key.startswith("clip.")]
    for key in dict.fromkeys((*written, *keys)):
        in_file, last = _value(contents, key), key.rpartition(".")[2]
        in_file = TAKEN.get(key, {}).get(tower.projector) if in_file is None else in_file
        if last not in SAY_NOTHING and not key.startswith("general.") and not same_value(written.get(key), in_file):
            raise ExportError(
                f"clip.{key} is {in_file!r:.80}, but the tower of this model has {written.get(key)!r:.80}"
            )


def processor_of(contents: GgufContents) -> dict[str, Any]:
    """Return what a tower says of how images are normalized, as preprocessor_config.json does."""
    stated = {key: _value(contents, f"vision.{key}") for key in ("image_mean", "image_std")}
    if side := _value(contents, "vision.preproc_image_size"):
        stated["size"] = {"longest_edge": side}
    return stated
