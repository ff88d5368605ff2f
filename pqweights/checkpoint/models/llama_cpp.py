"""How llama.cpp runs models: what of their configurations it has to be told, and which values it computes with.

The facts are those of llama.cpp's loaders and graphs (src/models/*.cpp) and of its converter (conversion/*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A hyper-parameter of a GGUF file.

    parameter: its name in the gguf package, whose writer has a method add_{parameter}
    key: the key of the configuration that holds it
    real: whether it need not be a whole number
    optional: whether the model may do without it
    """

    parameter: str
    key: str
    real: bool = False
    optional: bool = False


def _real(parameter: str, key: str = "") -> Setting:
    """Return a hyper-parameter that need not be a whole number; by default, its key has the same name."""
    return Setting(parameter, key or parameter, real=True)


RMS, LAYER_NORM = _real("layer_norm_rms_eps", "rms_norm_eps"), _real("layer_norm_eps")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How llama.cpp runs a type of model.

    name: its name in gguf.MODEL_ARCH
    modules: expressions for modules of a layer that the gguf package does not know, and the names of those that it does
    norm: the setting of its norms
    settings: the hyper-parameters that it has beside those of all models
    interleaved: whether the rows of q and k are to be permuted, because it rotates neighbouring channels
    rope: the kinds of scaled rotary embeddings that it computes
    partial_rope: whether it can rotate a part of each head
    free_head_dim: whether heads may be wider or narrower than hidden_size / num_attention_heads
    windows: IGNORED, LAYERS or None: whether the model has sliding windows, and llama.cpp too
    window_period: with LAYERS, the period in which llama.cpp has one layer without a window, if the file does not say
    forced_window: with LAYERS, whether llama.cpp has windows even if the file names none
    window_base: whether layers with a window may have a base of rotary embeddings of their own
    unrotated_period: the period in which llama.cpp has one layer without rotary embeddings; 0: none
    own_head: whether it needs a head although the embeddings are the head
    biases: the tensors, as in gguf.MODEL_TENSOR, of which it also takes a bias
    layers_of_27b: how many layers the 27B model of Gemma has, by which llama.cpp recognizes it: only this model scales
        queries by the width of the model over its heads
    joined_mlp: whether gate and up are one tensor
    stated_window: whether earlier versions expect the file to say that there is no sliding window
    values: for keys of the configuration, the values with which the model computes what llama.cpp does
    """

    name: str
    modules: Mapping[str, str] = field(default_factory=dict)
    norm: Setting = RMS
    settings: tuple[Setting, ...] = ()
    interleaved: bool = False
    rope: frozenset[str] = frozenset({"default", "linear", "yarn"})
    partial_rope: bool = False
    free_head_dim: bool = True
    windows: str | None = None
    window_period: int = 0
    forced_window: bool = False
    window_base: bool = True
    unrotated_period: int = 0
    own_head: bool = False
    biases: frozenset[str] = frozenset()
    layers_of_27b: int | None = None
    joined_mlp: bool = False
    stated_window: bool = False
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


# llama.cpp has no sliding window for the model: it computes the same for texts that are no longer than the window.
IGNORED = "ignored"
# Some layers have a window.
LAYERS = "layers"

SETTINGS = (
    Setting("embedding_length", "hidden_size"),
    Setting("block_count", "num_hidden_layers"),
    Setting("feed_forward_length", "intermediate_size"),
    Setting("head_count", "num_attention_heads"),
    Setting("head_count_kv", "num_key_value_heads"),
    Setting("key_length", "head_dim"),
    Setting("value_length", "head_dim"),
)
EXPERTS = (Setting("expert_count", "num_experts"), Setting("expert_used_count", "num_experts_per_tok"))
EXPERT_WIDTH = Setting("expert_feed_forward_length", "moe_intermediate_size")

LINEAR = frozenset({"default", "linear"})
QKV = frozenset({"ATTN_Q", "ATTN_K", "ATTN_V"})
NORMS = frozenset({"ATTN_NORM", "FFN_NORM", "OUTPUT_NORM"})
SILU = {"hidden_act": ("silu", "swish")}
# Qwen's window is that of its upper layers.
NO_WINDOW = {"use_sliding_window": (False, None)}
ALL_SPARSE = {"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)}

LLAMA = Architecture(
    name="LLAMA",
    interleaved=True,
    rope=frozenset({"default", "linear", "llama3", "yarn", "longrope"}),
    biases=QKV | {"ATTN_OUT", "FFN_GATE", "FFN_UP", "FFN_DOWN"},
    values=SILU,
)
MISTRAL = replace(LLAMA, windows=IGNORED)
MIXTRAL = replace(MISTRAL, settings=EXPERTS)
QWEN2 = Architecture(name="QWEN2", free_head_dim=False, biases=QKV, values=SILU | NO_WINDOW)
QWEN2_MOE = Architecture(
    name="QWEN2MOE",
    settings=(*EXPERTS, EXPERT_WIDTH, Setting("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
    free_head_dim=False,
    own_head=True,
    biases=QKV,
    values=SILU | NO_WINDOW | ALL_SPARSE | {"norm_topk_prob": (False,)},
)
QWEN3 = Architecture(name="QWEN3", biases=QKV, values=SILU | NO_WINDOW)
QWEN3_MOE = Architecture(
    name="QWEN3MOE",
    settings=(*EXPERTS, EXPERT_WIDTH),
    biases=QKV,
    values=SILU | NO_WINDOW | ALL_SPARSE | {"norm_topk_prob": (True,)},
)
# What early configurations of Gemma call gelu is its approximation by tanh, too.
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
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
PHI3 = Architecture(
    name="PHI3",
    rope=frozenset({"default", "longrope", "linear", "yarn"}),
    partial_rope=True,
    free_head_dim=False,
    windows=IGNORED,
    joined_mlp=True,
    stated_window=True,
    values=SILU,
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
SMOLLM3 = Architecture(name="SMOLLM3", interleaved=True, unrotated_period=4, biases=QKV, values=SILU | NO_WINDOW)
STARCODER2 = Architecture(
    name="STARCODER2",
    norm=_real("layer_norm_eps", "norm_epsilon"),
    free_head_dim=False,
    windows=IGNORED,
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
