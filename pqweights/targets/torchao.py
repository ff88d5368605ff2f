"""The torchao target: weights of linear layers in 4 or 8 bits, loaded by transformers with torchao.

The layouts are those of torchao 0.18 (quantization/quantize_/workflows), and the safetensors metadata, from which
its tensor classes are rebuilt, is that of its prototype/safetensors. Every file carries the metadata of all tensors,
because the loader merges what the files carry, and the last file wins. torchao is not needed to write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.errors import OptionError
from pqweights.formats.packing import PADDED_COLUMNS
from pqweights.formats.torchao import (
    FP8_ROWS,
    INT4_PLAIN,
    INT4_TILES,
    INT8_ROWS,
    TILE,
    UNTILED,
    configuration,
    rebuilt,
)
from pqweights.kernels.groups import FloatRule, GroupRule
from pqweights.models import described
from pqweights.models.names import names_in_memory
from pqweights.planning.layout import stored_bytes
from pqweights.planning.recipe import Recipe
from pqweights.targets.assignment import describe, recipe_of
from pqweights.targets.integers import Assignment
from pqweights.targets.linear import CHANNEL, LinearFormat, kinds_of, linear_weights, patterns, with_quantization
from pqweights.targets.loading import LoadableModel, by_transformers
from pqweights.targets.target import (
    BEST,
    INTEGER_OPTIONS,
    RECIPE_OPTIONS,
    TORCHAO,
    ExportSettings,
    ExportTarget,
    GroupSize,
    one_of,
    read_rounding,
)

NAME = "torchao"
GROUPS = GroupSize(target=NAME, allowed=(128, 64, 32, 256), chosen=None)
ROWS = GroupSize(target=NAME, allowed=CHANNEL, chosen=None)
# The share of the integers that the other packing must save before a user is told of it.
WORTH_A_WARNING = 0.1
# Why single experts stay plain.
EXPERTS = "transformers stacks experts as it loads them, which torchao's tensors cannot be"
# By name; int8 and fp8 are of weights alone, int8-dynamic also rounds what layers read. torchao's FP8 with rounded
# inputs is missing: it does not load without a GPU.
INT4 = "int4"
_INT8 = GroupRule(bits=8, group_size=1, symmetric=True, middle=True, rule="compressed-tensors")
FORMATS = {
    INT4: LinearFormat(
        GroupRule(bits=4, group_size=128, symmetric=False, middle=True, rule="torchao"), INT4_TILES, GROUPS
    ),
    # torchao's rule is the same as that of compressed-tensors, but for the rounding of scales
    "int8": LinearFormat(_INT8, INT8_ROWS, ROWS),
    "int8-dynamic": LinearFormat(_INT8, INT8_ROWS, ROWS, activations=True),
    "fp8": LinearFormat(FloatRule("fp8", 8, 1, "compressed-tensors"), FP8_ROWS, ROWS),
}
LAYOUTS = {TILE: INT4_TILES, UNTILED: INT4_PLAIN}


def _assign(
    name: str, formats: Mapping[str, LinearFormat], recipe: Recipe, checkpoint: Checkpoint, called: str | None
) -> Assignment:
    """Decide which linear layers become integers; names and shapes are those of the source.

    name: of the default format
    """
    ladder = tuple(dict.fromkeys([name, INT4, "int8"]))
    linear = linear_weights(checkpoint, NAME, formats, ladder=ladder, recipe=recipe, experts=EXPERTS)
    by_layer = kinds_of(linear.formats, formats)
    quantization = {
        "quant_method": "torchao",
        "quant_type": {"default": _quant_type(formats, by_layer)},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    return replace(
        linear,
        config=with_quantization(checkpoint, quantization),
        metadata=_metadata(formats, checkpoint, by_layer),
        warnings=(*linear.warnings, *_padding_warnings(linear)),
    )


def _metadata(
    formats: Mapping[str, LinearFormat], checkpoint: Checkpoint, by_layer: Mapping[str, tuple[str, int]]
) -> dict[str, str]:
    """Return the metadata from which torchao rebuilds its tensors. by_layer: formats and group sizes of the weights"""
    result = {"format": "pt"}
    names = []
    config = checkpoint.config or {}
    has_vision, model = "vision_config" in config, described(config.get("model_type"))
    for tensor in checkpoint.tensors:
        if tensor.name not in by_layer:
            continue
        format_name, size = by_layer[tensor.name]
        how = formats[format_name]
        made_of = json.dumps(rebuilt(how.layout, tensor.shape, size, activations=how.activations))
        for name in names_in_memory(tensor.name, has_vision, model):
            result[name] = made_of
            names.append(name)
    return result | {"tensor_names": json.dumps(names)}


def _quant_type(formats: Mapping[str, LinearFormat], by_layer: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Return what torchao's config_to_dict returns: a configuration, or one by layer if formats or sizes differ.

    transformers reads the size of each weight from the metadata of the files.
    """
    different = sorted(set(by_layer.values()), key=lambda pair: (-pair[1], pair[0]))
    configs = {
        (name, size): configuration(formats[name].layout, size, activations=formats[name].activations)
        for name, size in different
    }
    if len(different) == 1:
        return configs[different[0]]
    layers: dict[str, Any] = {}
    for pair, config in configs.items():
        own = [name for name in by_layer if by_layer[name] == pair]
        others = [name for name in by_layer if by_layer[name] != pair]
        layers |= dict.fromkeys(patterns(own, others), config)
    data = {"fqn_to_config": layers, "module_fqn_to_config": layers}
    return {"_type": "FqnToConfig", "_version": 1, "_data": data}


