"""The formats of the vllm target, by name: rows of one table.

Formats: compressed-tensors (https://github.com/vllm-project/compressed-tensors, its presets in quant_scheme.py), the
OCP microscaling formats specification 1.0 (mxfp4, mxfp8), and NVIDIA's NVFP4. docs/formats.md says how to add one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pqweights.exports.formats import Rounding, Rule, TileRule
from pqweights.exports.target import BEST, MINMAX, GroupSize
from pqweights.kernels.groups import FloatRule, GroupRule

CHANNEL = (1,)  # any row can be a group
GROUPS, INTEGERS = (128, 64, 32), "pack-quantized"
TILE = (128, 128)


class Dialect(enum.Enum):
    """Whose way of storing weights a format has; the ways do not mix within one export."""

    COMPRESSED_TENSORS = enum.auto()
    FINE_GRAINED_FP8 = enum.auto()
    MODELOPT = enum.auto()


@dataclass(frozen=True)
class WeightScheme:
    """A format.

    bits: the width of a code
    sizes: the group sizes, the default first; CHANNEL if each row is a group
    layout: how a weight is stored, a key of LAYOUTS
    floats: of which kind the codes are, a key of FLOAT_MODES; None for integers
    activations: whether the runtime also rounds what layers read, by what it finds there
    tile: the rows and columns that share a scale, if not one row does
    called: what compressed-tensors calls the layout, if not by that name
    dialect: whose layout it is
    """

    bits: int
    sizes: tuple[int, ...]
    layout: str
    floats: str | None = None
    activations: bool = False
    tile: tuple[int, int] | None = None
    called: str | None = None
    dialect: Dialect = Dialect.COMPRESSED_TENSORS

    @property
    def format_name(self) -> str:
        """The name that compressed-tensors has for the layout."""
        return self.layout if self.called is None else self.called

    @property
    def rules(self) -> tuple[str, ...]:
        """The values of `qparams`: rows and FP8 have no better scale than that of the largest weight, or hardly."""
        return (MINMAX,) if self.sizes == CHANNEL or self.floats == "fp8" else (BEST, MINMAX)

    @property
    def has_integer_groups(self) -> bool:
        """Whether weights are integers in groups, so that errors can be compensated."""
        return self.floats is None and self.sizes != CHANNEL


# By name, as in compressed-tensors; fp8 is its FP8_DYNAMIC, int8 its W8A8.
SCHEMES = {
    "w4a16": WeightScheme(4, GROUPS, INTEGERS),
    "w8a16": WeightScheme(8, GROUPS, INTEGERS),
    "int8": WeightScheme(8, CHANNEL, "int-quantized", activations=True),
    "fp8": WeightScheme(8, CHANNEL, "float-quantized", "fp8", activations=True),
    "fp8-block": WeightScheme(8, (128,), "float-tiles", "fp8", True, TILE, called="float-quantized"),
    "mxfp4": WeightScheme(4, (32,), "mxfp4-pack-quantized", "mxfp4", activations=True),
    "mxfp4a16": WeightScheme(4, (32,), "mxfp4-pack-quantized", "mxfp4"),
    "mxfp8": WeightScheme(8, (32,), "mxfp8-quantized", "mxfp8", activations=True),
    "mxfp8a16": WeightScheme(8, (32,), "mxfp8-quantized", "mxfp8"),
    "nvfp4": WeightScheme(
        4, (16,), "nvfp4-pack-quantized-inputs", "nvfp4", activations=True, called="nvfp4-pack-quantized"
    ),
    "nvfp4a16": WeightScheme(4, (16,), "nvfp4-pack-quantized", "nvfp4"),
    "fp8-deepseek": WeightScheme(8, (128,), "float-tiles-inverse", "fp8", True, TILE, dialect=Dialect.FINE_GRAINED_FP8),
    "nvfp4-modelopt": WeightScheme(4, (16,), "modelopt-nvfp4", "nvfp4", True, dialect=Dialect.MODELOPT),
}


@dataclass(frozen=True)
class SchemeFormat:
    """A format with its options: see LinearFormat. qparams: BEST, or MINMAX for what compressed-tensors does"""

    scheme: WeightScheme
    groups: GroupSize
    qparams: str

    def rounding(self, shape: tuple[int, ...], size: int) -> Rounding:
        """Return how a weight is rounded in groups of a size."""
        scheme, columns = self.scheme, shape[-1]
        name = BEST if self.qparams == BEST else "compressed-tensors"
        label, length = None, size
        if scheme.sizes == CHANNEL:
            length, label = columns, f"{scheme.floats or 'symmetric'}-channel"
        rule: Rule = GroupRule(bits=scheme.bits, group_size=length, symmetric=True, middle=True, rule=name)
        if scheme.floats is not None:
            rule = FloatRule(scheme.floats, scheme.bits, length, name)
        if scheme.tile is not None:
            rule, label = TileRule(columns), f"{scheme.floats}-{scheme.tile[0]}x{scheme.tile[1]}"
        return Rounding(rule, scheme.layout, label=label)

    def why_not(self, shape: tuple[int, ...], size: int) -> str | None:
        """Return why a weight is not stored so: vLLM cuts fused layers and their shards at whole tiles."""
        if self.scheme.tile is None or shape[0] % self.scheme.tile[0] == 0:
            return None
        return f"tiles of {self.scheme.tile[0]} rows do not divide its {shape[0]} rows"
