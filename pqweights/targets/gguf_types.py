"""Which type each tensor of a GGUF file gets: by a mix, by rules, or so that the file has a given size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pqweights.checkpoint.gguf.diffusion import plain_type
from pqweights.checkpoint.gguf.mixes import (
    INTEGERS,
    MIXES,
    PLAIN_TYPES,
    Shape,
    diffusion_type,
    find_mix,
    fitting_type,
    layers_with_values,
    may_be_quantized,
    type_of,
)
from pqweights.checkpoint.gguf.model import ALIGNMENT, GgufModel, encode_header, tensor_info
from pqweights.checkpoint.gguf.towers import PLAIN as PLAIN_IN_TOWERS
from pqweights.checkpoint.header import aligned
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import sources_of
from pqweights.common.options import Options
from pqweights.errors import OptionError
from pqweights.formats.gguf_blocks import block_format
from pqweights.formats.packing import PackedFormat
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.models import text_model
from pqweights.models.diffusion import COMFYUI, DIFFUSERS, OUTSIDE, TYPES
from pqweights.planning.recipe import Recipe
from pqweights.planning.roles import names_of
from pqweights.targets.assignment import (
    PLAIN_ERROR,
    Candidate,
    Layers,
    chosen_within,
    recipe_of,
)
from pqweights.targets.target import GPTQ, IMPORTANCE, PLAIN

DEFAULT_TYPE = "q4_k_m"


def read_types(options: Options) -> tuple[dict[str, str], Recipe]:
    """Return the mix of each file, which decides about what no rule matches, and the rules and the size of all of them.

    Mixes are listed by what the names of files call the types in them.

    Raises OptionError for an unknown type and for options that contradict each other.
    """
    if options.type is not None and options.format is not None:
        raise OptionError("`format`: is another name of `type`; leave out one of the two")
    stated = options.format if options.type is None else options.type
    names = [name.strip() for name in (DEFAULT_TYPE if stated is None else stated).split(",")]
    if any(len(name.split()) != 1 for name in names):
        raise OptionError(f"`type` {stated}: expected a type, or several with commas between them")
    mixes = list(map(find_mix, names))
    recipe = recipe_of(options, (*BLOCK_TYPES, *PLAIN_TYPES))
    if recipe.goal is not None:
        if stated is not None or options.pure:
            (name,) = recipe.goal.to_json()
            raise OptionError(f"`{name}`: chooses the types itself; leave out `type` and `pure`")
        return {"fit": mixes[0]}, recipe
    end = "-mixed" if recipe.decides else ""
    by_label = {(MIXES[mix][0] if options.pure else mix) + end: mix for mix in mixes}
    if len(by_label) < len(mixes):
        how = " with `pure`" if options.pure else ""
        raise OptionError(f"`type` {stated}: expected different files, but two would be the same{how}")
    return by_label, recipe


# The bits of weights without blocks.
PLAIN_BITS = {"F16": 16, "BF16": 16, "F32": 32, INTEGERS: 32}
# What the headers of further files and the padding of tensors may take of a target size.
RESERVED_BYTES = 4096


# Between 4 and 2.5 bits, the types from which a file of a given size is made, by how codes are chosen. Grids have the
# least errors for their size, but channels that are outliers spoil them unless errors are weighed; and codes of single
# weights, whose errors cancel, are better than grids again.
NARROW = {PLAIN: ("Q3_K", "Q2_K"), IMPORTANCE: ("IQ3_S", "IQ3_XXS", "IQ2_S"), GPTQ: ("Q3_K", "IQ3_XXS", "Q2_K")}
# The share of its squared errors that a model feels of codes whose errors cancel, compared with grids: on tiny-llama
# Q3_K diverges 0.67 times as much as IQ3_S at the same size, with 1.22 times its error.
CANCELLED = 0.55


def candidates(rounding: str) -> tuple[str, ...]:
    """Return the types from which a file of a given size is made."""
    narrow = NARROW[rounding]
    return ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", *narrow, "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "F16")


def decision_of(type_name: str, reason: str) -> PackedFormat | str:
    """Return what becomes of a tensor of a type: codes, or a plain tensor. reason: why it has it"""
    return reason if type_name in PLAIN_BITS else block_format(type_name, reason)


# As the files of towers on the Hub have it: matrices in F16, everything else in F32.
TOWER_TYPE = "F16"
IN_FLOAT32 = "llama.cpp computes with it in float32"


def tower_type(tensor: LogicalTensor) -> tuple[str, str]:
    """Return the type of a tensor of a tower for images, and why it has it."""
    if len(tensor.shape) < 2 or PLAIN_IN_TOWERS.fullmatch(tensor.name):
        return "F32", IN_FLOAT32
    return TOWER_TYPE, "matrix of a tower"


def chosen_types(
    mix: str, recipe: Recipe, model: GgufModel, checkpoint: Checkpoint, *, pure: bool = False, rounding: str
) -> dict[str, tuple[str, str]]:
    """Return the type of every tensor, and why it has it, by its name in the file.

    pure: whether all matrices get the type of the mix
    rounding: how codes are chosen: PLAIN, GPTQ or IMPORTANCE

    Raises RecipeError for a pattern that matches nothing, and for a size that cannot be met.
    """
    shape = _shape_of(model, imatrix=rounding != PLAIN)
    result: dict[str, tuple[str, str]] = {}
    free: list[LogicalTensor] = []
    weights: list[LogicalTensor] = []
    known = text_model(checkpoint.config)
    for tensor in model.tensors:
        if (plain := _plain(tensor, model)) is not None:
            result[tensor.name] = plain
            continue
        reason = f"{mix} {'pure' if pure else 'mix'}"
        if model.diffusion is None:
            wanted = type_of(mix, tensor.name, tensor.shape, shape, pure=pure)
        else:
            wanted = diffusion_type(mix, tensor.name, pure=pure)
        weights.append(tensor)
        rule, why = recipe.rule_for(known, tensor)
        if rule is None:
            free.append(tensor)
        else:
            wanted, reason = rule.format or "BF16", why
        result[tensor.name] = _fitted(tensor, wanted, reason)
    recipe.check(known, weights, [name for tensor in model.tensors for name in names_of(tensor)])
    if recipe.goal is None:
        return result
    types = [name for name in candidates(rounding) if model.diffusion is None or name in (*TYPES, "F16")]
    cancelled = CANCELLED if rounding == GPTQ else 1.0
    return result | _within(recipe, model, checkpoint, types=types, cancelled=cancelled, chosen=result, free=free)


def _plain(tensor: LogicalTensor, model: GgufModel) -> tuple[str, str] | None:
    """Return the type of a tensor that is not quantized, whatever the mix and the rules, and why; None for others."""
    if tensor.dtype == INTEGERS:
        return INTEGERS, "whole numbers"
    if model.diffusion is not None:
        plain = plain_type(model.diffusion, tensor)
        return None if plain is None else (plain, OUTSIDE)
    return None if may_be_quantized(tensor.name, tensor.shape) else ("F32", IN_FLOAT32)


def check_types(chosen: Mapping[str, tuple[str, str]]) -> None:
    """Raise OptionError for a type that the programs for image and video models do not decode."""
    for name, (type_name, _) in chosen.items():
        if type_name not in (*TYPES, *PLAIN_TYPES):
            programs = f"{COMFYUI} and {DIFFUSERS}"
            raise OptionError(f"`type` {type_name}, of tensor {name!r}: {programs} compute with {', '.join(TYPES)}")


def _shape_of(model: GgufModel, *, imatrix: bool) -> Shape:
    """Return what of a model the mixes depend on."""
    values = {key.removeprefix(f"{model.architecture}."): entry.value for key, entry in model.metadata.items()}

    def number(key: str) -> int:
        value = values.get(key, 0)
        return int(value[0] if isinstance(value, list | tuple) else value)

    heads, shared = number("attention.head_count"), number("attention.head_count_kv")
    layers = number("block_count")
    per_group = heads // shared if shared else 1
    return Shape(
        layers=layers,
        shared=per_group,
        experts=number("expert_count"),
        tied=all(tensor.name != "output.weight" for tensor in model.tensors),
        large=model.architecture in ("llama", "qwen2") and layers == 80 and per_group > 1,
        imatrix=imatrix,
        with_values=layers_with_values(tensor.name for tensor in model.tensors),
    )


def type_bytes(type_name: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor of a type, in bytes."""
    if type_name in PLAIN_BITS:
        return math.prod(shape) * PLAIN_BITS[type_name] // 8
    return math.prod(shape[:-1]) * BLOCK_TYPES[type_name].row_bytes(shape[-1])


