"""The vectors of a model between two layers, found by names and shapes: who writes each, and which weights read it.

A factor for each channel of such a vector may be moved: what the writer gives is multiplied, and what a reader takes is
divided by it. For a norm the writer is its gain. FAMILIES says which modules of a layer read what, by the `model_type`
of an architecture; names are those in checkpoints, relative to a layer. A layer with a module that its family does not
list is left as it is, because that module may read one of these vectors, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pqweights.checkpoint.readers import LogicalTensor

# Which rows of a writer's weight make the vector.
ALL, LAST_HALF, VALUE_HEADS = "all", "last half", "value heads"
_EXPERT = r"mlp\.experts\.(\d+\.)?"


@dataclass(frozen=True)
class NormReaders:
    """A norm, and expressions for the modules that read its output and nothing else.

    repeated: the gain is that of one head, and repeats for each
    """

    norm: str
    readers: tuple[str, ...]
    repeated: bool = False


@dataclass(frozen=True)
class WriterReader:
    """A module, and the one that reads a vector which is proportional to its output, channel by channel.

    writer, reader: expressions; a group such as the number of an expert must be the same in both
    rows: which rows of the writer make the vector
    """

    writer: str
    reader: str
    rows: str = ALL


@dataclass(frozen=True, kw_only=True)
class Family:
    """The layers of some architectures.

    norms, pairs: what can be folded
    others: expressions for modules that neither read nor write one of these vectors, or through which no factor can
        pass: norms of queries and keys, norms behind a layer, the parameters of linear attention
    zero_centred: norms multiply by 1 + weight
    """

    norms: tuple[NormReaders, ...]
    pairs: tuple[WriterReader, ...]
    others: tuple[str, ...] = ()
    zero_centred: bool = False


_VALUES = WriterReader(r"self_attn\.v_proj", r"self_attn\.o_proj", VALUE_HEADS)
_LLAMA = Family(
    norms=(
        NormReaders("input_layernorm", (r"self_attn\.[qkv]_proj",)),
        NormReaders("post_attention_layernorm", (r"mlp\.(gate|up)_proj",)),
    ),
    pairs=(_VALUES, WriterReader(r"mlp\.up_proj", r"mlp\.down_proj")),
    others=(r"self_attn\.(q|k)_norm", r"self_attn\.rotary_emb.*"),
)
_GEMMA = replace(_LLAMA, zero_centred=True)
# The norms behind attention and MLP have gains, too, but what they write is added to the residual stream.
_GEMMA2 = replace(
    _GEMMA,
    norms=(_LLAMA.norms[0], NormReaders("pre_feedforward_layernorm", (r"mlp\.(gate|up)_proj",))),
    others=(*_LLAMA.others, "post_attention_layernorm", "post_feedforward_layernorm"),
)
_PHI3 = Family(
    norms=(
        NormReaders("input_layernorm", (r"self_attn\.qkv_proj",)),
        NormReaders("post_attention_layernorm", (r"mlp\.gate_up_proj",)),
    ),
    pairs=(
        WriterReader(r"self_attn\.qkv_proj", r"self_attn\.o_proj", VALUE_HEADS),
        WriterReader(r"mlp\.gate_up_proj", r"mlp\.down_proj", LAST_HALF),
    ),
)
_EXPERT_PAIRS = (
    WriterReader(rf"{_EXPERT}up_proj", rf"{_EXPERT}down_proj"),
    WriterReader(rf"{_EXPERT}gate_up_proj", rf"{_EXPERT}down_proj", LAST_HALF),
    WriterReader(r"mlp\.shared_experts?\.up_proj", r"mlp\.shared_experts?\.down_proj"),
)
# Some layers of a mixture may have an ordinary MLP.
_EXPERT_READERS = (
    r"mlp\.gate",
    r"mlp\.shared_expert_gate",
    r"mlp\.shared_experts?\.(gate|up)_proj",
    rf"{_EXPERT}(gate|up|gate_up)_proj",
    r"mlp\.(gate|up)_proj",
)
_QWEN_MOE = replace(
    _LLAMA,
    norms=(_LLAMA.norms[0], NormReaders("post_attention_layernorm", _EXPERT_READERS)),
    pairs=(*_LLAMA.pairs, *_EXPERT_PAIRS),
)
_MIXTRAL = replace(
    _LLAMA,
    norms=(
        _LLAMA.norms[0],
        NormReaders("post_attention_layernorm", (r"block_sparse_moe\.gate", r"block_sparse_moe\.experts\.\d+\.w[13]")),
    ),
    pairs=(_VALUES, WriterReader(r"block_sparse_moe\.experts\.(\d+)\.w3", r"block_sparse_moe\.experts\.(\d+)\.w2")),
)
# Its experts add 1 to what the up half writes, and clamp it: no factor passes.
_GPT_OSS = Family(
    norms=(_LLAMA.norms[0], NormReaders("post_attention_layernorm", (r"mlp\.router", r"mlp\.experts\.gate_up_proj"))),
    pairs=(_VALUES,),
    others=(r"self_attn\.sinks", r"mlp\.experts\.(gate_up_proj_bias|down_proj|down_proj_bias)"),
)
# Hybrids: full attention, whose gate multiplies what o_proj reads, or linear attention with a norm of each head.
_QWEN3_5 = replace(
    _QWEN_MOE,
    zero_centred=True,
    norms=(
        NormReaders("input_layernorm", (r"self_attn\.[qkv]_proj", r"linear_attn\.in_proj_(qkvz|qkv|z|ba|b|a)")),
        NormReaders("linear_attn.norm", (r"linear_attn\.out_proj",), repeated=True),
        _QWEN_MOE.norms[1],
    ),
    others=(*_QWEN_MOE.others, r"linear_attn\.(A_log|dt_bias|conv1d)"),
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi3": _PHI3,
    "qwen3_moe": _QWEN_MOE,
    "mixtral": _MIXTRAL,
    "gpt_oss": _GPT_OSS,
    "qwen3_next": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
# The norm of a head of linear attention multiplies by its weight alone.
NOT_CENTRED = frozenset({"linear_attn.norm"})


LAYER = re.compile(r"((?:|model\.|model\.language_model\.|language_model\.model\.)layers\.)(\d+)\.(.+)")
COLUMNS, ROWS = -1, -2


@dataclass(frozen=True, kw_only=True)
class Side:
    """The part of a tensor that writes or reads a vector.

    tensor: its name
    axis: COLUMNS for the last dimension, ROWS for the one before it
    first, count: which positions along that axis
    repeats, width: position i holds channel i // (repeats * width) * width + i % width of the vector
    stacked: whether each matrix of a stack has a vector of its own
    """

    tensor: str
    axis: int
    count: int
    width: int
    first: int = 0
    repeats: int = 1
    stacked: bool = False

    @property
    def channels(self) -> int:
        """The channels of the vector."""
        return self.count // self.repeats


@dataclass(frozen=True, kw_only=True)
class Link:
    """A vector between layers.

    name: the norm, or the module that writes it
    norm: the norm's weight, if a norm writes it
    zero_centred: whether that norm multiplies by 1 + weight
    writers: the weights of which rows write it
    vectors: biases that are a part of it
    readers: the weights that read it
    input_norm: the weight of the norm that the writers read, if any, and whether that is zero-centred
    exact: whether the factors must be powers of two, because a tensor that they multiply is stored plainly
    matrices: how many vectors there are, one for each matrix of a stack
    channels: the channels of each vector
    """

    name: str
    norm: str | None
    zero_centred: bool
    writers: tuple[Side, ...]
    vectors: tuple[Side, ...]
    readers: tuple[Side, ...]
    input_norm: tuple[str, bool] | None
    exact: bool
    matrices: int
    channels: int


@dataclass(frozen=True, kw_only=True)
class FoldLinks:
    """All vectors of a model that can be folded.

    links: the vectors
    notes: for each tensor that may be folded, with what
    left: what is left as it is, by the reason: names
    unfolded: why nothing is; empty if something is
    """

    links: tuple[Link, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unfolded: str = ""


def family_of(config: Mapping[str, Any] | None) -> Family | None:
    """Return the family of a model; None for an unknown one."""
    return next((FAMILIES[name] for name in model_types(config or {}) if name in FAMILIES), None)


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the types that a configuration names: that of the text model last."""
    parts = [config, config.get("text_config")]
    return [str(part["model_type"]) for part in parts if isinstance(part, Mapping) and "model_type" in part]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. prefix: of its names. tensors: by module and by "weight", "bias", or "" for a parameter itself."""

    prefix: str
    modules: dict[str, dict[str, LogicalTensor]]

    def weight(self, module: str) -> LogicalTensor | None:
        """Return the weight of a module, or the parameter of that name."""
        parameters = self.modules.get(module, {})
        return parameters.get("weight", parameters.get(""))

    def bias(self, module: str) -> LogicalTensor | None:
        """Return the bias of a module."""
        return self.modules.get(module, {}).get("bias")


def layers_of(tensors: Sequence[LogicalTensor]) -> Iterator[Layer]:
    """Yield the layers of a model in the order in which they are met; those of other towers are not layers of it."""
    layers: dict[str, dict[str, dict[str, LogicalTensor]]] = {}
    for tensor in tensors:
        match = LAYER.fullmatch(tensor.name)
        if match is None:
            continue
        prefix, rest = f"{match[1]}{match[2]}.", match[3]
        module, _, last = rest.rpartition(".")
        if last not in ("weight", "bias"):
            module, last = rest, ""
        layers.setdefault(prefix, {}).setdefault(module, {})[last] = tensor
    for prefix, modules in layers.items():
        yield Layer(prefix=prefix, modules=modules)