def _padding_warnings(linear: Assignment) -> tuple[str, ...]:
    """Return a warning if the other packing would save a good share of the integers."""
    rounded = [(tensor, how) for tensor, how in linear.rounded if how.name == INT4]
    stored = sum(stored_bytes(how.specs(t.name, t.shape)) for t, how in rounded)
    least = sum(stored_bytes(replace(how, layout=INT4_PLAIN).specs(t.name, t.shape)) for t, how in rounded)
    if not stored or 1 - least / stored < WORTH_A_WARNING:
        return ()
    return (
        f"--packing {TILE} pads rows to a multiple of {PADDED_COLUMNS} weights: --packing plain, which also needs "
        f"the package mslk, would make the integers {1 - least / stored:.0%} smaller",
    )


def read_options(options: Options) -> ExportSettings:
    """Return the format. Raises OptionError for an option that it does not have."""
    name = one_of(NAME, "format", options.format, allowed=tuple(FORMATS))
    bits = 4 if name == INT4 else 8
    if options.bits not in (None, bits):
        raise OptionError(f"`bits` {options.bits}: the format {name} has {bits}")
    if name != INT4:
        for option in ("packing", "group_size"):
            if getattr(options, option) is not None:
                raise OptionError(f"`{option}`: the format {name} does not take this option")
    why_not = None if name == INT4 else f"expected `format` {INT4}, found {name}"
    rounding = read_rounding(NAME, options, why_not=why_not)
    packing = one_of(NAME, "packing", options.packing, allowed=(TILE, UNTILED))
    one_of(f"{NAME} with the format {name}", "qparams", options.qparams, allowed=FORMATS[name].ways)
    qparams = options.qparams or BEST  # of those formats that have a choice
    int4 = replace(FORMATS[INT4], layout=LAYOUTS[packing]).with_options(options.group_size, qparams)
    formats = {n: int4 if n == INT4 else how.with_options(None, qparams) for n, how in FORMATS.items()}
    recipe = recipe_of(options, tuple(FORMATS))
    of_scales = formats[name].stated_qparams(options.qparams)
    stated: dict[str, Any] = {"target": NAME, "format": name, "bits": bits, **of_scales}
    if name == INT4:
        stated |= {"packing": packing, "group_size": int4.groups.size}
    return ExportSettings(
        stated=stated | describe(recipe),
        assign=partial(_assign, name, {name: formats[name], **formats}, recipe),
        recipe=recipe,
        rounding=rounding,
    )


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    if made_by.get("bits") == 8:
        return ["For PyTorch, on a CPU or a GPU.", *by_transformers(model, "torch transformers accelerate torchao")]
    needs = "PyTorch on CUDA, on a GPU of compute capability 8.0 or newer"
    packages = "torch transformers accelerate torchao"
    if made_by.get("packing") == UNTILED:
        needs += ", with the package mslk"
        packages += " mslk"
    return [f"For {needs}.", *by_transformers(model, packages, ', device_map="cuda"')]


TARGET = ExportTarget(
    name=NAME,
    runtime=TORCHAO,
    tags=("torchao",),
    options=("packing", *RECIPE_OPTIONS, *INTEGER_OPTIONS),
    stated=("rules",),
    read_options=read_options,
    load_section=_load_section,
    choices={name: (Options(format=name), how.usual_bits) for name, how in FORMATS.items()}
    | {"int4, plain": (Options(packing=UNTILED), replace(FORMATS[INT4], layout=INT4_PLAIN).usual_bits)},
    plain_roles=("embedding", "lm_head", "expert"),
)
