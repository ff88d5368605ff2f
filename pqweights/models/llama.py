"""Types that are more or less a Llama: dense ones with attention in all layers. A type is a row.

The defaults are those of the configuration classes of transformers, of the keys that GGUF needs, and elsewhere of the
sizes of heads. llama.cpp's defaults for missing metadata are others.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import LIKE_LLAMA, OWN_HEAD, SILU, TIED, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DEFAULT,
    EVERY_LLAMA,
    LAYER_NORM,
    QKV,
    SILU_ONLY,
    SLIDING,
    TANH_GELU,
    Architecture,
    Rope,
    Windows,
    gate_and_up_rows,
    query_rows,
    real,
)
from pqweights.models.rotary import DEFAULT_WINDOWS
from pqweights.models.settings import Settings, each_fourth_unrotated, needs_windows, windowed_layers
from pqweights.models.tensor_names import BIASED, MLP_BIASED, Names
from pqweights.models.traits import Trait

LLAMA = Architecture(
    name="LLAMA", interleaved=True, rope=Rope(EVERY_LLAMA), values=SILU_ONLY,
    biases=QKV | {"ATTN_OUT", "FFN_GATE", "FFN_UP", "FFN_DOWN"},
)  # fmt: skip
# Its rotary embeddings are called dynamic, and have a base that does not change.
HUNYUAN_ROPE = Rope(frozenset({"default", "dynamic"}))
_PHI3 = Architecture(
    name="PHI3", rope=Rope(EVERY_LLAMA - {"llama3"}, partial=True), free_head_dim=False, no_window=0, values=SILU_ONLY,
    shapes={"FFN_UP": (gate_and_up_rows, "hidden_size")},
)  # fmt: skip
# With adapters for images and sound, which texts alone do without; published files have them in the layers.
_PHI4_MULTIMODAL = Row(
    llama_cpp=replace(
        _PHI3,
        unused={r".*\.lora_[AB]\..*": "part of an adapter for images or sound, which the text model does without"},
        modules={r"(.+)\.base_layer": r"\1"},
    ),
    defaults=sizes(3072, 8192, 32, 32, 131072) | LIKE_LLAMA | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
)
_OLMO2 = Architecture(name="OLMO2", free_head_dim=False, own_head=True, values=SILU_ONLY)
_OLMO_NAMES = Names(class_name="Olmo2ForCausalLM", present=BIASED)
_OLMO_PARTS = parts.HEADS + parts.HEAD_NORMS + parts.MLP + " post_attention_layernorm post_feedforward_layernorm"
_OLMO = sizes(4096, 11008, 32, 32, 2048) | LIKE_LLAMA | {"rms_norm_eps": 1e-5}
_COHERE = Architecture(
    name="COMMAND_R", norm=LAYER_NORM, settings=(real("logit_scale"),), free_head_dim=False, biases=QKV,
    values=SILU_ONLY | {"use_qk_norm": (False, None)},
)  # fmt: skip
_COHERE_KEYS = sizes(8192, 22528, 40, 64, 8192) | TIED | SILU | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}


def _rotated_windows(settings: Settings) -> str:
    """Check the rotary embeddings, of which configurations list a base for each layer, 0 for none."""
    bases, windowed = settings.get("layer_rope_theta"), windowed_layers(settings)
    alike = bases is None or [bool(base) for base in bases] == windowed
    return "" if alike else "llama.cpp has rotary embeddings in layers with a sliding window, and in no others"


def _publish_muse_glimmer(config: dict[str, Any], held: Set[str]) -> None:
    """State which layers have rotary embeddings, which does not follow from their kinds."""
    base = config["rope_theta"]
    config["layer_rope_theta"] = [base if kind == SLIDING else 0 for kind in config["layer_types"]]


# Its queries are normalized without weights, and multiplied by one number.
_MUSE_GLIMMER = Architecture(
    name="AFMOE", label="muse-glimmer", interleaved=True, windows=Windows(listed=True, own_base=False),
    settings=(real("final_logit_softcapping"), real("logit_scale", "output_multiplier")), rope=Rope(DEFAULT),
    constants={"attn_q_norm.weight": "qk_scale_factor", "attn_k_norm.weight": lambda number: 1.0},
    plain_norms=frozenset({"OUTPUT_NORM"}), shapes={"ATTN_GATE": (query_rows, "hidden_size")},
    values={"hidden_activation": SILU_ONLY["hidden_act"], "post_norm_eps": (1e-8,)}, checks=(_rotated_windows,),
)  # fmt: skip
_LAYER_NORMS = frozenset({"ATTN_NORM", "FFN_NORM", "OUTPUT_NORM"})


def _windows_of_exaone(settings: Settings) -> str:
    """Check the layers: those with full attention have rotary embeddings in models without any window alone."""
    layers = settings.number("num_hidden_layers")
    if not any(windowed_layers(settings)):
        stated = settings.get("sliding_window") is not None
        return "llama.cpp rotates layers with full attention, but sliding_window is stated" if stated else ""
    if layers == 64:
        return ""
    return f"llama.cpp has sliding windows for 64 layers only, and num_hidden_layers is {layers}"


def restate_exaone(values: dict[str, Any]) -> None:
    """State the period of windows as a number."""
    if isinstance(pattern := values.get("sliding_window_pattern"), str) and "G" in pattern:  # LLLG
        values["sliding_window_pattern"] = 1 + pattern.index("G")


def _exaone_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    pattern = "".join("L" if kind == SLIDING else "G" for kind in config["layer_types"])
    has_windows = config.get("sliding_window", DEFAULT_WINDOWS["exaone4"]) is not None
    return {"sliding_window_pattern": pattern if has_windows else None}


ROWS: dict[str, Row] = {
    "llama": Row(
        llama_cpp=LLAMA, defaults=sizes(4096, 11008, 32, 32, 2048) | LIKE_LLAMA, always=parts.LLAMA,
        names=Names(class_name="LlamaForCausalLM", present=BIASED + MLP_BIASED),
    ),
    "mistral": Row(
        llama_cpp=LLAMA, defaults=sizes(4096, 14336, 32, 32, 131072) | LIKE_LLAMA | {"num_key_value_heads": 8},
        always=parts.LLAMA, names=Names(),
    ),
    "arcee": Row(
        llama_cpp=replace(LLAMA, name="ARCEE", rope=Rope(), values={"hidden_act": ("relu2",)}),
        defaults=sizes(2560, 18432, 32, 32, 4096) | OWN_HEAD | {"rms_norm_eps": 1e-05, "hidden_act": "relu2"},
        names=Names(class_name="ArceeForCausalLM", present=BIASED + MLP_BIASED),
    ),
    "muse_glimmer_text": Row(
        traits=frozenset({Trait.ZERO_CENTRED_NORMS}), llama_cpp=_MUSE_GLIMMER, publish=_publish_muse_glimmer,
        names=Names(
            class_name="MuseGlimmerForCausalLM",
            layers=parts.NORMS + parts.HEADS + parts.MLP + parts.FEED_FORWARD_NORMS + " self_attn.gate_proj",
        ),
        defaults=sizes(6656, 19968, 52, 32, 131072) | OWN_HEAD | {
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "hidden_activation": "silu",
            "final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404, "qk_scale_factor": 3.87,
            "post_norm_eps": 1e-8,
        },
    ),
    "exaone4": Row(
        llama_cpp=Architecture(
            name="EXAONE4", rope=Rope(EVERY_LLAMA), windows=Windows(period=4, own_base=False, scaled=True),
            values=SILU_ONLY, checks=(_windows_of_exaone,),
        ),
        restate=restate_exaone, mlx=MlxDifferences(computed=_exaone_mlx), always=_OLMO_PARTS,
        names=Names(class_name="Exaone4ForCausalLM"),
        defaults=sizes(4096, 16384, 32, 32, 2048) | LIKE_LLAMA | {"num_key_value_heads": 32, "rms_norm_eps": 1e-05},
    ),
    "ministral3": Row(
        llama_cpp=replace(LLAMA, name="MISTRAL3", rope=Rope(EVERY_LLAMA, temperature=True)),
        defaults=sizes(4096, 14336, 34, 32, 262144) | LIKE_LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05,
        },
        always=parts.LLAMA, names=Names(class_name="Ministral3ForCausalLM"),
    ),
    "olmo2": Row(llama_cpp=_OLMO2, defaults=_OLMO, always=_OLMO_PARTS, names=_OLMO_NAMES),
    "olmo3": Row(
        llama_cpp=replace(_OLMO2, windows=Windows(period=4, own_base=False)), defaults=_OLMO, always=_OLMO_PARTS,
        names=replace(_OLMO_NAMES, class_name="Olmo3ForCausalLM"),
    ),
    "seed_oss": Row(
        llama_cpp=Architecture(name="SEED_OSS", biases=QKV, values=SILU_ONLY), always=parts.LLAMA,
        defaults=sizes(4096, 27648, 64, 80, 524288) | LIKE_LLAMA | {"num_key_value_heads": 8, "head_dim": 128},
        names=Names(
            class_name="SeedOssForCausalLM",
            present=(*BIASED, *MLP_BIASED, ("attention_out_bias", "attn_output.bias")),
        ),
    ),
    "smollm3": Row(
        llama_cpp=Architecture(
            name="SMOLLM3", interleaved=True, biases=QKV, values=SILU_ONLY, checks=(each_fourth_unrotated,)
        ),
        defaults=sizes(2048, 11008, 36, 16, 32768) | LIKE_LLAMA | TIED | {
            "num_key_value_heads": 4, "no_rope_layer_interval": 4,
        },
        always=parts.LLAMA, names=Names(class_name="SmolLM3ForCausalLM", present=BIASED),
    ),
    "phi3": Row(
        llama_cpp=_PHI3, defaults=sizes(3072, 8192, 32, 32, 4096) | LIKE_LLAMA | {"rms_norm_eps": 1e-5},
        always=parts.NORMS + " self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj",
        names=Names(
            class_name="Phi3ForCausalLM",
            layers=parts.ATTENTION + " self_attn.qkv_proj mlp.gate_up_proj mlp.down_proj",
        ),
    ),
    "phi4_multimodal": _PHI4_MULTIMODAL,
    "phi4mm": _PHI4_MULTIMODAL,
    "starcoder2": Row(
        llama_cpp=Architecture(
            name="STARCODER2", norm=real("layer_norm_eps", "norm_epsilon"), free_head_dim=False,
            biases=QKV | {"ATTN_OUT", "FFN_UP", "FFN_DOWN"} | _LAYER_NORMS,
            values={"hidden_act": TANH_GELU, "use_bias": (True,)},
        ),
        defaults=sizes(3072, 12288, 30, 24, 4096) | TIED | {
            "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True,
        },
        always=parts.NORMS + parts.HEADS + " mlp.c_fc mlp.c_proj",
        names=Names(class_name="Starcoder2ForCausalLM", layers=parts.ATTENTION + " mlp.c_fc mlp.c_proj"),
    ),
    "stablelm": Row(
        llama_cpp=Architecture(
            name="STABLELM", norm=LAYER_NORM, rope=Rope(partial=True), free_head_dim=False, own_head=True,
            biases=QKV | _LAYER_NORMS,
            values=SILU_ONLY | {"use_parallel_residual": (False, None), "qk_layernorm": (False, None)},
        ),
        defaults=sizes(2560, 6912, 32, 32, 4096) | OWN_HEAD | SILU | {
            "layer_norm_eps": 1e-5, "num_key_value_heads": 32, "use_parallel_residual": False, "qk_layernorm": False,
        },
        names=Names(class_name="StableLmForCausalLM", present=(("use_qkv_bias", "attn_q.bias"),)),
    ),
    "cohere": Row(
        llama_cpp=_COHERE, defaults=_COHERE_KEYS | {"use_qk_norm": False},
        always="input_layernorm" + parts.HEADS + parts.MLP, names=Names(class_name="CohereForCausalLM", present=BIASED),
    ),
    "cohere2": Row(
        llama_cpp=replace(
            _COHERE, name="COHERE2", rope=Rope(DEFAULT), windows=Windows(period=4), checks=(needs_windows,)
        ),
        defaults=_COHERE_KEYS, always="input_layernorm" + parts.HEADS + parts.MLP,
        names=Names(class_name="Cohere2ForCausalLM", present=BIASED),
    ),
    "glm4": Row(
        llama_cpp=Architecture(
            name="GLM4", rope=Rope(partial=True), biases=QKV, values=SILU_ONLY,
            shapes={"FFN_UP": (gate_and_up_rows, "hidden_size")},
        ),
        defaults=sizes(4096, 13696, 40, 32, 131072) | LIKE_LLAMA | {
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
        },
        always=parts.NORMS + parts.HEADS + " mlp.gate_up_proj mlp.down_proj post_self_attn_layernorm "
        "post_mlp_layernorm",
        names=Names(
            class_name="Glm4ForCausalLM", present=BIASED,
            layers=parts.ATTENTION + " post_self_attn_layernorm post_mlp_layernorm mlp.gate_up_proj mlp.down_proj",
        ),
    ),
    "hunyuan_v1_dense": Row(
        llama_cpp=Architecture(name="HUNYUAN_DENSE", rope=HUNYUAN_ROPE, biases=QKV, values=SILU_ONLY),
        defaults=sizes(4096, 11008, 32, 32, 2048) | LIKE_LLAMA | {"rms_norm_eps": 1e-05},
        names=Names(
            class_name="HunYuanDenseV1ForCausalLM", present=BIASED,
            layers=parts.ATTENTION + parts.MLP + " self_attn.query_layernorm self_attn.key_layernorm",
        ),
    ),
    "ernie4_5": Row(
        llama_cpp=Architecture(name="ERNIE4_5", values=SILU_ONLY | {"use_bias": (False, None)}),
        defaults=sizes(1024, 3072, 18, 16, 131072) | TIED | SILU | {
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-05, "use_bias": False,
        },
        names=Names(class_name="Ernie4_5ForCausalLM"),
    ),
}  # fmt: skip
