"""The torchao-int4 target: weights of linear layers in 4 bits, loaded by transformers with torchao.

The layouts are those of torchao 0.18 (quantization/quantize_/workflows/int4), and the safetensors metadata, from which
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
from pqweights.exports.architectures import names_in_memory
from pqweights.exports.formats import PADDED_COLUMNS, TILE_ROWS, Rounding, tile_shape
from pqweights.exports.integers import Outline
from pqweights.exports.linear import LinearRules, linear_weights, patterns
from pqweights.exports.loading import LoadableModel, by_transformers
from pqweights.exports.original import integer_export
from pqweights.exports.target import (
    BEST,
    INTEGER_OPTIONS,
    MINMAX,
    TORCHAO,
    ExportTarget,
    FormatChoice,
    GroupSize,
    check_rounding,
    one_of,
)
from pqweights.kernels.groups import GroupRule
from pqweights.options import ExportOptions
from pqweights.planning.plan import stored_bytes

NAME = "torchao-int4"
TILE, UNTILED = "tile_packed_to_4d", "plain"
GROUP_SIZES = (128, 64, 32, 256)
# A layer that would take this many bits a weight, as many as in BF16, stays plain.
TOO_MANY_BITS = 16
# The share of the integers that the other packing must save before a user is told of it.
WORTH_A_WARNING = 0.1
# Why single experts stay plain.
EXPERTS = "transformers stacks experts as it loads them, which torchao's tensors cannot be"


@dataclass(frozen=True, kw_only=True)
class TorchaoInt4:
    """The format with its options: see ExportOptions."""

    packing: str
    groups: GroupSize
    qparams: str

    compares_master = True

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the target and its options."""
        stated = {"target": NAME, "packing": self.packing, "bits": 4}
        return stated | {"group_size": self.groups.size, "qparams": self.qparams}

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """Decide which linear layers become integers; names and shapes are those of the source."""
        rules = LinearRules(groups=self.groups, experts=EXPERTS, too_large=self._too_large)
        linear = linear_weights(checkpoint, rules)
        quantization = {
            "quant_method": "torchao",
            "quant_type": {"default": self._quant_type(linear.sizes)},
            "modules_to_not_convert": None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }
        return linear.outline(
            checkpoint,
            lambda tensor, size: self._rounding(size),
            quantization=quantization,
            metadata=self._metadata(checkpoint, linear.sizes),
            warnings=self._padding_warnings(checkpoint, linear.sizes),
        )

    def _rounding(self, size: int) -> Rounding:
        """How weights are rounded in groups of a size."""
        name = BEST if self.qparams == BEST else "torchao"
        rule = GroupRule(bits=4, group_size=size, symmetric=False, middle=True, rule=name)
        return Rounding(rule, "int4-tiles" if self.packing == TILE else "int4-plain")

    def _metadata(self, checkpoint: Checkpoint, sizes: Mapping[str, int]) -> dict[str, str]:
        """The metadata from which torchao rebuilds its tensors. sizes: of the weights that are rounded."""
        result = {"format": "pt"}
        names = []
        has_vision = "vision_config" in (checkpoint.config or {})
        for tensor in checkpoint.tensors:
            if tensor.name not in sizes:
                continue
            data: dict[str, Any] = {"block_size": [1, sizes[tensor.name]], "shape": list(tensor.shape)}
            if self.packing == TILE:
                tensor_class, parts = "Int4TilePackedTo4dTensor", ["qdata", "scale_and_zero"]
            else:
                tensor_class, parts = "Int4Tensor", ["qdata", "scale", "zero_point"]
                data["activation_dtype"] = {"_type": "torch.dtype", "_data": "bfloat16"}
            for name in names_in_memory(tensor.name, has_vision):
                result[name] = json.dumps({"_type": tensor_class, "_data": data, "_tensor_data_names": parts})
                names.append(name)
        return result | {"tensor_names": json.dumps(names)}

    def _quant_type(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """What torchao's config_to_dict returns: for one group size an Int4WeightOnlyConfig, else one for each layer.

        transformers reads the size of each weight from the metadata of the files.
        """
        different = sorted(set(sizes.values()), reverse=True)
        if len(different) == 1:
            return self._weight_only(different[0])
        layers: dict[str, Any] = {}
        for size in different:
            own = [name for name in sizes if sizes[name] == size]
            others = [name for name in sizes if sizes[name] != size]
            layers |= dict.fromkeys(patterns(own, others), self._weight_only(size))
        data = {"fqn_to_config": layers, "module_fqn_to_config": layers}
        return {"_type": "FqnToConfig", "_version": 1, "_data": data}

    def _weight_only(self, size: int) -> dict[str, Any]:
        """The configuration of weights in groups of a size."""
        settings = {
            "group_size": size,
            "set_inductor_config": True,
            "int4_packing_format": {"_type": "Int4PackingFormat", "_data": self.packing.upper()},
            "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "TINYGEMM"},
            "int4_tile_packed_ntile": TILE_ROWS,
        }
        return {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": settings}

    def _too_large(self, shape: tuple[int, ...], size: int) -> str | None:
        """Return why a linear layer is not worth storing as integers: padded, they take as much as BF16."""
        bits = 8 * stored_bytes(self._rounding(size).specs("weight", shape)) / math.prod(shape)
        if bits < TOO_MANY_BITS:
            return None
        return (
            f"rows of {shape[1]} weights, padded to {tile_shape(shape)[1]}, would take {bits:.4g} bits a weight; "
            "--packing plain pads nothing"
        )

    def _padding_warnings(self, checkpoint: Checkpoint, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return a warning if the other packing would save a good share of the integers."""
        rounded = [(t, self._rounding(sizes[t.name])) for t in checkpoint.tensors if t.name in sizes]
        stored = sum(stored_bytes(rounding.specs(t.name, t.shape)) for t, rounding in rounded)
        least = sum(
            stored_bytes(replace(rounding, layout="int4-plain").specs(t.name, t.shape)) for t, rounding in rounded
        )
        if 1 - least / stored < WORTH_A_WARNING:
            return ()
        return (
            f"--packing {TILE} pads rows to a multiple of {PADDED_COLUMNS} weights: --packing plain, which also needs "
            f"the package mslk, would make the integers {1 - least / stored:.0%} smaller",
        )


def read_options(options: ExportOptions) -> TorchaoInt4:
    """Return the format. Raises OptionError for an option that it does not have."""
    check_rounding(NAME, options)
    one_of(NAME, "bits", options.bits, allowed=(4,))
    return TorchaoInt4(
        packing=one_of(NAME, "packing", options.packing, allowed=(TILE, UNTILED)),
        groups=GroupSize.of(NAME, GROUP_SIZES, options.group_size),
        qparams=one_of(NAME, "qparams", options.qparams, allowed=(BEST, MINMAX)),
    )


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
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
    options=("packing", *INTEGER_OPTIONS),
    read_options=read_options,
    prepare=integer_export,
    check=lambda master, settings: settings.outline(master.layers),
    load_section=_load_section,
    choices=(FormatChoice("int4", ExportOptions()), FormatChoice("int4, plain", ExportOptions(packing=UNTILED))),
)
