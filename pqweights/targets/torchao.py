"""The torchao target: weights of linear layers in 4 or 8 bits, loaded by transformers with torchao.

The layouts are those of torchao 0.18 (quantization/quantize_/workflows), and the safetensors metadata, from which
its tensor classes are rebuilt, is that of its prototype/safetensors. Every file carries the metadata of all tensors,
because the loader merges what the files carry, and the last file wins. torchao is not needed to write them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import OptionError
from pqweights.kernels.groups import FloatRule, GroupRule
from pqweights.models import described
from pqweights.models.names import names_in_memory
from pqweights.planning.options import ExportOptions
from pqweights.planning.plan import stored_bytes
from pqweights.planning.recipe import NOTHING, Recipe
from pqweights.targets.assignment import describe, recipe_of
from pqweights.targets.formats import PADDED_COLUMNS, TILE_ROWS, Rounding, Rule, tile_shape
from pqweights.targets.integer_export import plan_integers
from pqweights.targets.integers import Outline
from pqweights.targets.linear import Chosen, LinearFormat, LinearRules, linear_weights, patterns
from pqweights.targets.loading import LoadableModel, by_transformers
from pqweights.targets.possible import one_of_each
from pqweights.targets.target import (
    BEST,
    INTEGER_OPTIONS,
    MINMAX,
    RECIPE_OPTIONS,
    TORCHAO,
    USUAL_SHAPE,
    ExportTarget,
    FormatChoice,
    GroupSize,
    check_rounding,
    one_of,
    stored_bits,
)

NAME = "torchao"
TILE, UNTILED = "tile_packed_to_4d", "plain"
GROUP_SIZES = (128, 64, 32, 256)
CHANNEL = (1,)  # any row can be a group
# A layer that would take this many bits a weight, as many as in BF16, stays plain.
TOO_MANY_BITS = 16
# The share of the integers that the other packing must save before a user is told of it.
WORTH_A_WARNING = 0.1
# Why single experts stay plain.
EXPERTS = "transformers stacks experts as it loads them, which torchao's tensors cannot be"
BF16 = {"_type": "torch.dtype", "_data": "bfloat16"}
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
SYMMETRIC = {"_type": "MappingType", "_data": "SYMMETRIC"}


@dataclass(frozen=True)
class Int4:
    """Int4WeightOnlyConfig with its options: see LinearFormat and ExportOptions."""

    packing: str
    groups: GroupSize
    qparams: str

    def rounding(self, shape: tuple[int, ...], size: int) -> Rounding:
        """Return how weights are rounded in groups of a size."""
        name = BEST if self.qparams == BEST else "torchao"
        rule = GroupRule(bits=4, group_size=size, symmetric=False, middle=True, rule=name)
        return Rounding(rule, "int4-tiles" if self.packing == TILE else "int4-plain")

    def why_not(self, shape: tuple[int, ...], size: int) -> str | None:
        """Return why a linear layer is not worth storing as integers: padded, they take as much as BF16."""
        bits = 8 * stored_bytes(self.rounding(shape, size).specs("weight", shape)) / math.prod(shape)
        if bits < TOO_MANY_BITS:
            return None
        return (
            f"rows of {shape[1]} weights, padded to {tile_shape(shape)[1]}, would take {bits:.4g} bits a weight; "
            "--packing plain pads nothing"
        )

    def tensor(self, shape: tuple[int, ...], size: int) -> dict[str, Any]:
        """Return what torchao rebuilds the tensor of a weight from."""
        data: dict[str, Any] = {"block_size": [1, size], "shape": list(shape)}
        if self.packing == TILE:
            return _tensor("Int4TilePackedTo4dTensor", data, "qdata", "scale_and_zero")
        return _tensor("Int4Tensor", data | {"activation_dtype": BF16}, "qdata", "scale", "zero_point")

    def config(self, size: int) -> dict[str, Any]:
        """Return what torchao's config_to_dict returns of weights in groups of a size."""
        settings = {
            "group_size": size,
            "set_inductor_config": True,
            "int4_packing_format": {"_type": "Int4PackingFormat", "_data": self.packing.upper()},
            "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "TINYGEMM"},
            "int4_tile_packed_ntile": TILE_ROWS,
        }
        return {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": settings}


@dataclass(frozen=True)
class Rows:
    """Eight bits with a scale for each row: see LinearFormat.

    floats: whether they are E4M3, and no integers
    activations: whether the runtime also rounds what layers read, by what it finds there
    """

    floats: bool = False
    activations: bool = False

    groups = GroupSize(target=NAME, allowed=CHANNEL, asked=None)

    def rounding(self, shape: tuple[int, ...], size: int) -> Rounding:
        """Return how a weight is rounded."""
        length, name = shape[-1], "compressed-tensors"  # torchao's rule is the same, but for the rounding of scales
        if self.floats:
            return Rounding(FloatRule("fp8", 8, length, name), "fp8-rows", label="fp8-channel")
        rule: Rule = GroupRule(bits=8, group_size=length, symmetric=True, middle=True, rule=name)
        return Rounding(rule, "int8-rows", label="symmetric-channel")

    def why_not(self, shape: tuple[int, ...], size: int) -> str | None:
        """Return None: every linear layer can be stored so."""
        return None

    def tensor(self, shape: tuple[int, ...], size: int) -> dict[str, Any]:
        """Return what torchao rebuilds the tensor of a weight from."""
        data: dict[str, Any] = {"block_size": [1, shape[1]], "dtype": BF16, "act_quant_kwargs": None}
        if self.floats:
            data |= {"mm_config": None, "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"}}
            return _tensor("Float8Tensor", data, "qdata", "scale")
        if self.activations:
            by_token = {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}, "mapping_type": SYMMETRIC}
            data["act_quant_kwargs"] = {
                "_type": "QuantizeTensorToInt8Kwargs",
                "_data": by_token | {"reduce_range": False},
            }
        return _tensor("Int8Tensor", data | {"reduce_range": False}, "zero_point", "qdata", "scale")

    def config(self, size: int) -> dict[str, Any]:
        """Return what torchao's config_to_dict returns."""
        settings: dict[str, Any] = {"granularity": PER_ROW, "set_inductor_config": True}
        if self.floats:
            dtype = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
            return {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": settings | {"weight_dtype": dtype}}
        if not self.activations:
            return {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": settings | {"group_size": None}}
        settings |= {"act_mapping_type": SYMMETRIC, "weight_only_decode": False, "reduce_range": False}
        return {"_type": "Int8DynamicActivationInt8WeightConfig", "_version": 2, "_data": settings}


def _tensor(name: str, data: dict[str, Any], *parts: str) -> dict[str, Any]:
    return {"_type": name, "_data": data, "_tensor_data_names": list(parts)}


# By name; int8 and fp8 are of weights alone, int8-dynamic also rounds what layers read. torchao's FP8 with rounded
# inputs is missing: it does not load without a GPU.
OF_ROWS = {"int8": Rows(), "int8-dynamic": Rows(activations=True), "fp8": Rows(floats=True)}
INT4 = "int4"
FORMATS = (INT4, *OF_ROWS)


@dataclass(frozen=True, kw_only=True)
class TorchaoFormat:
    """The format with its options: see ExportOptions."""

    name: str
    int4: Int4
    recipe: Recipe = NOTHING

    @property
    def formats(self) -> dict[str, Int4 | Rows]:
        """All formats, the default first."""
        formats: dict[str, Int4 | Rows] = {INT4: self.int4, **OF_ROWS}
        return {self.name: formats[self.name], **formats}

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the target and its options."""
        stated: dict[str, Any] = {"target": NAME, "format": self.name, "bits": 4 if self.name == INT4 else 8}
        if self.name == INT4:
            stated |= {"packing": self.int4.packing, "group_size": self.int4.groups.size, "qparams": self.int4.qparams}
        return stated | describe(self.recipe)

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """Decide which linear layers become integers; names and shapes are those of the source."""
        formats: dict[str, LinearFormat] = {**self.formats}
        ladder = tuple(dict.fromkeys([self.name, INT4, "int8"]))
        rules = LinearRules(target=NAME, formats=formats, ladder=ladder, recipe=self.recipe, experts=EXPERTS)
        linear = linear_weights(checkpoint, rules)
        quantization = {
            "quant_method": "torchao",
            "quant_type": {"default": self._quant_type(linear.chosen)},
            "modules_to_not_convert": None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }
        return linear.outline(
            checkpoint,
            quantization=quantization,
            metadata=self._metadata(checkpoint, linear.chosen),
            warnings=self._padding_warnings(checkpoint, linear.chosen),
        )

    def _metadata(self, checkpoint: Checkpoint, chosen: Mapping[str, Chosen]) -> dict[str, str]:
        """The metadata from which torchao rebuilds its tensors. chosen: of the weights that are rounded."""
        result = {"format": "pt"}
        names = []
        config = checkpoint.config or {}
        has_vision, model = "vision_config" in config, described(config.get("model_type"))
        for tensor in checkpoint.tensors:
            if tensor.name not in chosen:
                continue
            choice = chosen[tensor.name]
            rebuilt = json.dumps(self.formats[choice.format].tensor(tensor.shape, choice.size))
            for name in names_in_memory(tensor.name, has_vision, model):
                result[name] = rebuilt
                names.append(name)
        return result | {"tensor_names": json.dumps(names)}

    def _quant_type(self, chosen: Mapping[str, Chosen]) -> dict[str, Any]:
        """What torchao's config_to_dict returns: for one format in one group size its configuration, else one by layer.

        transformers reads the size of each weight from the metadata of the files.
        """
        by_layer = {name: (choice.format, choice.size) for name, choice in chosen.items()}
        different = sorted(set(by_layer.values()), key=lambda pair: (-pair[1], pair[0]))
        configs = {pair: self.formats[pair[0]].config(pair[1]) for pair in different}
        if len(different) == 1:
            return configs[different[0]]
        layers: dict[str, Any] = {}
        for pair, config in configs.items():
            own = [name for name in by_layer if by_layer[name] == pair]
            others = [name for name in by_layer if by_layer[name] != pair]
            layers |= dict.fromkeys(patterns(own, others), config)
        data = {"fqn_to_config": layers, "module_fqn_to_config": layers}
        return {"_type": "FqnToConfig", "_version": 1, "_data": data}

    def _padding_warnings(self, checkpoint: Checkpoint, chosen: Mapping[str, Chosen]) -> tuple[str, ...]:
        """Return a warning if the other packing would save a good share of the integers."""
        sizes = {name: choice.size for name, choice in chosen.items() if choice.format == INT4}
        rounded = [(t, self.int4.rounding(t.shape, sizes[t.name])) for t in checkpoint.tensors if t.name in sizes]
        stored = sum(stored_bytes(rounding.specs(t.name, t.shape)) for t, rounding in rounded)
        least = sum(
            stored_bytes(replace(rounding, layout="int4-plain").specs(t.name, t.shape)) for t, rounding in rounded
        )
        if not stored or 1 - least / stored < WORTH_A_WARNING:
            return ()
        return (
            f"--packing {TILE} pads rows to a multiple of {PADDED_COLUMNS} weights: --packing plain, which also needs "
            f"the package mslk, would make the integers {1 - least / stored:.0%} smaller",
        )


def read_options(options: ExportOptions) -> TorchaoFormat:
    """Return the format. Raises OptionError for an option that it does not have."""
    name = one_of(NAME, "format", options.format, allowed=FORMATS)
    bits = 4 if name == INT4 else 8
    if options.bits not in (None, bits):
        raise OptionError(f"`bits` {options.bits}: the format {name} has {bits}")
    if name != INT4:
        for option in ("packing", "group_size", "qparams"):
            if getattr(options, option) is not None:
                raise OptionError(f"`{option}`: the format {name} does not take this option")
    check_rounding(NAME, options, why_not=None if name == INT4 else f"expected `format` {INT4}, found {name}")
    int4 = Int4(
        packing=one_of(NAME, "packing", options.packing, allowed=(TILE, UNTILED)),
        groups=GroupSize.of(NAME, GROUP_SIZES, options.group_size),
        qparams=one_of(NAME, "qparams", options.qparams, allowed=(BEST, MINMAX)),
    )
    return TorchaoFormat(name=name, int4=int4, recipe=recipe_of(options, FORMATS))


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    if made_by.get("bits") == 8:
        return ["For PyTorch, on a CPU or a GPU.", *by_transformers(model, "torch transformers accelerate torchao")]
    needs = "PyTorch on CUDA, on a GPU of compute capability 8.0 or newer"
    packages = "torch transformers accelerate torchao"
    if made_by.get("packing") == UNTILED:
        needs += ", with the package mslk"
        packages += " mslk"
    return [f"For {needs}.", *by_transformers(model, packages, ', device_map="cuda"')]


def _bits(name: str, *, packing: str | None = None) -> float:
    """Return the bits of a weight of a usual layer."""
    layer = read_options(ExportOptions(format=name, packing=packing)).formats[name]
    return stored_bits(layer.rounding(USUAL_SHAPE, layer.groups.size))


TARGET = ExportTarget(
    name=NAME,
    runtime=TORCHAO,
    tags=("torchao",),
    options=("packing", *RECIPE_OPTIONS, *INTEGER_OPTIONS),
    account=("rules",),
    read_options=read_options,
    plan=plan_integers,
    check=lambda checkpoint, settings: settings.outline(one_of_each(checkpoint)),
    load_section=_load_section,
    choices=(
        *(FormatChoice(name, ExportOptions(format=name), _bits(name)) for name in FORMATS),
        FormatChoice("int4, plain", ExportOptions(packing=UNTILED), _bits(INT4, packing=UNTILED)),
    ),
    plain_roles=("embedding", "lm_head", "expert"),
)
