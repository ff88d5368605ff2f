"""The vllm target: symmetric integers and microscaling floats of compressed-tensors, for vLLM and transformers.

Formats: https://github.com/vllm-project/compressed-tensors (compressors), and the OCP microscaling formats
specification 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.units import first_names
from pqweights.errors import ExportError, OptionError
from pqweights.exports.architectures import renames_towers, uses_weights_early
from pqweights.exports.bf16 import role_of
from pqweights.exports.formats import Rounding, Rule
from pqweights.exports.integers import Outline
from pqweights.exports.linear import LinearRules, LinearWeights, linear_weights, module_of, patterns
from pqweights.exports.loading import LoadableModel, by_transformers, shell
from pqweights.exports.original import integer_export
from pqweights.exports.target import (
    BEST,
    COMPRESSED_TENSORS,
    INTEGER_OPTIONS,
    MINMAX,
    ExportTarget,
    FormatChoice,
    GroupSize,
    check_rounding,
    one_of,
)
from pqweights.kernels.groups import FloatRule, GroupRule
from pqweights.options import ExportOptions
from pqweights.planning.roles import tower_of

NAME = "vllm"
# What manifests call the target: the name that it had first.
STATED_NAME = "vllm-int4"


CHANNEL = (1,)  # any row can be a group
# What a manifest says of the basis: weights are rounded as they are. Earlier versions also wrote "rotated".
BASIS = "plain"
# The modules of routers, by the names that they have in memory.
ROUTERS = r"re:.*\.(gate|router)$"


@dataclass(frozen=True)
class WeightScheme:
    """A format.

    bits: the width of a code
    sizes: the group sizes, the default first; CHANNEL if each row is a group
    layout: how a weight is stored, by the name that compressed-tensors has for it
    floats: of which kind the codes are, a key of FLOAT_MODES; None for integers
    activations: whether the runtime also rounds what layers read, by what it finds there
    """

    bits: int
    sizes: tuple[int, ...]
    layout: str
    floats: str | None = None
    activations: bool = False

    @property
    def rules(self) -> tuple[str, ...]:
        """The values of `qparams`: groups as long as rows have no better scale than that of the largest weight."""
        return (MINMAX,) if self.sizes == CHANNEL else (BEST, MINMAX)

    def rounding(self, size: int, qparams: str, columns: int) -> Rounding:
        """Return what becomes of a weight with some columns in groups of a size."""
        name = BEST if qparams == BEST else "compressed-tensors"
        length, label = (columns, f"{self.floats or 'symmetric'}-channel") if self.sizes == CHANNEL else (size, None)
        rule: Rule = GroupRule(bits=self.bits, group_size=length, symmetric=True, middle=True, rule=name)
        if self.floats is not None:
            rule = FloatRule(self.floats, self.bits, length, name)
        return Rounding(rule, self.layout, label=label)

    def group(self, size: int, targets: list[str]) -> dict[str, Any]:
        """Return what config.json says of the layers that have groups of a size."""
        codes = {"num_bits": self.bits, "type": "int" if self.floats is None else "float", "symmetric": True}
        strategy: dict[str, Any] = {"strategy": "group", "group_size": size}
        of_inputs = strategy
        if self.sizes == CHANNEL:
            strategy, of_inputs = {"strategy": "channel"}, {"strategy": "token"}
        elif self.floats is not None:
            codes |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return {
            "targets": targets,
            "format": self.layout,
            "input_activations": codes | of_inputs | {"dynamic": True} if self.activations else None,
            "output_activations": None,
            "weights": codes | strategy | {"dynamic": False},
        }


GROUPS, INTEGERS = (128, 64, 32), "pack-quantized"
# By name, as in compressed-tensors; fp8 is its FP8_DYNAMIC, int8 its W8A8.
SCHEMES = {
    "w4a16": WeightScheme(4, GROUPS, INTEGERS),
    "w8a16": WeightScheme(8, GROUPS, INTEGERS),
    "int8": WeightScheme(8, CHANNEL, "int-quantized", activations=True),
    "fp8": WeightScheme(8, CHANNEL, "float-quantized", "fp8", activations=True),
    "mxfp4": WeightScheme(4, (32,), "mxfp4-pack-quantized", "mxfp4", activations=True),
    "mxfp4a16": WeightScheme(4, (32,), "mxfp4-pack-quantized", "mxfp4"),
    "mxfp8": WeightScheme(8, (32,), "mxfp8-quantized", "mxfp8", activations=True),
    "mxfp8a16": WeightScheme(8, (32,), "mxfp8-quantized", "mxfp8"),
}


@dataclass(frozen=True, kw_only=True)
class VllmFormat:
    """The format with its options: see ExportOptions."""

    name: str
    groups: GroupSize
    qparams: str

    compares_master = True

    @property
    def scheme(self) -> WeightScheme:
        """What the name stands for."""
        return SCHEMES[self.name]

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the target and its options."""
        stated = {
            "target": STATED_NAME,
            "bits": self.scheme.bits,
            "group_size": self.groups.size,
            "basis": BASIS,
            "qparams": self.qparams,
        }
        if self.scheme.layout != INTEGERS:  # manifests of which name their format by its bits
            stated["format"] = self.name
        if self.scheme.sizes == CHANNEL:
            del stated["group_size"]
        return stated

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """Decide which linear layers become integers; names and shapes are those of the source."""
        early = uses_weights_early(checkpoint.config)  # then transformers decodes all layers in one group size
        linear = linear_weights(checkpoint, LinearRules(groups=self.groups, one_size=early))
        return linear.outline(
            checkpoint,
            lambda tensor, size: self.scheme.rounding(size, self.qparams, tensor.shape[-1]),
            quantization=self._quantization(checkpoint, linear.sizes),
            warnings=_experts_warnings(checkpoint, linear),
        )

    def _quantization(self, checkpoint: Checkpoint, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The quantization_config: all linear layers but those to be ignored. sizes: of the weights that are rounded"""
        # What compressed-tensors may take for a linear layer, or vLLM for fused experts.
        may_be = [t for t in checkpoint.tensors if len(t.shape) in (2, 3)]
        layers = [t.name for t in may_be if role_of(t) not in ("bias", "buffer")]
        quantization: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": self.scheme.layout,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": self.scheme.group(size, targets)
                for number, (size, targets) in enumerate(_targets(layers, sizes))
            },
            "ignore": _ignored(checkpoint, layers, sizes),
        }
        if uses_weights_early(checkpoint.config):
            # Read by transformers alone, which then decodes each weight as it loads it. By default it keeps all of them
            # packed until the first call, and such a model asks for them before.
            quantization["dequantize"] = True
        return quantization


def _experts_warnings(checkpoint: Checkpoint, linear: LinearWeights) -> tuple[str, ...]:
    """Return a warning if single experts stay plain, which transformers cannot load beside packed weights."""
    experts = [t.name for t in checkpoint.tensors if role_of(t) == "expert" and len(t.shape) == 2]
    plain = [name for name in experts if name not in linear.sizes and name.endswith(".weight")]
    if not plain:
        return ()
    return (
        f"single experts stay plain ({first_names(plain)}): vLLM loads them; transformers (5.23) looks for packed ones "
        "alone when it stacks experts, and fails",
    )


def _targets(layers: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[int, list[str]]]:
    """Return the group sizes with what matches their layers: one size is that of all linear layers.

    Of several, each names its layers, and the largest takes all others, such as those that a loader renames. The size
    of the experts comes first: transformers takes the first one whose expressions contain "experts" for theirs, and
    those of a shared expert do, too.
    """
    different = sorted(set(sizes.values()), reverse=True)
    if len(different) == 1:
        return [(different[0], ["Linear"])]
    result = []
    for size in different:
        own = [name for name in layers if sizes.get(name) == size]
        targets = patterns(own, [name for name in layers if sizes.get(name) != size])
        result.append((size, [*targets, "Linear"] if size == different[0] else targets))
    of_experts = next((size for name, size in sizes.items() if ".experts." in name), None)
    return sorted(result, key=lambda group: group[0] != of_experts)


def _ignored(checkpoint: Checkpoint, layers: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Return expressions that match the layers that stay plain, and no others."""
    rounded = [name for name in layers if name in sizes]
    plain = sorted(set(layers) - set(rounded), key=layers.index)
    result = ["lm_head", *patterns([name for name in plain if _is_numbered(name)], rounded)]
    has_routers = any(role_of(tensor) == "router" for tensor in checkpoint.tensors)
    if has_routers and not any(re.match(ROUTERS.removeprefix("re:"), module_of(name)) for name in rounded):
        result.append(ROUTERS)  # transformers renames some of them as it loads the checkpoint
    if renames_towers(checkpoint.config):  # all modules of those that stay plain, whatever they are called within
        towers = dict.fromkeys(tower for name in plain if (tower := tower_of(name)) is not None)
        result += [rf"re:(.*\.)?{re.escape(tower)}\..*" for tower in towers if tower not in map(tower_of, rounded)]
    return [*result, _outside(rounded, plain)]


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


def read_options(options: ExportOptions) -> VllmFormat:
    """Return the format. Raises OptionError for an option that it does not have."""
    name = one_of(NAME, "format", options.format, allowed=tuple(SCHEMES))
    if options.bits is not None and options.format is None:
        name = f"w{one_of(NAME, 'bits', options.bits, allowed=(4, 8))}a16"
    scheme = SCHEMES[name]
    if options.bits not in (None, scheme.bits):
        raise OptionError(f"`bits` {options.bits}: the format {name} has {scheme.bits}")
    has_rows = scheme.floats is None and scheme.sizes != CHANNEL
    why_not = None if has_rows else f"expected integers in groups, found the format {name}"
    check_rounding(NAME, options, why_not=why_not)
    return VllmFormat(
        name=name,
        groups=GroupSize.of(NAME, scheme.sizes, options.group_size),
        qparams=one_of(NAME, "qparams", options.qparams, allowed=scheme.rules),
    )


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    if made_by.get("basis", BASIS) != BASIS:
        raise ExportError(
            f"this export was made with --basis {made_by['basis']}, which this version of pqweights does not have, and "
            "which transformers computes wrongly; export the master again"
        )
    trust = " --trust-remote-code" if model.custom else ""
    serve = shell("pip install vllm", f"vllm serve {model.quoted}{model.revision_option}{trust}")
    by_library = by_transformers(model, "torch transformers compressed-tensors")
    return ["With vLLM:", serve, "Or with transformers:", *by_library]


TARGET = ExportTarget(
    name=NAME,
    runtime=COMPRESSED_TENSORS,
    tags=("vllm", "compressed-tensors"),
    options=("format", *INTEGER_OPTIONS),
    account=("basis",),
    read_options=read_options,
    prepare=integer_export,
    check=lambda master, settings: settings.outline(master.layers),
    load_section=_load_section,
    choices=tuple(FormatChoice(n, ExportOptions(format=n), scheme.activations) for n, scheme in SCHEMES.items()),
)
