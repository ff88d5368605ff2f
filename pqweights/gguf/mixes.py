"""Which type each tensor of a GGUF file gets: types alone, and llama.cpp's mixes, which store some tensors wider.

The mixes are those of llama.cpp (src/llama-quant.cpp), so that a file of that name has the size that users expect.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pqweights.errors import OptionError
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.suggestions import instead

# Types without blocks, by the names that GGUF and safetensors share.
PLAIN_TYPES = ("F32", "F16", "BF16")
# What llama.cpp stores where a type's blocks do not divide the rows of a tensor; and where its fallback's do not.
FALLBACKS = {"IQ4_XS": "IQ4_NL", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
LAST_FALLBACK = "F16"

# Kinds of tensors, told by their names.
OUTPUT, EMBEDDING, VALUES, KEYS, ATTENTION_OUTPUT, DOWN = "output", "embedding", "values", "keys", "attn_output", "down"
_KINDS = (
    (OUTPUT, re.compile(r"output\.weight")),
    (EMBEDDING, re.compile(r"(per_layer_)?token_embd\.weight")),
    (VALUES, re.compile(r".*attn_(v|qkv|kv_b)\.weight")),
    (KEYS, re.compile(r".*attn_k\.weight")),
    (ATTENTION_OUTPUT, re.compile(r".*attn_output\.weight")),
    (DOWN, re.compile(r".*ffn_down.*")),
)
# Matrices that llama.cpp never quantizes: they are small, or no matrices of products.
_NEVER = re.compile(
    r".*(_norm\.weight|ffn_gate_inp(_shexp)?\.weight|altup.*|laurel.*|per_layer_model_proj.*|ssm_conv1d.*|shortconv\.conv\.weight"
    r"|attn_rel_b\.weight|position_embd.*|token_types\.weight|time_mix_(first|decay_w[12]|lerp_fused|[wva][012]|g[12])\.weight)"
)
_LAYER = re.compile(r"blk\.(\d+)\.")


class Shape(NamedTuple):
    """What of a model the mixes depend on.

    layers: how many there are
    shared: how many heads share keys and values
    experts: how many there are; 0 without
    tied: whether the output has no weights of its own
    large: whether it has 80 layers and shared keys and values, where llama.cpp stores values wider
    imatrix: whether importances are known
    """

    layers: int
    shared: int
    experts: int
    tied: bool
    large: bool
    imatrix: bool


Condition = Callable[[int, Shape], bool]


def _more(layer: int, shape: Shape) -> bool:
    """Whether a layer is among the first and the last eighths, or every third between them."""
    eighth = shape.layers // 8
    return layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2


def _always(layer: int, shape: Shape) -> bool:
    return True


def _shared(layer: int, shape: Shape) -> bool:
    return shape.shared >= 4


def _below(count: int, layer: int, shape: Shape) -> bool:
    return layer < count


def _in_first_share(parts: int, layer: int, shape: Shape) -> bool:
    return layer < shape.layers // parts


# Both can be pickled, so that a mix can be sent to other processes.
def _first(count: int) -> Condition:
    return functools.partial(_below, count)


def _first_share(parts: int) -> Condition:
    return functools.partial(_in_first_share, parts)


def _first_eighth_by_guess(layer: int, shape: Shape) -> bool:
    return layer < shape.layers // 8 and not shape.imatrix


def _first_eighth_by_imatrix(layer: int, shape: Shape) -> bool:
    return layer < shape.layers // 8 and shape.imatrix


class WiderType(NamedTuple):
    """A kind of tensor that gets another type than most, in some layers."""

    kind: str
    condition: Condition
    type: str


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A choice of types.

    name: what users call it
    file_type: what GGUF calls it, of gguf.LlamaFileType
    type: the type of most tensors
    wider: the others; the first that holds for a tensor decides
    pure: whether all tensors get the one type
    """

    name: str
    file_type: str
    type: str
    wider: tuple[WiderType, ...] = ()
    pure: bool = False

    def type_of(self, name: str, shape: tuple[int, ...], model: Shape) -> str:
        """Return the type that a tensor should get, before it is known whether its rows fit."""
        if not may_be_quantized(name, shape):
            return "F32"
        if self.pure or self.type in PLAIN_TYPES:
            return self.type
        kind = kind_of(name)
        if kind == OUTPUT or (kind == EMBEDDING and model.tied):
            whole = shape[-1] % BLOCK_TYPES[self.type].block_size == 0
            return "Q6_K" if whole and self.type != "Q8_0" else "Q8_0"
        return self._in_layer(kind, name, model)

    def _in_layer(self, kind: str | None, name: str, model: Shape) -> str:
        found = _LAYER.match(name)
        layer = int(found[1]) if found else 0
        eight = model.experts == 8
        if eight and kind in (VALUES, KEYS):
            return "Q8_0"
        if eight and kind == ATTENTION_OUTPUT:
            return "Q5_K" if self.name in _WIDE_OUTPUT_OF_EIGHT else self.type
        wider = (each.type for each in self.wider if each.kind == kind and each.condition(layer, model))
        chosen = next(wider, self.type)
        return "Q5_K" if model.large and kind == VALUES and chosen in ("Q3_K", "Q4_K") else chosen


_WIDE_OUTPUT_OF_EIGHT = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")


def _wider(*rules: tuple[str, Condition, str]) -> tuple[WiderType, ...]:
    return tuple(WiderType(*rule) for rule in rules)


