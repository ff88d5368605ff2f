"""The comfyui target: one file of an image or video model, matrices in FP8 with one scale each, for ComfyUI itself.

Format: https://github.com/comfyanonymous/ComfyUI (comfy/utils.py, convert_old_quants; comfy/ops.py,
mixed_precision_ops). Files have the layout of the model's original code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from pqweights.checkpoint.gguf.diffusion import own_tensors
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.errors import ExportError, OptionError
from pqweights.formats.fp8 import COMFYUI
from pqweights.formats.packing import PackedFormat
from pqweights.kernels.groups import BEST, FloatRule
from pqweights.models import text_model
from pqweights.models.diffusion import OUTSIDE, find_family
from pqweights.planning.layout import DEFAULT_METADATA
from pqweights.planning.recipe import Recipe
from pqweights.planning.roles import names_of
from pqweights.targets.assignment import describe, recipe_of
from pqweights.targets.carried import plain_beside_codes
from pqweights.targets.integers import Assignment
from pqweights.targets.linear import PLAIN_IN_SOURCE
from pqweights.targets.loading import LoadableModel, into_comfyui, legal_files
from pqweights.targets.target import ExportSettings, ExportTarget, one_of

NAME = "comfyui"
# By name, what a file says of a layer: whether ComfyUI also rounds what the layer reads, where a GPU multiplies FP8.
FORMATS: Mapping[str, dict[str, Any]] = {
    "fp8a16": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    "fp8": {"format": "float8_e4m3fn"},
}
# The key of the metadata of a file with what it says of layers, and how the names of such files end.
LAYERS_KEY, NAME_END = "_quantization_metadata", "_fp8_scaled"
# The Hub takes no larger file, and ComfyUI reads one alone.
MAX_SHARD_BYTES = 500_000_000_000


def _assign(
    format_name: str, recipe: Recipe, base_name: str | None, checkpoint: Checkpoint, called: str | None
) -> Assignment:
    """Decide which matrices get FP8: those of the blocks. Raises ExportError for a model that ComfyUI does not load."""
    found = find_family(checkpoint.config, [tensor.name for tensor in checkpoint.tensors])
    if found is None or not found.family.in_comfyui:
        raise ExportError("ComfyUI loads no such model: the target is for the image and video models of diffusion.md")
    if not found.original:
        raise ExportError(
            "the tensors have the names of diffusers: for ComfyUI, give the single file of the model in its original "
            "layout as the source"
        )
    tensors, left_out = own_tensors(checkpoint, found)
    matrices = [of for of in tensors if found.in_blocks(of.name) and found.is_matrix(of.name, of.shape)]
    stay = plain_beside_codes(checkpoint.tensors, _rule(1))
    decisions: dict[str, PackedFormat | str] = {of.name: OUTSIDE for of in tensors if len(of.shape) > 1}
    layers = {}
    model = text_model(checkpoint.config)
    for tensor in matrices:
        name = tensor.name
        rule, why = recipe.rule_for(model, tensor)
        if rule is not None and rule.keep:
            decisions[name] = why
        elif rule is None and found.prefix + name in stay:
            decisions[name] = PLAIN_IN_SOURCE
        else:
            how = _rule(tensor.shape[-1])
            decisions[name] = PackedFormat(how, COMFYUI, label=how.kind, reason=why or None, unit_of=name)
            layers[name.removesuffix(".weight")] = FORMATS[(rule and rule.format) or format_name]
    recipe.check(model, matrices, [name for of in tensors for name in names_of(of)])
    if not layers:
        raise ExportError("none of its weights is a matrix of a block that becomes FP8")
    name = (base_name or called or "model").rpartition("/")[2]
    return Assignment(
        tensors=tuple(tensors),
        decisions=decisions,
        config=None,
        left_out=left_out,
        metadata={**DEFAULT_METADATA, LAYERS_KEY: json.dumps({"format_version": "1.0", "layers": layers})},
        plain_dtype=None,
        companions=legal_files(checkpoint.companions),
        stated={"name": name, "file": name + NAME_END},
    )


def _is_diffusion(checkpoint: Checkpoint) -> bool:
    return find_family(checkpoint.config, [tensor.name for tensor in checkpoint.tensors]) is not None


def _rule(columns: int) -> FloatRule:
    """Return how rows of so many weights become codes."""
    return FloatRule("fp8-tensor", 8, columns, BEST)


def read_options(options: Options) -> ExportSettings:
    """Return the format. Raises OptionError for an option that it does not have."""
    name = one_of(NAME, "format", options.format, allowed=tuple(FORMATS))
    recipe = recipe_of(options, tuple(FORMATS))
    if recipe.goal is not None:
        raise OptionError(f"`recipe`: the target {NAME} has formats of one size, found {recipe.goal}")
    return ExportSettings(
        stated={"target": NAME, "format": name} | describe(recipe),
        assign=partial(_assign, name, recipe, options.name),
        recipe=recipe,
    )


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    return ["In ComfyUI, the node Load Diffusion Model has the file after:", into_comfyui(model)]


TARGET = ExportTarget(
    name=NAME,
    runtime="ComfyUI",
    tags=("comfyui", "fp8"),
    options=("format", "recipe", "keep", "set_format", "name"),
    stated=("rules", "file"),
    read_options=read_options,
    load_section=_load_section,
    concerns=_is_diffusion,
    library="diffusion-single-file",
    max_shard_bytes=MAX_SHARD_BYTES,
)
