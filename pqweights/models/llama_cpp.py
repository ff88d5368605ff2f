"""How llama.cpp runs models: what of their configurations it has to be told, and which values it computes with.

The facts are those of llama.cpp's loaders and graphs (src/models/*.cpp) and of its converter (conversion/*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A hyper-parameter of a GGUF file.

    parameter: its name in the gguf package, whose writer has a method add_{parameter}; of those that the package lacks,
        what its key has behind the name of the architecture, with the dot
    key: the key of the configuration that holds it, or a sum of products of keys and numbers: "a * b / 2 + c"
    real: whether it need not be a whole number
    optional: whether the model may do without it
    truth: whether it is true or false; "key = text" says when it is true
    only: an expression for the kinds of layers (gguf.settings.layer_kinds) that have it; the file has a list for all
    other: what the other layers have, as in key
    zero: whether it is written as 0 if the configuration has none
    of: the enumeration in the gguf package that it is one of
    listed: whether the configuration lists it layer by layer, and the file, too; None is 0
    unread: whether llama.cpp does not read it, and files of other writers say something else
    """

    parameter: str
    key: str
    real: bool = False
    optional: bool = False
    truth: bool = False
    only: str = ""
    other: str = ""
    zero: bool = False
    of: str = ""
    listed: bool = False
    unread: bool = False


class Cut(NamedTuple):
    """How the rows of one module become those of several.

    parts: the modules that get them, with the numbers of the blocks that each consists of; all rows of the first block
        come first
    blocks: the sizes of blocks of rows that follow one another, as in Setting.key
    times: how often the blocks are repeated
    stacked: whether each repetition is a matrix of its own
    turned: the modules whose matrices are transposed
    """

    parts: Mapping[str, tuple[int, ...]]
    blocks: tuple[str, ...]
    times: str = "1"
    stacked: bool = False
    turned: tuple[str, ...] = ()


class Tiled(NamedTuple):
    """Rows or columns of value heads, which llama.cpp wants by their place in a group, not group by group.

    size: that of a head, as in Setting.key
    before: how many rows before them stay in their place
    columns: whether they are columns
    """

    size: str
    before: str = "0"
    columns: bool = False


class Scaled(NamedTuple):
    """Multipliers of the model that llama.cpp expects in the weights.

    by: products of keys, one for each block of rows; "key.2" is the third number of a list
    blocks: the sizes of the blocks, as in Setting.key; without them, all rows are one
    """

    by: tuple[str, ...]
    blocks: tuple[str, ...] = ()


def _real(parameter: str, key: str = "") -> Setting:
    """Return a hyper-parameter that need not be a whole number; by default, its key has the same name."""
    return Setting(parameter, key or parameter, real=True)


# The names of transformers for kinds of layers, in layer_types.
FULL, SLIDING, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
# Rows and columns, as in Setting.key; None where nothing is expected.
Shape = tuple[str | None, str | None]

