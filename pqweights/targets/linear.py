"""Which weights of a master are linear layers that a runtime can hold as integers, and how configurations name them.

Weights that runtimes compute with in one layer are all rounded in groups of one size, or all stay plain: vLLM (0.32,
`packed_modules_mapping` of its models) joins q, k and v, gate and up, the inputs of linear attention and the
down-projections of MLA, and all experts of a layer, and refuses a layer whose parts differ.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeGuard, cast

from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.positions import stated_once
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.units import counted, first_names, size_text
from pqweights.errors import ExportError
from pqweights.formats.packing import CODES, WORD, ZEROS, PackedFormat, RoundingRule, StoredPart, tile_shape
from pqweights.kernels.groups import GroupRule
from pqweights.models import text_model
from pqweights.models.conventions import NEVER_QUANTIZED
from pqweights.models.description import ModelDescription
from pqweights.models.diffusion import find_family
from pqweights.models.names import fused_layer
from pqweights.planning.decisions import is_rounded_by_default
from pqweights.planning.layout import stored_bytes
from pqweights.planning.recipe import Recipe
from pqweights.planning.roles import names_of, role_of
from pqweights.targets.architectures import check_architecture
from pqweights.targets.assignment import PLAIN, PLAIN_ERROR, Candidate, chosen_within, distortion
from pqweights.targets.bf16 import is_weight, stored_dtype
from pqweights.targets.carried import plain_beside_codes
from pqweights.targets.experts import is_stack
from pqweights.targets.integers import Assignment
from pqweights.targets.target import BEST, MINMAX, GroupSize

# The longest row, in weights; eight rows are held in memory at once.
MOST_COLUMNS = 1 << 20
# The group sizes of a format of which each row is a group: any row can be one.
CHANNEL = (1,)
# A layer that would take this many bits a weight, as many as in BF16, stays plain.
TOO_MANY_BITS = 16
# Of a layer of a usual size.
USUAL_SHAPE = (4096, 4096)
# What the header of a file takes for a tensor, at most: a weight of a format may be stored as four.
HEADER_BYTES = 800
FUSED_WITH_KEPT = "runtimes fuse it with a layer that the master keeps"
PLAIN_IN_SOURCE = "the source, whose codes are taken over, keeps it plain"
FUSED_WITH_PLAIN = "runtimes fuse it with a layer that stays plain"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^\\.])")


@dataclass(frozen=True)
class LinearFormat:
    """A format of linear layers: a row in the table of a target, with the options that a user asks for.

    rule: how weights become codes as the runtime's own converter makes them
    layout: how they are stored
    groups: how many weights share a scale; CHANNEL for those of a row
    called: what compressed-tensors calls the layout
    activations: whether the runtime also rounds what layers read, by what it finds there
    qparams: BEST for the scales of least error, or MINMAX for those of the rule
    configuration: of a tool of which one format is that of all layers, what returns its quantization_config from the
        rule, the modules that stay plain, and expressions for these
    files: returns JSON files that the tool writes beside config.json, given the quantization_config
    stacks: whether stacks of all experts of a layer are stored so, and nothing else
    """

    rule: RoundingRule
    layout: tuple[StoredPart, ...]
    groups: GroupSize
    called: str = ""
    _: KW_ONLY
    activations: bool = False
    qparams: str = BEST
    configuration: Callable[[RoundingRule, Sequence[str], Iterable[str]], dict[str, Any]] | None = None
    files: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    stacks: bool = False

    @property
    def rows(self) -> int:
        """The number whose multiples the rows of a weight are: vLLM cuts fused layers at whole tiles, or words."""
        shares_words = any(part.across and part.by_columns and part.holds in (CODES, ZEROS) for part in self.layout)
        return WORD if shares_words else self.rule.rows

    @property
    def is_channel(self) -> bool:
        """Whether each row has one scale."""
        return self.groups.allowed == CHANNEL

    @property
    def ways(self) -> tuple[str, ...]:
        """The values of `qparams`: FP8 has no better scale than that of the largest weight, or hardly."""
        return (MINMAX,) if self.rule.kind == "fp8" else (BEST, MINMAX)

    @property
    def usual_bits(self) -> float:
        """The bits of a weight of a usual layer, scales included."""
        stored = self.format(USUAL_SHAPE, self.groups.size).specs("weight", USUAL_SHAPE)
        return 8 * stored_bytes(stored) / math.prod(USUAL_SHAPE)

    def with_options(self, group_size: int | None, qparams: str) -> LinearFormat:
        """Return the format with what a user asks for. Raises OptionError for a size that it does not have."""
        groups = GroupSize.of(self.groups.target, self.groups.allowed, group_size)
        return replace(self, groups=groups, qparams=qparams if qparams in self.ways else self.ways[0])

    def stated_qparams(self, asked: str | None) -> dict[str, str]:
        """Return what a manifest says of them: nothing where there is no choice and none was asked of other formats."""
        return {} if asked is None and len(self.ways) == 1 else {"qparams": self.qparams}

    def format(self, shape: tuple[int, ...], size: int) -> PackedFormat:
        """Return how a weight is stored in groups of a size."""
        options: dict[str, Any] = {"group_size": size}
        label = None
        if self.is_channel:
            options, label = {"group_size": shape[-1]}, f"{self.rule.kind}-channel"
        elif self.rule.rows > 1:
            options, label = {"row_length": shape[-1]}, f"{self.rule.kind}-{self.rule.rows}x{self.rule.group_size}"
        if self.qparams == BEST and BEST in self.ways:
            options["rule" if isinstance(self.rule, GroupRule) else "name"] = BEST
        return PackedFormat(replace(cast("Any", self.rule), **options), self.layout, label=label)

    def why_not(self, shape: tuple[int, ...], size: int) -> str | None:
        """Return why a weight whose rows groups of a size divide is not stored so; None if it is.

        Padded to tiles, a layer may take as much as in BF16.
        """
        if shape[0] % self.rows:
            return f"tiles of {self.rows} rows do not divide its {shape[0]} rows"
        if not any(part.tiled for part in self.layout):
            return None
        bits = 8 * stored_bytes(self.format(shape, size).specs("weight", shape)) / math.prod(shape)
        if bits < TOO_MANY_BITS:
            return None
        return (
            f"rows of {shape[1]} weights, padded to {tile_shape(shape)[1]}, would take {bits:.4g} bits a weight; "
            "--packing plain pads nothing"
        )


def with_quantization(checkpoint: Checkpoint, quantization: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of a model whose names and shapes stay those of the source, with a quantization_config."""
    return edited_config(
        stated_once(checkpoint.config),
        "BF16",
        old_dtype=model_dtype(checkpoint.config, checkpoint.tensors),
        quantization=quantization,
        tensors=checkpoint.tensors,
    )


