"""The vllm target: symmetric integers and microscaling floats of compressed-tensors, for vLLM and transformers.

Formats: https://github.com/vllm-project/compressed-tensors (compressors, quantization/quant_config.py), and the OCP
microscaling formats specification 1.0.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pqweights.checkpoint.gguf.pooling import MODULES
from pqweights.checkpoint.positions import model_type_of
from pqweights.checkpoint.positions import windows as position_windows
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.common.strict_json import json_bytes
from pqweights.common.units import first_names
from pqweights.convert.plan import SmallFiles
from pqweights.errors import ExportError, OptionError
from pqweights.formats.compressed_tensors import config_group
from pqweights.formats.fp8 import DEEPSEEK, FLOAT_QUANTIZED, TILE, deepseek_configuration
from pqweights.formats.integer_groups import (
    AWQ,
    GPTQ,
    INT_QUANTIZED,
    PACK_QUANTIZED,
    PACK_QUANTIZED_ZEROS,
    awq_configuration,
    gptq_configuration,
)
from pqweights.formats.microscaling import (
    GPT_OSS,
    HEAD,
    MODELOPT,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_INPUTS,
    gpt_oss_configuration,
    modelopt_configuration,
    modelopt_files,
)
from pqweights.formats.packing import PackedFormat
from pqweights.kernels.groups import BEST, FloatRule, GroupRule
from pqweights.models import described, has_trait, text_config, text_model
from pqweights.models.names import renamed, tower_of
from pqweights.models.traits import Trait
from pqweights.planning.layout import ShardPlan
from pqweights.planning.recipe import Recipe
from pqweights.planning.roles import role_of
from pqweights.targets.architectures import renames_towers, uses_weights_early
from pqweights.targets.assignment import describe, recipe_of
from pqweights.targets.experts import OF_STACKS, is_stack, with_single_experts, with_upright_stacks
from pqweights.targets.integers import Assignment
from pqweights.targets.linear import (
    CHANNEL,
    LinearFormat,
    kinds_of,
    linear_weights,
    module_of,
    patterns,
    with_quantization,
)
from pqweights.targets.loading import LoadableModel, by_transformers, shell
from pqweights.targets.target import (
    COMPRESSED_TENSORS,
    INTEGER_OPTIONS,
    RECIPE_OPTIONS,
    ExportSettings,
    ExportTarget,
    GroupSize,
    one_of,
    read_rounding,
)

NAME = "vllm"
# From which formats are chosen for a size, besides the one that was asked for.
LADDER = ("w4a16", "w8a16", "nvfp4", "fp8")
RESHAPED = (
    "this export is for vLLM alone: transformers (5.23) cuts or joins weights of this type of model as it loads them, "
    "which does not work with packed ones, nor with plain ones beside them"
)
UNSTACKED = "the experts of this model stay plain; --format mxfp4-gpt-oss rounds them, and nothing else"


# The modules of routers, by the names that they have in memory.
ROUTERS = r"re:.*\.(gate|router)$"
MIXED = "mixed-precision"
GROUPS, TILES, ROWS, BY_32, BY_16 = (
    GroupSize(target=NAME, allowed=sizes, chosen=None) for sizes in ((128, 64, 32), TILE[1:], CHANNEL, (32,), (16,))
)


def _integers(bits: int, scale_dtype: str = "BF16", *, zeros: bool = False) -> GroupRule:
    """Return the rule of integers, as the converter of compressed-tensors has it."""
    way = "compressed-tensors-asymmetric" if zeros else "compressed-tensors"
    return GroupRule(
        bits=bits,
        group_size=128,
        symmetric=not zeros,
        middle=not zeros,
        rule=way,
        zeros=zeros,
        scale_dtype=scale_dtype,
    )


_FP8 = FloatRule("fp8", 8, 1, "compressed-tensors")
_FP8_TILES = FloatRule("fp8", 8, TILE[1], "compressed-tensors", rows=TILE[0])
_MXFP4 = FloatRule("mxfp4", 4, 32, "compressed-tensors")
_MXFP8 = FloatRule("mxfp8", 8, 32, "compressed-tensors")
_NVFP4 = FloatRule("nvfp4", 4, 16, "compressed-tensors")
# By name, as in compressed-tensors; fp8 is its FP8_DYNAMIC, int8 its W8A8. docs/formats.md says how to add one.
FORMATS = {
    "w4a16": LinearFormat(_integers(4), PACK_QUANTIZED, GROUPS, "pack-quantized"),
    "w8a16": LinearFormat(_integers(8), PACK_QUANTIZED, GROUPS, "pack-quantized"),
    "w3a16": LinearFormat(_integers(3), PACK_QUANTIZED, GROUPS, "pack-quantized"),
    "w2a16": LinearFormat(_integers(2), PACK_QUANTIZED, GROUPS, "pack-quantized"),
    "w4a16-asym": LinearFormat(_integers(4, zeros=True), PACK_QUANTIZED_ZEROS, GROUPS, "pack-quantized"),
    "int8": LinearFormat(_integers(8), INT_QUANTIZED, ROWS, "int-quantized", activations=True),
    "fp8": LinearFormat(_FP8, FLOAT_QUANTIZED, ROWS, "float-quantized", activations=True),
    "fp8-block": LinearFormat(_FP8_TILES, FLOAT_QUANTIZED, TILES, "float-quantized", activations=True),
    "mxfp4": LinearFormat(_MXFP4, MXFP4, BY_32, "mxfp4-pack-quantized", activations=True),
    "mxfp4a16": LinearFormat(_MXFP4, MXFP4, BY_32, "mxfp4-pack-quantized"),
    "mxfp8": LinearFormat(_MXFP8, MXFP8, BY_32, "mxfp8-quantized", activations=True),
    "mxfp8a16": LinearFormat(_MXFP8, MXFP8, BY_32, "mxfp8-quantized"),
    "nvfp4": LinearFormat(_NVFP4, NVFP4_INPUTS, BY_16, "nvfp4-pack-quantized", activations=True),
    "nvfp4a16": LinearFormat(_NVFP4, NVFP4, BY_16, "nvfp4-pack-quantized"),
    # Those of other tools, of which one format is that of all layers.
    "fp8-deepseek": LinearFormat(_FP8_TILES, DEEPSEEK, TILES, activations=True, configuration=deepseek_configuration),
    "awq": LinearFormat(_integers(4, "F16", zeros=True), AWQ, GROUPS, configuration=awq_configuration),
    "gptq": LinearFormat(_integers(4, "F16"), GPTQ["gptq"], GROUPS, configuration=gptq_configuration),
    "gptq-8": LinearFormat(_integers(8, "F16"), GPTQ["gptq"], GROUPS, configuration=gptq_configuration),
    "mxfp4-gpt-oss": LinearFormat(_MXFP4, GPT_OSS, BY_32, configuration=gpt_oss_configuration, stacks=True),
    "nvfp4-modelopt": LinearFormat(
        _NVFP4, MODELOPT, BY_16, activations=True, configuration=modelopt_configuration, files=modelopt_files
    ),
}


def _assign(
    name: str, formats: Mapping[str, LinearFormat], recipe: Recipe, checkpoint: Checkpoint, called: str | None
) -> Assignment:
    """Decide which linear layers become integers; names and shapes are those of the source, of single experts.

    name: of the default format
    formats: all that one export may have
    """
    usual = formats[name]
    checkpoint = with_upright_stacks(checkpoint) if usual.stacks else with_single_experts(checkpoint)
    linear = linear_weights(
        checkpoint,
        NAME,
        formats,
        ladder=_ladder(name),
        recipe=recipe,
        # Tools with scales in F16 state one group size for all layers, and transformers decodes all layers in one
        # if it decodes them as it loads them.
        one_size=usual.layout in (AWQ, *GPTQ.values()) or decodes_at_once(checkpoint),
        stacks=usual.stacks,
        heads=usual.configuration is None,
    )
    chosen = linear.formats
    if usual.stacks:
        _check_stacks(checkpoint, linear)
    if usual.configuration is None:
        quantization = quantization_config(checkpoint, chosen, formats)
    else:
        quantization = _configuration_of_one(usual, checkpoint, chosen)
    warnings = _experts_warnings(checkpoint, chosen) + _window_warnings(checkpoint.config or {})
    files = {} if usual.files is None else usual.files(quantization)
    small_files = {file: partial(json_bytes, content) for file, content in files.items()}
    return replace(
        linear,
        config=with_quantization(checkpoint, quantization),
        warnings=(*linear.warnings, *warnings),
        small_files=partial(_whatever_shards, small_files),
    )


def _configuration_of_one(
    usual: LinearFormat, checkpoint: Checkpoint, chosen: Mapping[str, PackedFormat]
) -> dict[str, Any]:
    """Return the quantization_config of a tool of which one format is that of all layers. chosen: what is rounded"""
    assert usual.configuration is not None
    plain = [name for name in linear_layers(checkpoint) if name not in chosen]
    modules = list(dict.fromkeys([HEAD, *map(module_of, plain)]))
    expressions = itertools.chain([HEAD], (of.removeprefix("re:") for of in patterns(plain, list(chosen))))
    return usual.configuration(next(iter(chosen.values())).rule, modules, expressions)


def _whatever_shards(files: SmallFiles, shards: Sequence[ShardPlan]) -> SmallFiles:
    return files


def _that_mix_with(name: str) -> tuple[str, ...]:
    """Return the formats that one export may have besides a format, itself included."""
    if FORMATS[name].configuration is not None:
        return (name,)
    return tuple(other for other, how in FORMATS.items() if how.configuration is None)


def _ladder(name: str) -> tuple[str, ...]:
    """Return the formats from which those of a size are chosen: with rounded activations if the default has them."""
    activations = FORMATS[name].activations
    others = (n for n in LADDER if n in _that_mix_with(name) and FORMATS[n].activations == activations)
    return tuple(dict.fromkeys([name, *others]))


def _check_stacks(checkpoint: Checkpoint, linear: Assignment) -> None:
    """Raise ExportError if a stack stays plain: runtimes take the experts of every layer for packed ones."""
    model = text_model(checkpoint.config)
    stacks = (t.name for t in checkpoint.tensors if len(t.shape) == 3 and role_of(t, model) == "expert")
    for name in stacks:
        reason = linear.decisions.get(name, "the master keeps it")
        if isinstance(reason, str):
            raise ExportError(f"tensor {name!r}: mxfp4-gpt-oss holds all experts or none, and it stays plain: {reason}")


def _experts_warnings(checkpoint: Checkpoint, chosen: Container[str]) -> tuple[str, ...]:
    """Return a warning of experts that another format rounds, or that transformers cannot load.

    chosen: what is rounded
    """
    stacks = (t for t in checkpoint.tensors if is_stack(t, checkpoint.weights) and t.name not in chosen)
    model = text_model(checkpoint.config)
    if (checkpoint.config or {}).get("model_type") == OF_STACKS and any(stacks):
        return (UNSTACKED,)
    if has_trait((checkpoint.config or {}).get("model_type"), Trait.VLLM_ALONE):
        return (RESHAPED,)
    if Trait.VLLM_TAKES_SINGLE_EXPERTS in model.traits:
        return ("vLLM alone loads this export: transformers (5.23) takes no single experts of this type of model",)
    experts = [t.name for t in checkpoint.tensors if role_of(t, model) == "expert" and len(t.shape) == 2]
    plain = [name for name in experts if name not in chosen and name.endswith(".weight")]
    if not plain:
        return ()
    return (
        f"single experts stay plain ({first_names(plain)}): vLLM loads them; transformers (5.23) looks for packed ones "
        "alone when it stacks experts, and fails",
    )


def _window_warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a warning of windows that vLLM does not have."""
    windows = [window for window in position_windows(config) if window is not None]
    longest = text_config(config).get("max_position_embeddings")
    if not windows or not has_trait(model_type_of(config), Trait.NO_WINDOWS_IN_VLLM):
        return ()
    if isinstance(longest, int) and min(windows) >= longest:
        return ()
    return (
        f"vLLM attends to the whole context in {len(windows)} layers in which the model attends to a window of "
        f"{min(windows)} tokens: with texts of more than {min(windows)} tokens it computes something different from "
        "transformers",
    )