def _fitted(tensor: LogicalTensor, wanted: str, reason: str) -> tuple[str, str]:
    """Return the type of a tensor whose rows the blocks of a type may not divide, and why it has it."""
    fitting = fitting_type(wanted, tensor.shape[-1])
    if fitting == wanted:
        return fitting, reason
    size = BLOCK_TYPES[wanted].group_size
    return fitting, (f"as blocks of {size} ({wanted}) do not divide its rows of {tensor.shape[-1]} weights")


def _within(
    recipe: Recipe,
    model: GgufModel,
    checkpoint: Checkpoint,
    *,
    types: Sequence[str],
    cancelled: float,
    chosen: Mapping[str, tuple[str, str]],
    free: Sequence[LogicalTensor],
) -> dict[str, tuple[str, str]]:
    """Choose types for the free tensors, so that the predicted rise of the loss is least within the size."""
    by_type = {name: type_name for name, (type_name, _) in chosen.items()}
    stored = {t.name: type_bytes(by_type[t.name], t.shape) for t in model.tensors}
    # The header does not depend on the types.
    tensors = {t.name: tensor_info(t.shape, by_type[t.name], stored[t.name]) for t in model.tensors}
    header = encode_header(model.metadata, tensors)
    overhead = RESERVED_BYTES + len(header) + ALIGNMENT * len(tensors)
    overhead += sum(stored.values()) - sum(stored[tensor.name] for tensor in free)
    by_name, layers = {t.name: t for t in free}, Layers.of(checkpoint, {t.name: (*sources_of(t), t)[0] for t in free})
    members = {layer: [by_name[name] for name in names] for layer, names in layers.members.items()}
    possible = {layer: [_candidate(type_name, of, cancelled) for type_name in types] for layer, of in members.items()}
    found = chosen_within(
        recipe,
        possible,
        overhead=overhead,
        weights=layers.weights,
        roles=layers.roles,
        parameters=sum(math.prod(tensor.shape) for tensor in free),
    )
    reason = f"chosen for {recipe.goal}"
    return {tensor.name: _fitted(tensor, found[layer], reason) for layer, of in members.items() for tensor in of}


def _candidate(type_name: str, tensors: Sequence[LogicalTensor], cancelled: float) -> Candidate:
    """Return what a type costs for some tensors, and their error in it.

    cancelled: which share of it counts if its codes can be chosen so that errors cancel
    """
    cost, error, weights = 0, 0.0, 0
    for tensor in tensors:
        fitting = fitting_type(type_name, tensor.shape[-1])
        count = math.prod(tensor.shape)
        cost += aligned(type_bytes(fitting, tensor.shape), ALIGNMENT)
        if fitting in PLAIN_TYPES:
            error += count * PLAIN_ERROR
        else:
            rule = BLOCK_TYPES[fitting]
            error += count * rule.distortion * (cancelled if rule.is_compensated else 1.0)
        weights += count
    return Candidate(type_name, cost, error / weights)