def linear_weights(
    checkpoint: Checkpoint,
    target: str,
    formats: Mapping[str, LinearFormat],
    *,
    ladder: Sequence[str],
    recipe: Recipe,
    experts: str | None = None,
    one_size: bool = False,
    stacks: bool = False,
    heads: bool = False,
) -> Assignment:
    """Decide for every weight that may be rounded whether it becomes codes, and in groups of which size.

    The result has the tensors of the checkpoint, and no config.json yet.

    target: what messages call the target
    formats: those of the target, by name; the first is the default
    ladder: those from which formats are chosen for a size
    experts: why single experts stay plain; None if the runtime takes them
    one_size: whether all weights of a format have one group size
    stacks: whether the format is that of stacks of all experts, and of nothing else
    heads: whether the format takes a head with a weight of its own, which a rule has to name

    Raises ExportError for a model that the target cannot hold, for a group size that was asked for and that
    does not divide the rows of a weight, and if no weight can become integers; RecipeError for a rule that matches
    nothing, and for a size that cannot be met.
    """
    check_architecture(target, checkpoint.config)
    if find_family(checkpoint.config, [tensor.name for tensor in checkpoint.tensors]) is not None:
        raise ExportError(f"{target} runs no image or video models; use --target gguf or comfyui")
    weights, model = checkpoint.weights, text_model(checkpoint.config)
    decisions: dict[str, PackedFormat | str] = {}
    decisions |= _not_linear(checkpoint, recipe, experts=experts, stacks=stacks, heads=heads)
    linear = [t for t in checkpoint.tensors if is_weight(t, weights) and t.name not in decisions]
    stay = _plain_in_source(formats, linear) if recipe.goal is None else set()
    if one_size:
        formats = {name: replace(how, groups=_one_size(how.groups, linear)) for name, how in formats.items()}
    of_experts = {tensor.shape[-1] for tensor in linear if role_of(tensor, model) == "expert"}
    formats_of = functools.partial(_formats_of, model=model, formats=formats, expert_columns=of_experts)
    fused_with: dict[str, list[LogicalTensor]] = {}
    free: dict[str, Sequence[LogicalTensor]] = {}  # layers about which no rule decides
    known: list[LogicalTensor] = []
    for key, layer in _fused_layers(checkpoint, model).items():
        possible = [tensor for tensor in layer if is_weight(tensor, weights) and tensor.name not in decisions]
        names = [tensor.name for tensor in possible]
        kept = next((tensor.name for tensor in layer if not is_weight(tensor, weights)), None)
        if kept is not None and possible:
            decisions |= dict.fromkeys(names, FUSED_WITH_KEPT)
            fused_with[kept] = possible
        elif possible:
            known += possible
            rule, why = recipe.rule_for(model, *possible)
            if rule is not None and rule.keep:
                decisions |= dict.fromkeys(names, why)
            elif rule is None and stay.issuperset(names):
                decisions |= dict.fromkeys(names, PLAIN_IN_SOURCE)
            else:
                name = (rule and rule.format) or next(iter(formats))
                made = formats_of(possible, name, why or None, is_whole=len(possible) == len(layer))
                decisions |= made
                free |= {key: possible} if rule is None and _is_rounded(made) else {}
    recipe.check(model, known, [name for tensor in checkpoint.tensors for name in names_of(tensor)])
    _check_rounded(target, decisions, linear)
    if recipe.goal is not None:
        decisions |= _within(checkpoint, recipe, decisions, free=free, ladder=ladder, formats_of=formats_of)
    return Assignment(tensors=checkpoint.tensors, decisions=decisions, config=None, warnings=fused_warnings(fused_with))