RMS, LAYER_NORM = _real("layer_norm_rms_eps", "rms_norm_eps"), _real("layer_norm_eps")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How llama.cpp runs a type of model.

    name: its name in gguf.MODEL_ARCH
    label: its name in files, if the package does not have it; name is then that of one with the same tensors
    prefix: an expression for what the names of the checkpoint have before those that the gguf package knows
    unused: an expression for tensors that it does without, by their names without the prefix
    unused_why: the reason
    modules: expressions for modules or parameters of a layer that the gguf package does not know, or whole names
        outside of layers, and the names of those that it does
    tensors: expressions for tensors of a layer, or whole names outside of layers, that the gguf package does not know
        under any name, and their names in the file
    cuts: expressions for modules that it holds as several
    tiled: expressions for modules or parameters with value heads in another order
    scaled: expressions for modules, whole names outside of layers among them, whose weights are multiplied
    norm: the setting of its norms
    settings: the hyper-parameters that it has beside those of all models, or instead of them
    shapes: the rows and columns of tensors, as in gguf.MODEL_TENSOR, where they are not those of SHAPES
    reshaped: the shapes of parameters that it holds with other dimensions
    needed: the tensors outside of layers that it needs beside the embeddings
    layer_types: the kinds of layers that it has, and beside them
    needed_types: those of which it needs at least one
    with_experts: the kind that layers with experts have, and no others
    chosen: to how many tokens a layer attends, which are chosen by scores, as in Setting.key
    chosen_by_flash: whether llama.cpp attends to all tokens without flash attention
    equal: what must be equal, as in Setting.key
    multiples: keys, and the number of which llama.cpp needs a multiple
    uneven: an expression for tensors that not all layers of a kind have
    classes: the ends of the names of transformers' classes with what it computes
    encoder: whether tokens attend to those behind them, too
    pooling: how it makes one vector of those of all tokens, of gguf.PoolingType, whatever stands behind the model
    first_position: the key of the last row of the embeddings of positions that no token has
    variants: how it runs models of which a key is true
    dense: how it runs models of this type without experts, if that differs
    period_key: the key of the period in which one layer has full attention, the others being of a kind without
    interleaved: whether the rows of q and k are to be permuted, because it rotates neighbouring channels
    rope: the kinds of scaled rotary embeddings that it computes
    rotated: how many channels of a head may be rotated
    half_rotated: whether it rotates half of them in layers with full attention, and all in those with a window
    rope_sections: how many frequencies stand for time, height and width, if the configuration does not say
    partial_rope: whether it can rotate a part of them
    free_head_dim: whether heads may be wider or narrower than hidden_size / num_attention_heads
    windows: LAYERS if llama.cpp has sliding windows for it; without them it computes the same for texts that are no
        longer than the model's
    window_listed: whether the file lists the layers with windows in any case
    window_period: the period in which llama.cpp has one layer with full attention, if the file does not say
    first_period: the same where it is the first of each period
    forced_window: with LAYERS, whether llama.cpp has windows even if the file names none
    layers_with_windows: how many layers the only model has for which llama.cpp has windows
    window_base: whether layers with a window may have a base of rotary embeddings of their own
    window_scaled: whether they have the same scaled rotary embeddings as others
    yarn_scales_attention: whether mscale_all_dim of YaRN scales the attention
    yarn_mscale: the only mscale with which it does, if there is one
    temperature: whether it computes llama_4_scaling_beta, by which attention depends on the position
    layers_without: for keys, of how many layers the models are that do without them
    rounds_yarn: whether the model does not round the bounds of YaRN, and users take it that llama.cpp does
    unrotated_period: the period in which llama.cpp has one layer without rotary embeddings; 0: none
    own_head: whether it needs a head although the embeddings are the head
    biases: the tensors, as in gguf.MODEL_TENSOR, of which it also takes a bias
    layers_of_27b: how many layers the 27B model of Gemma has, by which llama.cpp recognizes it: only this model scales
        queries by the width of the model over its heads
    joined_experts: whether gate and up of experts are one tensor
    alternating: whether the rows of gate and up alternate in stacks of experts
    drafts: whether it has room for layers that predict further tokens
    draft_type: the kind that they must have, of draft_layer_types, if they may have others
    folded_drafts: expressions for names of two layers below `mtp` that it takes for one, and what they are called in it
    stated_window: whether earlier versions expect the file to say that there is no sliding window
    values: for keys of the configuration, the values with which the model computes what llama.cpp does
    """

    name: str
    label: str = ""
    prefix: str = ""
    unused: str = ""
    unused_why: str = "not needed for the vectors of tokens"
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    tiled: Mapping[str, Tiled] = field(default_factory=dict)
    scaled: Mapping[str, Scaled] = field(default_factory=dict)
    norm: Setting = RMS
    settings: tuple[Setting, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    reshaped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needed: tuple[str, ...] = ("output_norm.weight",)
    layer_types: frozenset[str] = frozenset({FULL, SLIDING})
    needed_types: frozenset[str] = frozenset()
    with_experts: str = ""
    chosen: str = ""
    chosen_by_flash: bool = False
    equal: tuple[tuple[str, str], ...] = ()
    multiples: Mapping[str, int] = field(default_factory=dict)
    uneven: str = ""
    classes: tuple[str, ...] = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    encoder: bool = False
    pooling: str = ""
    first_position: str = ""
    variants: Mapping[str, Architecture] = field(default_factory=dict)
    dense: Architecture | None = None
    period_key: str = ""
    interleaved: bool = False
    rope: frozenset[str] = frozenset({"default", "linear", "yarn"})
    rotated: str = "head_dim"
    half_rotated: bool = False
    rope_sections: tuple[int, ...] = ()
    partial_rope: bool = False
    free_head_dim: bool = True
    windows: str | None = None
    window_listed: bool = False
    window_period: int = 0
    first_period: int = 0
    forced_window: bool = False
    layers_with_windows: int | None = None
    window_base: bool = True
    window_scaled: bool = False
    yarn_scales_attention: bool = False
    yarn_mscale: float | None = None
    temperature: bool = False
    layers_without: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rounds_yarn: bool = False
    unrotated_period: int = 0
    own_head: bool = False
    biases: frozenset[str] = frozenset()
    layers_of_27b: int | None = None
    joined_experts: bool = False
    alternating: bool = False
    drafts: bool = False
    draft_type: str = ""
    folded_drafts: Mapping[str, str] = field(default_factory=dict)
    stated_window: bool = False
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


# Some layers have a window.
LAYERS = "layers"

SETTINGS = (
    Setting("context_length", "max_position_embeddings"),
    Setting("embedding_length", "hidden_size"),
    Setting("block_count", "block_count"),
    Setting("feed_forward_length", "intermediate_size"),
    Setting("head_count", "num_attention_heads"),
    Setting("head_count_kv", "num_key_value_heads"),
    Setting("key_length", "head_dim"),
    Setting("value_length", "head_dim"),
)
SHAPES: Mapping[str, Shape] = {
    "ATTN_Q": ("num_attention_heads * head_dim", "hidden_size"),
    "ATTN_K": ("num_key_value_heads * head_dim", "hidden_size"),
    "ATTN_V": ("num_key_value_heads * head_dim", "hidden_size"),
    "ATTN_QKV": ("num_attention_heads * head_dim + num_key_value_heads * head_dim * 2", "hidden_size"),
    "ATTN_OUT": ("hidden_size", "num_attention_heads * head_dim"),
    "FFN_GATE": ("intermediate_size", "hidden_size"),
    "FFN_UP": ("intermediate_size", "hidden_size"),
    "FFN_DOWN": ("hidden_size", "intermediate_size"),
    "ATTN_NORM": ("hidden_size", None),
    "FFN_NORM": ("hidden_size", None),
    "OUTPUT_NORM": ("hidden_size", None),
    "TOKEN_EMBD": (None, "hidden_size"),
    "OUTPUT": (None, "hidden_size"),
}
EXPERTS = (Setting("expert_count", "num_experts"), Setting("expert_used_count", "num_experts_per_tok"))
EXPERT_WIDTH = Setting("expert_feed_forward_length", "moe_intermediate_size")

LINEAR = frozenset({"default", "linear"})
QKV = frozenset({"ATTN_Q", "ATTN_K", "ATTN_V"})
NORMS = frozenset({"ATTN_NORM", "FFN_NORM", "OUTPUT_NORM"})
SILU = {"hidden_act": ("silu", "swish")}
ALL_SPARSE = {"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)}

LLAMA = Architecture(
    name="LLAMA",
    interleaved=True,
    rope=frozenset({"default", "linear", "llama3", "yarn", "longrope"}),
    biases=QKV | {"ATTN_OUT", "FFN_GATE", "FFN_UP", "FFN_DOWN"},
    values=SILU,
)
MIXTRAL = replace(LLAMA, settings=EXPERTS)
QWEN2 = Architecture(name="QWEN2", free_head_dim=False, biases=QKV, values=SILU)
QWEN2_MOE = Architecture(
    name="QWEN2MOE",
    settings=(*EXPERTS, EXPERT_WIDTH, Setting("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
    free_head_dim=False,
    own_head=True,
    biases=QKV,
    values=SILU | ALL_SPARSE | {"norm_topk_prob": (False,)},
)
QWEN3 = Architecture(name="QWEN3", biases=QKV, values=SILU)
QWEN3_MOE = Architecture(
    name="QWEN3MOE",
    settings=(*EXPERTS, EXPERT_WIDTH),
    biases=QKV,
    values=SILU | ALL_SPARSE | {"norm_topk_prob": (True,)},
)
# What early configurations of Gemma call gelu is its approximation by tanh, too.
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
QWEN2_VL = replace(QWEN2, name="QWEN2VL", rope_sections=(16, 24, 24))
_DEEPSTACK = Setting("num_deepstack_layers", "deepstack_layers", optional=True)
QWEN3_VL = replace(QWEN3, name="QWEN3VL", settings=(_DEEPSTACK,), rope_sections=(24, 20, 20))
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="QWEN3VLMOE",
    settings=(*QWEN3_MOE.settings, _DEEPSTACK),
    rope_sections=(24, 20, 20),
    values=SILU | ALL_SPARSE,
)
GEMMA = Architecture(
    name="GEMMA",
    values={"hidden_act": (*TANH_GELU, "gelu"), "use_bidirectional_attention": (False, None)},
)
GEMMA2 = Architecture(
    name="GEMMA2",
    settings=(_real("attn_logit_softcapping"), _real("final_logit_softcapping")),
    rope=LINEAR,
    windows=LAYERS,
    window_period=2,
    forced_window=True,
    layers_of_27b=46,
    values={"hidden_activation": TANH_GELU, "use_bidirectional_attention": (False, None)},
)
GEMMA3 = Architecture(
    name="GEMMA3",
    settings=(_real("final_logit_softcapping")._replace(optional=True),),
    rope=LINEAR,
    windows=LAYERS,
    window_period=6,
    layers_of_27b=62,
    values={
        "hidden_activation": TANH_GELU,
        "use_bidirectional_attention": (False, None),
        "attn_logit_softcapping": (None,),
    },
)
# Keys and values of layers with full attention have sizes of their own; the last layers take those of others.
GEMMA4 = Architecture(
    name="GEMMA4",
    modules={
        "layer_scalar": "layer_scalar.weight",
        r"router\.scale": "router.proj.scale",
        r"router\.per_expert_scale": "experts.down_proj.scale",
    },
    settings=(
        Setting("head_count_kv", "global_num_key_value_heads", only=f"{FULL}.*", other="num_key_value_heads"),
        Setting("key_length", "global_head_dim"),
        Setting("value_length", "global_head_dim"),
        Setting("key_length_swa", "head_dim"),
        Setting("value_length_swa", "head_dim"),
        Setting("feed_forward_length", "intermediate_size * mlp_widening", only=".*shared", other="intermediate_size"),
        Setting("shared_kv_layers", "num_kv_shared_layers", zero=True),
        Setting("embedding_length_per_layer_input", "hidden_size_per_layer_input", zero=True),
        *(setting._replace(optional=True) for setting in (*EXPERTS, EXPERT_WIDTH)),
        _real("final_logit_softcapping")._replace(zero=True),
    ),
    shapes=dict.fromkeys(("ATTN_Q", "ATTN_K", "ATTN_V", "ATTN_OUT", "FFN_GATE", "FFN_UP", "FFN_DOWN"), (None, None)),
    rope=frozenset({"default", "proportional"}),
    rotated="global_head_dim",
    partial_rope=True,
    windows=LAYERS,
    window_listed=True,
    joined_experts=True,
    window_period=6,
    values={"hidden_activation": TANH_GELU, "use_bidirectional_attention": (None, False, "vision")},
)
# llama.cpp uses the keys and values of 20 layers, but wants those of all, as published files have them. The first 10
# layers have sparse activations.
GEMMA3N = Architecture(
    name="GEMMA3N",
    modules={r"altup\.correct_output_scale": "altup.correct_output_scale.weight"},
    settings=(
        Setting("altup_active_idx", "altup_active_idx", zero=True),
        Setting("altup_num_inputs", "altup_num_inputs"),
        Setting("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        Setting("shared_kv_layers", "shared_kv_layers", zero=True),
        _real("final_logit_softcapping")._replace(optional=True),
    ),
    rope=frozenset({"default"}),
    windows=LAYERS,
    window_listed=True,
    window_period=5,
    values={
        "hidden_activation": TANH_GELU, "laurel_rank": (64,), "hidden_size_per_layer_input": (256,),
        "altup_num_inputs": (4,), "altup_active_idx": (0,), "altup_correct_scale": (True,), "own_layers": (20,),
        "sparse_layers": (10,), "final_logit_softcapping": (30.0,),
    },
)  # fmt: skip
PHI3 = Architecture(
    name="PHI3",
    rope=frozenset({"default", "longrope", "linear", "yarn"}),
    partial_rope=True,
    free_head_dim=False,
    shapes={"FFN_UP": ("intermediate_size * 2", "hidden_size")},
    stated_window=True,
    values=SILU,
)

# With adapters for images and sound, which texts alone do without; published files have them in the layers.
PHI4_MULTIMODAL = replace(
    PHI3,
    unused=r".*\.lora_[AB]\..*",
    unused_why="part of an adapter for images or sound, which the text model does without",
    modules={r"(.+)\.base_layer": r"\1"},
)

GRANITE = replace(
    LLAMA,
    name="GRANITE",
    settings=(
        *(_real(f"{part}_scale", f"{part}_multiplier") for part in ("attention", "embedding", "residual")),
        _real("logit_scale", "logits_scaling"),
    ),
)
OLMO2 = Architecture(name="OLMO2", free_head_dim=False, own_head=True, values=SILU)
OLMO3 = replace(OLMO2, windows=LAYERS, window_period=4, window_base=False)
SMOLLM3 = Architecture(name="SMOLLM3", interleaved=True, unrotated_period=4, biases=QKV, values=SILU)
STARCODER2 = Architecture(
    name="STARCODER2",
    norm=_real("layer_norm_eps", "norm_epsilon"),
    free_head_dim=False,
    biases=QKV | {"ATTN_OUT", "FFN_UP", "FFN_DOWN"} | NORMS,
    values={"hidden_act": TANH_GELU, "use_bias": (True,)},
)
STABLELM = Architecture(
    name="STABLELM",
    norm=LAYER_NORM,
    partial_rope=True,
    free_head_dim=False,
    own_head=True,
    biases=QKV | NORMS,
    values=SILU | {"use_parallel_residual": (False, None), "qk_layernorm": (False, None)},
)
COHERE = Architecture(
    name="COMMAND_R",
    norm=LAYER_NORM,
    settings=(_real("logit_scale"),),
    free_head_dim=False,
    biases=QKV,
    values=SILU | {"use_qk_norm": (False, None)},
)
COHERE2 = replace(COHERE, name="COHERE2", rope=frozenset({"default"}), windows=LAYERS, window_period=4)
GLM4 = Architecture(
    name="GLM4",
    shapes={"FFN_UP": ("intermediate_size * 2", "hidden_size")},
    partial_rope=True,
    biases=QKV,
    values=SILU,
)
SEED_OSS = Architecture(name="SEED_OSS", biases=QKV, values=SILU)
EXAONE4 = Architecture(
    name="EXAONE4",
    rope=LLAMA.rope,
    windows=LAYERS,
    window_period=4,
    layers_with_windows=64,
    window_base=False,
    window_scaled=True,
    values=SILU,
)
# Its rotary embeddings are called dynamic, and have a base that does not change.
FIXED_DYNAMIC = frozenset({"default", "dynamic"})
HUNYUAN_DENSE = Architecture(name="HUNYUAN_DENSE", rope=FIXED_DYNAMIC, biases=QKV, values=SILU)
ERNIE4_5 = Architecture(name="ERNIE4_5", values=SILU | {"use_bias": (False, None)})
ARCEE = replace(LLAMA, name="ARCEE", rope=frozenset({"default", "linear", "yarn"}), values={"hidden_act": ("relu2",)})
MINISTRAL3 = replace(LLAMA, name="MISTRAL3", temperature=True)
