"""Which models llama.cpp runs, what of their configurations it has to be told, and what keys mean that are left out.

The facts are those of llama.cpp's loaders and graphs (src/models/*.cpp) and of its converter (conversion/*.py). The
defaults are those of the configuration classes of transformers, which the text_config of a model of images and text
leaves out: of the keys that GGUF needs, and for the models that only folding knows the sizes of heads; one without a
default is None. llama.cpp's defaults for missing metadata are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_SHAPES = {
    "cohere": (8192, 22528, 40, 64, 8192),
    "cohere2": (8192, 22528, 40, 64, 8192),
    "gemma": (3072, 24576, 28, 16, 8192),
    "gemma2": (2304, 9216, 26, 8, 8192),
    "gemma3_text": (2304, 9216, 26, 8, 131072),
    "granite": (4096, 11008, 32, 32, 2048),
    "llama": (4096, 11008, 32, 32, 2048),
    "mistral": (4096, 14336, 32, 32, 131072),
    "mixtral": (4096, 14336, 32, 32, 131072),
    "olmo2": (4096, 11008, 32, 32, 2048),
    "olmo3": (4096, 11008, 32, 32, 2048),
    "phi3": (3072, 8192, 32, 32, 4096),
    "qwen2": (4096, 22016, 32, 32, 32768),
    "qwen2_moe": (2048, 5632, 24, 16, 32768),
    "qwen3": (4096, 22016, 32, 32, 32768),
    "qwen3_moe": (2048, 6144, 24, 32, 32768),
    "smollm3": (2048, 11008, 36, 16, 32768),
    "stablelm": (2560, 6912, 32, 32, 4096),
    "starcoder2": (3072, 12288, 30, 24, 4096),
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_OWN_HEAD: dict[str, Any] = {"tie_word_embeddings": False}
_SILU = {"hidden_act": "silu"}
_LLAMA = _OWN_HEAD | _SILU | {"rms_norm_eps": 1e-6}
_QWEN = _LLAMA | {"use_sliding_window": False}
_SPARSE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_GEMMA = _TIED | {"rms_norm_eps": 1e-6, "head_dim": 256}
_LATER_GEMMA = _GEMMA | {"num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"}
_LATER_GEMMA |= {"query_pre_attn_scalar": 256, "sliding_window": 4096}
_COHERE = _TIED | _SILU | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_OTHERS: dict[str, dict[str, Any]] = {
    "cohere": _COHERE | {"use_qk_norm": False, "rope_theta": 5e5},
    "cohere2": _COHERE | {"sliding_window": 4096},
    "gemma": _GEMMA | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _LATER_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _LATER_GEMMA
    | {"use_bidirectional_attention": False, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "granite": _LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0),
    "llama": _LLAMA,
    "mistral": _LLAMA | {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": _LLAMA | {
        "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "olmo2": _LLAMA | {"rms_norm_eps": 1e-5},
    "olmo3": _LLAMA | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
    "phi3": _LLAMA | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "qwen2": _QWEN | {"num_key_value_heads": 32},
    "qwen2_moe": _QWEN | _SPARSE | {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": _QWEN | _SPARSE | {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "smollm3": _QWEN | _TIED | {"num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    "stablelm": _OWN_HEAD | _SILU | {
        "layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
        "use_parallel_residual": False, "qk_layernorm": False,
    },
    "starcoder2": _TIED | {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True,
    },
}  # fmt: skip

# By the model_type of transformers. The text_config of a model of images and text states only what differs from these.
DEFAULTS = {
    model_type: dict(zip(_SHAPE, _SHAPES[model_type], strict=True)) | others for model_type, others in _OTHERS.items()
}
DEFAULTS["gemma3"] = DEFAULTS["gemma3_text"]
HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
DEFAULTS |= {
    model_type: dict(zip(HEAD_SIZES, sizes, strict=True))
    for model_type, sizes in {
        "gpt_oss": (2880, 64, 8, 64),
        "qwen3_next": (2048, 16, 2, 256),
        "qwen3_5": (4096, 16, 4, 256),
        "qwen3_5_text": (4096, 16, 4, 256),
        "qwen3_5_moe": (2048, 16, 2, 256),
        "qwen3_5_moe_text": (2048, 16, 2, 256),
    }.items()
}


def stated_or_default(config: Mapping[str, Any], model_type: str, key: str) -> Any:
    """Return the value of a key; the default of transformers for one that is absent, None if that is not known."""
    return config[key] if key in config else DEFAULTS.get(model_type, {}).get(key)


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
    norm: the setting of its norms
    settings: the hyper-parameters that it has beside those of all models
    interleaved: whether the rows of q and k are to be permuted, because it rotates neighbouring channels
    gain_offset: what the model adds to the weights of its norms, and llama.cpp does not
    rope: the kinds of scaled rotary embeddings that it computes
    partial_rope: whether it can rotate a part of each head
    free_head_dim: whether heads may be wider or narrower than hidden_size / num_attention_heads
    windows: IGNORED, LAYERS or None: whether the model has sliding windows, and llama.cpp too
    window_period: with LAYERS, the period in which llama.cpp has one layer without a window, if the file does not say
    forced_window: with LAYERS, whether llama.cpp has windows even if the file names none
    rotated_windows: with LAYERS, whether layers without a window have no rotary embeddings
    window_base: whether layers with a window may have a base of rotary embeddings of their own
    unrotated_period: the period in which llama.cpp has one layer without rotary embeddings; 0: none
    own_head: whether it needs a head although the embeddings are the head
    biases: the tensors, as in gguf.MODEL_TENSOR, of which it also takes a bias
    values: for keys of the configuration, the values with which the model computes what llama.cpp does
    """

    name: str
    norm: Setting = RMS
    settings: tuple[Setting, ...] = ()
    interleaved: bool = False
    gain_offset: float = 0
    rope: frozenset[str] = frozenset({"default", "linear", "yarn"})
    partial_rope: bool = False
    free_head_dim: bool = True
    windows: str | None = None
    window_period: int = 0
    forced_window: bool = False
    rotated_windows: bool = False
    window_base: bool = True
    unrotated_period: int = 0
    own_head: bool = False
    biases: frozenset[str] = frozenset()
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
    gain_offset=1,
    values={"hidden_act": (*TANH_GELU, "gelu"), "use_bidirectional_attention": (False, None)},
)
GEMMA2 = Architecture(
    name="GEMMA2",
    gain_offset=1,
    settings=(_real("attn_logit_softcapping"), _real("final_logit_softcapping")),
    rope=LINEAR,
    windows=LAYERS,
    window_period=2,
    forced_window=True,
    values={"hidden_activation": TANH_GELU, "use_bidirectional_attention": (False, None)},
)
GEMMA3 = Architecture(
    name="GEMMA3",
    gain_offset=1,
    settings=(_real("final_logit_softcapping")._replace(optional=True),),
    rope=LINEAR,
    windows=LAYERS,
    window_period=6,
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
COHERE2 = replace(COHERE2, rotated_windows=True)

# By the model_type of transformers.
ARCHITECTURES: dict[str, Architecture] = {
    "cohere": COHERE,
    "cohere2": COHERE2,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}
