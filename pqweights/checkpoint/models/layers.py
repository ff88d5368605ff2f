"""Which modules of a layer read what: the vectors inside of it, by the names of modules relative to the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Which rows of a writer's weight make the vector.
ALL, LAST_HALF, VALUE_HEADS = "all", "last half", "value heads"
_EXPERT = r"mlp\.experts\.(\d+\.)?"


@dataclass(frozen=True)
class NormReaders:
    """A norm, and expressions for the modules that read its output and nothing else.

    repeated: the gain is that of one head, and repeats for each
    never_centred: it multiplies by its weight alone, also in a model with Trait.ZERO_CENTRED_NORMS
    """

    norm: str
    readers: tuple[str, ...]
    repeated: bool = False
    never_centred: bool = False


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
class LayerFlow:
    """Which modules of the layers of some architectures write and read the vectors in between.

    norms, pairs: the vectors, all of whose writers and readers are known
    others: expressions for modules that neither read nor write one of these vectors, or through which no factor can
        pass: norms of queries and keys, norms behind a layer, the parameters of linear attention
    """

    norms: tuple[NormReaders, ...]
    pairs: tuple[WriterReader, ...]
    others: tuple[str, ...] = ()


_VALUES = WriterReader(r"self_attn\.v_proj", r"self_attn\.o_proj", VALUE_HEADS)
LLAMA = LayerFlow(
    norms=(
        NormReaders("input_layernorm", (r"self_attn\.[qkv]_proj",)),
        NormReaders("post_attention_layernorm", (r"mlp\.(gate|up)_proj",)),
    ),
    pairs=(_VALUES, WriterReader(r"mlp\.up_proj", r"mlp\.down_proj")),
    others=(r"self_attn\.(q|k)_norm", r"self_attn\.rotary_emb.*"),
)
# The norms behind attention and MLP have gains, too, but what they write is added to the residual stream.
GEMMA2 = replace(
    LLAMA,
    norms=(LLAMA.norms[0], NormReaders("pre_feedforward_layernorm", (r"mlp\.(gate|up)_proj",))),
    others=(*LLAMA.others, "post_attention_layernorm", "post_feedforward_layernorm"),
)
PHI3 = LayerFlow(
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
QWEN_MOE = replace(
    LLAMA,
    norms=(LLAMA.norms[0], NormReaders("post_attention_layernorm", _EXPERT_READERS)),
    pairs=(*LLAMA.pairs, *_EXPERT_PAIRS),
)
MIXTRAL = replace(
    LLAMA,
    norms=(
        LLAMA.norms[0],
        NormReaders("post_attention_layernorm", (r"block_sparse_moe\.gate", r"block_sparse_moe\.experts\.\d+\.w[13]")),
    ),
    pairs=(_VALUES, WriterReader(r"block_sparse_moe\.experts\.(\d+)\.w3", r"block_sparse_moe\.experts\.(\d+)\.w2")),
)
# Its experts add 1 to what the up half writes, and clamp it: no factor passes.
GPT_OSS = LayerFlow(
    norms=(LLAMA.norms[0], NormReaders("post_attention_layernorm", (r"mlp\.router", r"mlp\.experts\.gate_up_proj"))),
    pairs=(_VALUES,),
    others=(r"self_attn\.sinks", r"mlp\.experts\.(gate_up_proj_bias|down_proj|down_proj_bias)"),
)
# Hybrids: full attention, whose gate multiplies what o_proj reads, or linear attention with a norm of each head.
QWEN3_5 = replace(
    QWEN_MOE,
    norms=(
        NormReaders("input_layernorm", (r"self_attn\.[qkv]_proj", r"linear_attn\.in_proj_(qkvz|qkv|z|ba|b|a)")),
        NormReaders("linear_attn.norm", (r"linear_attn\.out_proj",), repeated=True, never_centred=True),
        QWEN_MOE.norms[1],
    ),
    others=(*QWEN_MOE.others, r"linear_attn\.(A_log|dt_bias|conv1d)"),
)
