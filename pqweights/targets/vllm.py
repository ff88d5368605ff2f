"""The vllm target: symmetric integers and microscaling floats of compressed-tensors, for vLLM and transformers.

Formats: https://github.com/vllm-project/compressed-tensors (compressors), and the OCP microscaling formats
specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.units import first_names
from pqweights.convert.conversion import SmallFiles
from pqweights.errors import ExportError, OptionError
from pqweights.models import has_trait
from pqweights.models.traits import Trait
from pqweights.planning.options import ExportOptions
from pqweights.planning.plan import ShardPlan
from pqweights.planning.recipe import NOTHING, Recipe
from pqweights.targets.assignment import describe, recipe_of
from pqweights.targets.bf16 import role_of
from pqweights.targets.compressed_tensors import decodes_at_once
from pqweights.targets.dialects import configuration, small_files
from pqweights.targets.experts import OF_STACKS, is_stack, with_single_experts, with_upright_stacks
from pqweights.targets.integer_export import plan_integers
from pqweights.targets.integers import Outline
from pqweights.targets.linear import LinearFormat, LinearRules, LinearWeights, linear_weights
from pqweights.targets.loading import LoadableModel, by_transformers, shell
from pqweights.targets.possible import one_of_each
from pqweights.targets.schemes import CHANNEL, SCHEMES, Dialect, SchemeFormat, WeightScheme
from pqweights.targets.target import (
    BEST,
    COMPRESSED_TENSORS,
    INTEGER_OPTIONS,
    RECIPE_OPTIONS,
    USUAL_SHAPE,
    ExportTarget,
    FormatChoice,
    GroupSize,
    check_rounding,
    one_of,
    stored_bits,
)

NAME = "vllm"
# From which formats are chosen for a size, besides the one that was asked for.
LADDER = ("w4a16", "w8a16", "nvfp4", "fp8")
RESHAPED = (
    "this export is for vLLM alone: transformers (5.23) cuts or joins weights of this type of model as it loads them, "
    "which does not work with packed ones, nor with plain ones beside them"
)
UNSTACKED = "the experts of this model stay plain; --format mxfp4-gpt-oss rounds them, and nothing else"


@dataclass(frozen=True, kw_only=True)
class VllmFormat:
    """The format with its options: see ExportOptions."""

    name: str
    groups: GroupSize
    qparams: str
    recipe: Recipe = NOTHING

    @property
    def scheme(self) -> WeightScheme:
        """What the name stands for."""
        return SCHEMES[self.name]

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the target and its options."""
        stated = {"target": NAME, "format": self.name, "bits": self.scheme.bits, "qparams": self.qparams}
        sizes = {} if self.scheme.sizes == CHANNEL else {"group_size": self.groups.size}
        return stated | sizes | describe(self.recipe)

    @property
    def formats(self) -> dict[str, LinearFormat]:
        """All formats, the default first."""
        default = SchemeFormat(self.scheme, self.groups, self.qparams)
        others = {name: _default_format(name, self.qparams) for name in _that_mix_with(self.name) if name != self.name}
        return {self.name: default, **others}

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """Decide which linear layers become integers; names and shapes are those of the source, of single experts."""
        stacks = self.scheme.dialect is Dialect.GPT_OSS
        checkpoint = with_upright_stacks(checkpoint) if stacks else with_single_experts(checkpoint)
        rules = LinearRules(
            target=NAME,
            formats=self.formats,
            ladder=_ladder(self.name),
            recipe=self.recipe,
            # transformers decodes all layers in one group size, if it decodes them as it loads them
            one_size=self.scheme.has_one_size or decodes_at_once(checkpoint),
            stacks=stacks,
        )
        linear = linear_weights(checkpoint, rules)
        if stacks:
            _check_stacks(checkpoint, linear)
        quantization = configuration(checkpoint, linear.chosen, self.scheme.dialect)
        outline = linear.outline(checkpoint, quantization=quantization, warnings=_experts_warnings(checkpoint, linear))
        files = small_files(quantization, self.scheme.dialect)
        return replace(outline, small_files=partial(_whatever_shards, files)) if files else outline


def _whatever_shards(files: SmallFiles, shards: Sequence[ShardPlan]) -> SmallFiles:
    return files


def _default_format(name: str, qparams: str) -> SchemeFormat:
    """Return a format that a rule asks for, in its own group size."""
    scheme = SCHEMES[name]
    groups = GroupSize.of(NAME, scheme.sizes, None)
    return SchemeFormat(scheme, groups, qparams if qparams in scheme.rules else scheme.rules[0])