_IQ4 = _wider((VALUES, _shared, "Q5_K"), (DOWN, _first_eighth_by_guess, "Q5_K"))
_MORE = _wider((VALUES, _more, "Q6_K"), (DOWN, _more, "Q6_K"))

MIXES = {
    mix.name: mix
    for mix in (
        Mix(name="F32", file_type="ALL_F32", type="F32"),
        Mix(name="F16", file_type="MOSTLY_F16", type="F16"),
        Mix(name="BF16", file_type="MOSTLY_BF16", type="BF16"),
        Mix(name="Q8_0", file_type="MOSTLY_Q8_0", type="Q8_0"),
        Mix(name="Q6_K", file_type="MOSTLY_Q6_K", type="Q6_K"),
        Mix(name="Q5_K_M", file_type="MOSTLY_Q5_K_M", type="Q5_K", wider=_MORE),
        Mix(name="Q5_K_S", file_type="MOSTLY_Q5_K_S", type="Q5_K"),
        Mix(name="Q5_1", file_type="MOSTLY_Q5_1", type="Q5_1"),
        Mix(
            name="Q5_0",
            file_type="MOSTLY_Q5_0",
            type="Q5_0",
            wider=_wider((DOWN, _first_eighth_by_imatrix, "Q5_1")),
        ),
        Mix(name="Q4_K_M", file_type="MOSTLY_Q4_K_M", type="Q4_K", wider=_MORE),
        Mix(
            name="Q4_K_S",
            file_type="MOSTLY_Q4_K_S",
            type="Q4_K",
            wider=_wider((VALUES, _first(4), "Q5_K"), (DOWN, _first_share(8), "Q5_K")),
        ),
        Mix(name="Q4_1", file_type="MOSTLY_Q4_1", type="Q4_1"),
        Mix(
            name="Q4_0",
            file_type="MOSTLY_Q4_0",
            type="Q4_0",
            wider=_wider((DOWN, _first_eighth_by_imatrix, "Q4_1")),
        ),
        Mix(name="IQ4_NL", file_type="MOSTLY_IQ4_NL", type="IQ4_NL", wider=_IQ4),
        Mix(name="IQ4_XS", file_type="MOSTLY_IQ4_XS", type="IQ4_XS", wider=_IQ4),
        Mix(
            name="Q3_K_L",
            file_type="MOSTLY_Q3_K_L",
            type="Q3_K",
            wider=_wider((VALUES, _always, "Q5_K"), (DOWN, _always, "Q5_K"), (ATTENTION_OUTPUT, _always, "Q5_K")),
        ),
        Mix(
            name="Q3_K_M",
            file_type="MOSTLY_Q3_K_M",
            type="Q3_K",
            wider=_wider(
                (VALUES, _first(2), "Q5_K"),
                (VALUES, _always, "Q4_K"),
                (DOWN, _first_share(16), "Q5_K"),
                (DOWN, _always, "Q4_K"),
                (ATTENTION_OUTPUT, _always, "Q4_K"),
            ),
        ),
        Mix(name="Q3_K_S", file_type="MOSTLY_Q3_K_S", type="Q3_K"),
        Mix(
            name="Q2_K",
            file_type="MOSTLY_Q2_K",
            type="Q2_K",
            wider=_wider(
                (VALUES, _shared, "Q4_K"),
                (VALUES, _always, "Q3_K"),
                (DOWN, _always, "Q3_K"),
                (ATTENTION_OUTPUT, _always, "Q3_K"),
            ),
        ),
        Mix(
            name="Q2_K_S",
            file_type="MOSTLY_Q2_K_S",
            type="Q2_K",
            wider=_wider((VALUES, _shared, "Q4_K"), (DOWN, _first_share(8), "Q4_K")),
        ),
    )
}
# Names of types that are no mixes: as in llama.cpp, they stand for the mix of middle size.
ALIASES: Mapping[str, str] = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def find_mix(asked: str) -> Mix:
    """Return the mix of a name, in whatever case.

    Raises OptionError for an unknown one; the message names the nearest.
    """
    name = asked.upper()
    if name not in MIXES and name not in ALIASES:
        raise OptionError(f"`type` {asked}: {instead(name, [*MIXES, *ALIASES])}")
    return MIXES[ALIASES.get(name, name)]


def find_type(where: str, asked: str) -> str:
    """Return the name of a type of tensors, as GGUF spells it.

    Raises OptionError for an unknown one; the message begins with `where`.
    """
    name = asked.upper()
    if name not in BLOCK_TYPES and name not in PLAIN_TYPES:
        raise OptionError(f"{where}: {instead(name, [*BLOCK_TYPES, *PLAIN_TYPES])}")
    return name


def kind_of(name: str) -> str | None:
    """Return the kind of a tensor, by its name in the file; None for one that the mixes do not tell apart."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), None)


def may_be_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp would quantize a tensor; what it would not is stored as F32."""
    return len(shape) >= 2 and name.endswith("weight") and _NEVER.fullmatch(name) is None


def fitting_type(wanted: str, columns: int) -> str:
    """Return the type that a tensor with rows of `columns` weights gets: the wanted one, or llama.cpp's fallback."""
    for name in (wanted, FALLBACKS.get(wanted, LAST_FALLBACK)):
        if name in PLAIN_TYPES or columns % BLOCK_TYPES[name].block_size == 0:
            return name
    return LAST_FALLBACK