def _check_rounded(target: str, decisions: Mapping[str, PackedFormat | str], linear: Sequence[LogicalTensor]) -> None:
    """Raise ExportError if all weights stay plain. linear: those that are linear layers"""
    if all(isinstance(how, str) for how in decisions.values()):
        own = [how for t in linear if (how := decisions[t.name]) not in (FUSED_WITH_KEPT, FUSED_WITH_PLAIN)]
        why = next(map(str, [*own, *decisions.values()]), "none of its weights is a linear layer that quantize encodes")
        raise ExportError(f"no weight of this model can become integers for {target}: {why}")


def _is_rounded(made: Mapping[str, PackedFormat | str]) -> TypeGuard[Mapping[str, PackedFormat]]:
    """Whether all weights of a layer have formats."""
    return all(isinstance(how, PackedFormat) for how in made.values())


def _plain_in_source(formats: Mapping[str, LinearFormat], linear: Sequence[LogicalTensor]) -> set[str]:
    """Return the linear layers that stay plain as in the source, unless a rule or a size decides; see carried.py."""
    usual = next(iter(formats.values()))
    sizes = ((tensor.shape, usual.groups.fitting([tensor.shape[-1]])) for tensor in linear)
    shape, size = next(((shape, size) for shape, size in sizes if size is not None), ((), None))
    return set() if size is None else plain_beside_codes(linear, usual.format(shape, size).rule)


def _within(
    checkpoint: Checkpoint,
    recipe: Recipe,
    decisions: Mapping[str, PackedFormat | str],
    *,
    free: Mapping[str, Sequence[LogicalTensor]],
    ladder: Sequence[str],
    formats_of: Callable[..., Mapping[str, PackedFormat | str]],
) -> dict[str, PackedFormat | str]:
    """Return the formats of the free layers with which the files have at most the size asked for."""
    layers: dict[str, list[Candidate]] = {}
    possible: dict[tuple[str, str], Mapping[str, PackedFormat | str]] = {}
    reason = f"chosen for {recipe.goal}"
    for key, layer in free.items():
        layers[key] = [Candidate(PLAIN, 2 * sum(map(element_count, layer)), PLAIN_ERROR)]
        possible[key, PLAIN] = dict.fromkeys((tensor.name for tensor in layer), reason)
        for name in ladder:
            made = formats_of(layer, name, reason)
            if _is_rounded(made):
                cost = sum(stored_bytes(made[t.name].specs(t.name, t.shape)) for t in layer)
                layers[key].append(Candidate(name, cost, distortion(made[layer[0].name].rule)))
                possible[key, name] = made
    in_layers = {tensor.name for layer in free.values() for tensor in layer}
    overhead, model = HEADER_BYTES * (len(checkpoint.tensors) + 1), model_dtype(checkpoint.config, checkpoint.tensors)
    for tensor in (tensor for tensor in checkpoint.tensors if tensor.name not in in_layers):
        how = decisions.get(tensor.name)
        if isinstance(how, PackedFormat):
            overhead += stored_bytes(how.specs(tensor.name, tensor.shape))
        else:
            dtype = stored_dtype(tensor, checkpoint.weights, model=model, dtype="BF16")
            overhead += TensorSpec(tensor.name, dtype, tensor.shape).byte_count
    known = text_model(checkpoint.config)
    chosen = chosen_within(
        recipe,
        layers,
        overhead=overhead,
        weights={key: [tensor.name for tensor in layer] for key, layer in free.items()},
        roles={tensor.name: role_of(tensor, known) for layer in free.values() for tensor in layer},
        parameters=sum(element_count(tensor) for layer in free.values() for tensor in layer),
    )
    return {name: how for key in free for name, how in possible[key, chosen[key]].items()}