def _that_mix_with(name: str) -> tuple[str, ...]:
    """Return the formats that one export may have besides a format, itself included; only one dialect has several."""
    if SCHEMES[name].dialect is not Dialect.COMPRESSED_TENSORS:
        return (name,)
    return tuple(other for other, scheme in SCHEMES.items() if scheme.dialect is Dialect.COMPRESSED_TENSORS)


def _ladder(name: str) -> tuple[str, ...]:
    """Return the formats from which those of a size are chosen: with rounded activations if the default has them."""
    activations = SCHEMES[name].activations
    others = (n for n in LADDER if n in _that_mix_with(name) and SCHEMES[n].activations == activations)
    return tuple(dict.fromkeys([name, *others]))


def _check_stacks(checkpoint: Checkpoint, linear: LinearWeights) -> None:
    """Raise ExportError if a stack stays plain: runtimes take the experts of every layer for packed ones."""
    stacks = (t.name for t in checkpoint.tensors if len(t.shape) == 3 and role_of(t, linear.model) == "expert")
    for name in stacks:
        if name not in linear.chosen:
            reason = linear.plain.get(name, "the master keeps it")
            raise ExportError(f"tensor {name!r}: mxfp4-gpt-oss holds all experts or none, and it stays plain: {reason}")


def _experts_warnings(checkpoint: Checkpoint, linear: LinearWeights) -> tuple[str, ...]:
    """Return a warning of experts that another format rounds, or that transformers cannot load."""
    stacks = (
        tensor
        for tensor in checkpoint.tensors
        if is_stack(tensor, checkpoint.weights) and tensor.name not in linear.chosen
    )
    if (checkpoint.config or {}).get("model_type") == OF_STACKS and any(stacks):
        return (UNSTACKED,)
    if has_trait((checkpoint.config or {}).get("model_type"), Trait.VLLM_ALONE):
        return (RESHAPED,)
    if Trait.VLLM_TAKES_SINGLE_EXPERTS in linear.model.traits:
        return ("vLLM alone loads this export: transformers (5.23) takes no single experts of this type of model",)
    experts = [t.name for t in checkpoint.tensors if role_of(t, linear.model) == "expert" and len(t.shape) == 2]
    plain = [name for name in experts if name not in linear.chosen and name.endswith(".weight")]
    if not plain:
        return ()
    return (
        f"single experts stay plain ({first_names(plain)}): vLLM loads them; transformers (5.23) looks for packed ones "
        "alone when it stacks experts, and fails",
    )


def read_options(options: ExportOptions) -> VllmFormat:
    """Return the format. Raises OptionError for an option that it does not have."""
    name = one_of(NAME, "format", options.format, allowed=tuple(SCHEMES))
    if options.bits is not None and options.format is None:
        name = f"w{one_of(NAME, 'bits', options.bits, allowed=(4, 8))}a16"
    scheme = SCHEMES[name]
    if options.bits not in (None, scheme.bits):
        raise OptionError(f"`bits` {options.bits}: the format {name} has {scheme.bits}")
    why_not = None if scheme.has_integer_groups else f"expected integers in groups, found the format {name}"
    check_rounding(NAME, options, why_not=why_not)
    return VllmFormat(
        name=name,
        groups=GroupSize.of(NAME, scheme.sizes, options.group_size),
        qparams=one_of(NAME, "qparams", options.qparams, allowed=scheme.rules),
        recipe=recipe_of(options, _that_mix_with(name)),
    )


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    trust = " --trust-remote-code" if model.custom else ""
    serve = shell("pip install vllm", f"vllm serve {model.quoted}{model.revision_option}{trust}")
    by_library = by_transformers(model, "torch transformers compressed-tensors")
    return ["With vLLM:", serve, "Or with transformers:", *by_library]


# The formats that a memory is filled with; others have as many bits, or are for models of one type.
PROPOSED = ("w8a16", "fp8", "int8", "nvfp4", "mxfp4", "w4a16", "w3a16")


def _bits(name: str) -> float:
    """Return the bits of a weight of a usual layer."""
    layer, (size, *_) = _default_format(name, BEST), SCHEMES[name].sizes
    return stored_bits(layer.rounding(USUAL_SHAPE, size))


TARGET = ExportTarget(
    name=NAME,
    runtime=COMPRESSED_TENSORS,
    tags=("vllm", "compressed-tensors"),
    options=(*RECIPE_OPTIONS, *INTEGER_OPTIONS),
    account=("rules",),
    read_options=read_options,
    plan=plan_integers,
    check=lambda checkpoint, settings: settings.outline(one_of_each(checkpoint)),
    load_section=_load_section,
    choices=tuple(FormatChoice(name, ExportOptions(format=name), _bits(name)) for name in PROPOSED),
    plain_roles=("embedding", "lm_head"),
)