def read_options(options: Options) -> ExportSettings:
    """Return the format. Raises OptionError for an option that it does not have."""
    name = one_of(NAME, "format", options.format, allowed=tuple(FORMATS))
    if options.bits is not None and options.format is None:
        name = f"w{one_of(NAME, 'bits', options.bits, allowed=(4, 8))}a16"
    how = FORMATS[name]
    if options.bits not in (None, how.rule.bits):
        raise OptionError(f"`bits` {options.bits}: the format {name} has {how.rule.bits}")
    is_possible = BEST in how.ways and not how.is_channel
    why_not = None if is_possible else f"expected scales of groups, found the format {name}"
    rounding = read_rounding(NAME, options, why_not=why_not)
    qparams = one_of(f"{NAME} with the format {name}", "qparams", options.qparams, allowed=how.ways)
    chosen = how.with_options(options.group_size, qparams)
    recipe, together = recipe_of(options, _that_mix_with(name)), _that_mix_with(name)
    # The default first; those of rules in their own group sizes.
    others = {n: FORMATS[n].with_options(None, options.qparams or BEST) for n in together if n != name}
    formats = {name: chosen} | others
    stated = {"target": NAME, "format": name, "bits": how.rule.bits, **chosen.stated_qparams(options.qparams)}
    stated |= {} if how.is_channel else {"group_size": chosen.groups.size}
    return ExportSettings(
        stated=stated | describe(recipe),
        assign=partial(_assign, name, formats, recipe),
        recipe=recipe,
        rounding=rounding,
    )


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    trust = " --trust-remote-code" if model.custom else ""
    serve = shell("pip install vllm", f"vllm serve {model.quoted}{model.revision_option}{trust}")
    by_library = by_transformers(model, "torch transformers compressed-tensors")
    return ["With vLLM:", serve, "Or with transformers:", *by_library]