def _fused_layers(checkpoint: Checkpoint, model: ModelDescription) -> dict[str, list[LogicalTensor]]:
    """Group the matrices of linear layers, and what the master encoded, by the layers that runtimes make of them."""
    layers: dict[str, list[LogicalTensor]] = {}
    for tensor in checkpoint.tensors:
        if is_weight(tensor, checkpoint.weights) or (tensor.name.endswith(".weight") and len(tensor.shape) == 2):
            layers.setdefault(_fused_layer(tensor, model), []).append(tensor)
    return layers


def _fused_layer(tensor: LogicalTensor, model: ModelDescription) -> str:
    """Return the name of the layer that a weight becomes part of."""
    role = role_of(tensor, model)
    if not tensor.name.endswith(".weight") and role != "expert":
        return tensor.name
    return fused_layer(tensor.name, role, tied=False, in_masters=False, model=model)


def _joined_matrix(tensor: LogicalTensor, model: ModelDescription) -> str:
    """Return the name of the matrix that a weight becomes part of: of experts, each has its own."""
    role = "mlp" if role_of(tensor, model) == "expert" else role_of(tensor, model)
    return fused_layer(tensor.name, role, tied=False, in_masters=False, model=model)


def _formats_of(
    layer: Sequence[LogicalTensor],
    name: str,
    reason: str | None,
    *,
    model: ModelDescription,
    formats: Mapping[str, LinearFormat],
    expert_columns: set[int],
    is_whole: bool = True,
) -> dict[str, PackedFormat | str]:
    """Return how the weights of one layer are stored in a format; or why each stays plain, if one of them cannot be.

    name: of the format
    reason: why they have it
    is_whole: whether the layer has no other weights, which stay plain
    expert_columns: of the experts of all layers
    """
    how, columns = formats[name], {tensor.shape[-1] for tensor in layer}
    allowed = how.groups
    if any(role_of(tensor, model) == "expert" for tensor in layer):
        # transformers decodes the experts of all layers in one group size
        columns |= {length for length in expert_columns if allowed.fitting([length]) is not None}
    size = allowed.fitting(columns) or allowed.size
    made: dict[str, PackedFormat | str] = {}
    reasons: dict[str, PackedFormat | str] = {}
    for tensor in layer:
        allowed.check(tensor.name, tensor.shape[-1])
        why = allowed.why_not(tensor.shape[-1]) or how.why_not(tensor.shape, size)
        if why is not None:
            reasons[tensor.name] = why
        else:
            stored = how.format(tensor.shape, size)
            unit_of = _joined_matrix(tensor, model) if stored.has_unit else None
            made[tensor.name] = replace(stored, name=name, unit_of=unit_of, reason=reason)
    others = {tensor.name: FUSED_WITH_PLAIN for tensor in layer if tensor.name not in reasons}
    return {**others, **reasons} if reasons or not is_whole else made


def fused_warnings(fused_with: Mapping[str, Sequence[LogicalTensor]]) -> tuple[str, ...]:
    """Return a warning of weights that stay plain because of one that is kept, by the name of that one."""
    tensors = [tensor for layer in fused_with.values() for tensor in layer]
    if not tensors:
        return ()
    stored = size_text(sum(2 * element_count(tensor) for tensor in tensors))
    return (
        f"plain because runtimes fuse them with what the master keeps ({first_names(list(fused_with))}): "
        f"{counted(len(tensors), 'weight')}, {stored} in BF16; only a master that keeps no part of a fused layer has "
        "all of it rounded",
    )


def kept_by_recipe(tensor: LogicalTensor, model: ModelDescription, weights: frozenset[str]) -> bool:
    """Whether the master keeps a tensor that the default policy would have encoded; then its recipe wants it kept."""
    if is_weight(tensor, weights) or tensor.plain_dtype not in ("BF16", "F16", "F32", "F64"):
        return False
    return is_rounded_by_default(tensor, model)


def _one_size(groups: GroupSize, tensors: Sequence[LogicalTensor]) -> GroupSize:
    """Return the one size with which the most weights can be rounded."""

    def divided(size: int) -> int:
        return sum(element_count(tensor) for tensor in tensors if tensor.shape[-1] % size == 0)

    return groups if groups.chosen is not None else replace(groups, only=max(groups.tried, key=divided))


