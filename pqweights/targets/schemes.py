"""The formats of the vllm target, by name: rows of one table.

Formats: compressed-tensors (https://github.com/vllm-project/compressed-tensors, its presets in quant_scheme.py), the
OCP microscaling formats specification 1.0 (mxfp4, mxfp8), and NVIDIA's NVFP4. docs/formats.md says how to add one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pqweights.kernels.groups import FloatRule, GroupRule
from pqweights.targets.formats import WORD_ROWS, Rounding, Rule, TileRule
from pqweights.targets.target import BEST, MINMAX, GroupSize

CHANNEL = (1,)  # any row can be a group
GROUPS, INTEGERS = (128, 64, 32), "pack-quantized"
TILE = (128, 128)


class Dialect(enum.Enum):
    """Whose way of storing weights a format has; the ways do not mix within one export."""

    COMPRESSED_TENSORS = enum.auto()
    FINE_GRAINED_FP8 = enum.auto()
    MODELOPT = enum.auto()
    AWQ = enum.auto()
    GPTQ = enum.auto()
    GPT_OSS = enum.auto()  # of stacks of experts alone

    @property
    def halves(self) -> bool:
        """Whether scales are F16."""
        return self in (Dialect.AWQ, Dialect.GPTQ)


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
    zeros: whether a group of integers also has the code that stands for 0
    """

    bits: int
    sizes: tuple[int, ...]
    layout: str
    floats: str | None = None
    activations: bool = False
    tile: tuple[int, int] | None = None
    called: str | None = None
    dialect: Dialect = Dialect.COMPRESSED_TENSORS
    zeros: bool = False

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

    @property
    def has_one_size(self) -> bool:
        """Whether the configuration states one group size for all layers."""
        return self.dialect.halves


# By name, as in compressed-tensors; fp8 is its FP8_DYNAMIC, int8 its W8A8.
SCHEMES = {
    "w4a16": WeightScheme(4, GROUPS, INTEGERS),
    "w8a16": WeightScheme(8, GROUPS, INTEGERS),
    "w3a16": WeightScheme(3, GROUPS, INTEGERS),
    "w2a16": WeightScheme(2, GROUPS, INTEGERS),
    "w4a16-asym": WeightScheme(4, GROUPS, "pack-quantized-asym", called=INTEGERS, zeros=True),
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
    "awq": WeightScheme(4, GROUPS, "awq", dialect=Dialect.AWQ, zeros=True),
    "gptq": WeightScheme(4, GROUPS, "gptq", dialect=Dialect.GPTQ),
    "gptq-8": WeightScheme(8, GROUPS, "gptq", dialect=Dialect.GPTQ),
    "mxfp4-gpt-oss": WeightScheme(4, (32,), "mxfp4-blocks", "mxfp4", dialect=Dialect.GPT_OSS),
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
        runtimes = "compressed-tensors-asymmetric" if scheme.zeros else "compressed-tensors"
        name = BEST if self.qparams == BEST else runtimes
        label, length = None, size
        if scheme.sizes == CHANNEL:
            length, label = columns, f"{scheme.floats or 'symmetric'}-channel"
        rule: Rule = GroupRule(
            bits=scheme.bits,
            group_size=length,
            symmetric=not scheme.zeros,
            middle=not scheme.zeros,
            rule=name,
            zeros=scheme.zeros,
            scale_dtype="F16" if scheme.dialect.halves else "BF16",
        )
        if scheme.floats is not None:
            rule = FloatRule(scheme.floats, scheme.bits, length, name)
        if scheme.tile is not None:
            rule, label = TileRule(columns), f"{scheme.floats}-{scheme.tile[0]}x{scheme.tile[1]}"
        return Rounding(rule, scheme.layout, label=label)

    def why_not(self, shape: tuple[int, ...], size: int) -> str | None:
        """Return why a weight is not stored so: vLLM cuts fused layers and their shards at whole tiles, or words."""
        rows = WORD_ROWS if self.scheme.dialect.halves else 1 if self.scheme.tile is None else self.scheme.tile[0]
        return None if shape[0] % rows == 0 else f"tiles of {rows} rows do not divide its {shape[0]} rows"