def quantization_config(
    checkpoint: Checkpoint, chosen: Mapping[str, PackedFormat], formats: Mapping[str, LinearFormat]
) -> dict[str, Any]:
    """Return the quantization_config: all linear layers but those to be ignored.

    chosen: the formats of the weights that are rounded, whose names are keys of `formats`
    """
    layers = linear_layers(checkpoint)
    layouts = dict.fromkeys(formats[how.name].called for how in chosen.values())
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": next(iter(layouts)) if len(layouts) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": _group(formats[name], size, targets)
            for number, (name, size, targets) in enumerate(_targets(layers, kinds_of(chosen, formats)))
        },
        "ignore": _ignored(checkpoint, layers, chosen),
    }
    if decodes_at_once(checkpoint):
        # Read by transformers alone, which then decodes each weight as it loads it. By default it keeps all of them
        # packed until the first call. Such a model asks for them before, and sentence-transformers calls modules in
        # the model that transformers does not see called.
        quantization["dequantize"] = True
    return quantization


def decodes_at_once(checkpoint: Checkpoint) -> bool:
    """Whether transformers, or sentence-transformers with it, must decode weights as it loads them."""
    return uses_weights_early(checkpoint.config) or MODULES in checkpoint.companions


def linear_layers(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the weights that may be taken for linear layers, or by vLLM for fused experts."""
    may_be = [t for t in checkpoint.tensors if len(t.shape) in (2, 3)]
    model = text_model(checkpoint.config)
    return [t.name for t in may_be if role_of(t, model) not in ("bias", "buffer")]


def _group(how: LinearFormat, size: int, targets: list[str]) -> dict[str, Any]:
    """Return what config.json says of the layers that have a format in groups of a size."""
    of_layers = how.format((how.rows, size), size)
    return config_group(of_layers, how.called, targets, channel=how.is_channel, activations=how.activations)


def _targets(layers: Sequence[str], by_layer: Mapping[str, tuple[str, int]]) -> list[tuple[str, int, list[str]]]:
    """Return the formats and group sizes with what matches their layers: one alone is that of all linear layers.

    Of several, each names its layers, and the first takes all others, such as those that a loader
    renames. That of the experts comes first: transformers takes the first one whose expressions contain "experts" for
    theirs, and those of a shared expert do, too.

    by_layer: the format and the group size of what is rounded
    """
    different = sorted(set(by_layer.values()), key=lambda pair: (-pair[1], pair[0]))
    if len(different) == 1:
        heads = [name for name in by_layer if _is_head(name)]  # no linear layer in vLLM
        return [(*different[0], [*patterns(heads, [name for name in layers if name not in heads]), "Linear"])]
    result = []
    for pair in different:
        own = [name for name in layers if by_layer.get(name) == pair]
        targets = patterns(own, [name for name in layers if by_layer.get(name) != pair])
        result.append((*pair, [*targets, "Linear"] if pair == different[0] else targets))
    of_experts = next((pair for name, pair in by_layer.items() if ".experts." in name), None)
    return sorted(result, key=lambda group: (group[0], group[1]) != of_experts)


def _ignored(checkpoint: Checkpoint, layers: Sequence[str], chosen: Container[str]) -> list[str]:
    """Return expressions that match the layers that stay plain, and no others."""
    rounded = [name for name in layers if name in chosen]
    plain = sorted(set(layers) - set(rounded), key=layers.index)
    by_type, model = described((checkpoint.config or {}).get("model_type")), text_model(checkpoint.config)
    numbered, others = [*filter(_is_numbered, plain)], [*rounded]
    for names in (numbered, others):
        names += [other for name in [*names] if (other := renamed(name, by_type)) != name]
    result = [
        *([] if any(module_of(name) == "lm_head" for name in rounded) else ["lm_head"]),
        *patterns(numbered, others),
    ]
    has_routers = any(role_of(tensor, model) == "router" for tensor in checkpoint.tensors)
    if has_routers and not any(re.match(ROUTERS.removeprefix("re:"), module_of(name)) for name in rounded):
        result.append(ROUTERS)  # transformers renames some of them as it loads the checkpoint
    if renames_towers(checkpoint.config):  # all modules of those that stay plain, whatever they are called within
        towers = dict.fromkeys(tower for name in plain if (tower := tower_of(name)) is not None)
        result += [rf"re:(.*\.)?{re.escape(tower)}\..*" for tower in towers if tower not in map(tower_of, rounded)]
    return [*result, _outside(rounded, plain)]


def _is_head(weight: str) -> bool:
    return module_of(weight).rpartition(".")[2] == HEAD


def _outside(rounded: Sequence[str], plain: Sequence[str]) -> str:
    """Return an expression that matches every module outside of the numbered layers, except for those that are rounded.

    A model may have modules there that the file does not name: a head that is tied to the embedding, whose name is
    lm_head in some models only, or a new head.
    """
    outside = [name for name in rounded if not _is_numbered(name)]
    excluded = [r"(.*\.)?\d+(\..*)?$", *(e.removeprefix("re:") for e in patterns(outside, plain))]
    # Not a match of the empty name, which modules of vLLM have that are built without one; and the same whether the
    # expression is searched or matched.
    return f"re:^(?!(?:{'|'.join(excluded)})).+$"


def _is_numbered(weight: str) -> bool:
    """Whether a weight belongs to one of several layers or experts."""
    return any(component.isdigit() for component in module_of(weight).split("."))


# The formats that a memory is filled with; others have as many bits, or are for models of one type.
PROPOSED = ("w8a16", "fp8", "int8", "nvfp4", "mxfp4", "w4a16", "w3a16")


TARGET = ExportTarget(
    name=NAME,
    runtime=COMPRESSED_TENSORS,
    tags=("vllm", "compressed-tensors"),
    options=(*RECIPE_OPTIONS, *INTEGER_OPTIONS),
    stated=("rules",),
    read_options=read_options,
    load_section=_load_section,
    choices={name: (Options(format=name), FORMATS[name].usual_bits) for name in PROPOSED},
    plain_roles=("embedding", "lm_head"),
)