def _not_linear(
    checkpoint: Checkpoint, recipe: Recipe, *, experts: str | None, stacks: bool, heads: bool
) -> dict[str, str]:
    """Return why weights are no linear layers that the format stores, by name. experts ... heads: see linear_weights"""
    config, model = checkpoint.config or {}, text_model(checkpoint.config)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    tokens = {part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)}
    reasons = {}
    for tensor in checkpoint.tensors:
        if not is_weight(tensor, checkpoint.weights):
            continue
        if stacks:
            why = None if is_stack(tensor, checkpoint.weights) else "the format stores stacks of experts alone"
        elif heads and role_of(tensor, model) == "lm_head" and _has_format(tensor, model, recipe):
            why = None
        else:
            why = _why_not_linear(tensor, model, tokens, experts)
        if why is not None:
            reasons[tensor.name] = why
    return reasons


def _has_format(tensor: LogicalTensor, model: ModelDescription, recipe: Recipe) -> bool:
    """Return whether a rule gives a weight a format."""
    rule, _ = recipe.rule_for(model, tensor)
    return rule is not None and not rule.keep


def _why_not_linear(
    tensor: LogicalTensor, model: ModelDescription, tokens: set[int], experts: str | None
) -> str | None:
    """Return why a weight is no linear layer. tokens: vocabulary sizes"""
    role = role_of(tensor, model)
    if role in ("embedding", "lm_head"):
        return f"{role}: the runtime does not quantize it"
    if NEVER_QUANTIZED.search(tensor.name):
        return "vLLM joins it with another, and holds both plain"
    if model.plain_in_vllm and re.search(model.plain_in_vllm, tensor.name):
        return "vLLM has no quantized layer in its place"
    if len(tensor.shape) != 2:
        return "the format stores single linear layers"
    if role == "expert" and experts is not None:
        return experts
    if role not in ("attention", "mlp", "linear", "expert") or not tensor.name.endswith(".weight"):
        return f"{role}: not known to be a linear layer"
    is_numbered = any(component.isdigit() for component in tensor.name.split("."))
    if role == "linear" and tensor.shape[0] in tokens and not is_numbered:
        return "a row for each token, so an embedding or a head: the runtime does not quantize it"
    if tensor.shape[-1] > MOST_COLUMNS:
        return f"rows of {tensor.shape[-1]} weights: only up to {MOST_COLUMNS} are held in memory"
    return None


def kinds_of(chosen: Mapping[str, PackedFormat], formats: Mapping[str, LinearFormat]) -> dict[str, tuple[str, int]]:
    """Return by which formats and group sizes configurations tell weights apart; where rows are groups, by none."""
    return {
        name: (how.name, 1 if formats[how.name].is_channel else how.rule.group_size) for name, how in chosen.items()
    }


def module_of(weight: str) -> str:
    """Return the name of the module that holds a weight; for fused experts, that of all experts."""
    return re.sub(r"\.experts\.[a-z_]+$", ".experts", weight.removesuffix(".weight"))


def patterns(weights: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return expressions of compressed-tensors that match the modules of some weights, and none of the others.

    torchao's matches read them, too. Each is as general as it can be without matching another module. It leaves open
    the prefix before the layers, which loaders add or remove, and the numbers of layers and experts.
    """
    excluded = sorted({module_of(other) for other in others})

    @functools.cache
    def takes_in_others(expression: str) -> bool:
        compiled = re.compile(f"{expression}$")
        return any(compiled.match(module) for module in excluded)

    result: dict[str, None] = {}  # a set that keeps its order
    for module in map(module_of, weights):
        for expression in _expressions(module):
            if expression in result or not takes_in_others(expression):
                break
        result[expression] = None
    return [f"re:{expression}$" for expression in result]


def _expressions(module: str) -> Iterator[str]:
    """Yield expressions that match a module, the most general first: each later one includes more of the prefix."""
    components = module.split(".")
    numbers = [index for index, component in enumerate(components) if component.isdigit()]
    end = r"(\..*)?" if components[-1] == "experts" else ""
    for first in range(max(numbers[0] - 1, 0) if numbers else 0, -1, -1):
        tail = re.escape(".".join(components[first:])) + end
        yield r"(.*\.)?" + _NUMBER.sub(r"\\d+", tail)
        if len(numbers) > 1:  # all experts of this layer
            start = _NUMBER.search(tail)
            assert start is not None
            yield r"(.*\.)?" + tail[: start.end()] + _NUMBER.sub(r"\\d+", tail[start.end() :])
        yield r"(.*\.)?" + tail
    yield re.escape(module) + end
