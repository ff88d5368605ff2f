"""What config.json and weights are called by transformers in the types of models that are read from GGUF files."""

from __future__ import annotations

# The class of a model with its head. The order is that in which types of one architecture are tried.
CLASSES = {
    "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "arcee": "ArceeForCausalLM",
    "exaone4": "Exaone4ForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "ministral3": "Ministral3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "phi3": "Phi3ForCausalLM", "granite": "GraniteForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM", "stablelm": "StableLmForCausalLM", "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM", "glm4": "Glm4ForCausalLM", "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM", "olmoe": "OlmoeForCausalLM", "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM", "dots1": "Dots1ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM", "hy_v3": "HYV3ForCausalLM",
}  # fmt: skip
_ATTENTION = "input_layernorm post_attention_layernorm " + " ".join(
    f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
)
_MLP = " mlp.gate_proj mlp.up_proj mlp.down_proj"
_USUAL = f"{_ATTENTION}{_MLP} pre_feedforward_layernorm post_feedforward_layernorm mlp.gate mlp.shared_expert_gate " + (
    " ".join(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
)
_EXPERTS = "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj"
_W123 = " ".join(f"block_sparse_moe.experts.{{}}.w{number}" for number in (1, 2, 3))
_SHARED = f"{_USUAL} {_EXPERTS} " + " ".join(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
_SHARED_MLP = f"{_ATTENTION}{_MLP} {_EXPERTS} " + " ".join(f"mlp.shared_mlp.{n}_proj" for n in ("gate", "up", "down"))
_QUERY_NORM = " self_attn.query_layernorm self_attn.key_layernorm"
_GLM4 = "post_self_attn_layernorm post_mlp_layernorm mlp.gate_up_proj mlp.down_proj"
_OWN_MODULES = {
    "mixtral": f"{_ATTENTION} block_sparse_moe.gate {_W123}",
    "phi3": f"{_ATTENTION} self_attn.qkv_proj mlp.gate_up_proj mlp.down_proj",
    "starcoder2": f"{_ATTENTION} mlp.c_fc mlp.c_proj",
    "glm4": f"{_ATTENTION} {_GLM4}",
    "hunyuan_v1_dense": _ATTENTION + _MLP + _QUERY_NORM,
    "hunyuan_v1_moe": _SHARED_MLP + _QUERY_NORM + " mlp.gate.wg",
    "ernie4_5_moe": _SHARED + " mlp.moe_statics.e_score_correction_bias",
    **dict.fromkeys(("dots1", "glm4_moe"), _SHARED + " mlp.gate.e_score_correction_bias"),
    "exaone_moe": _SHARED + " mlp.e_score_correction_bias",
    "minimax_m2": f"{_ATTENTION} block_sparse_moe.gate block_sparse_moe.e_score_correction_bias {_W123}",
    "hy_v3": _SHARED_MLP + " mlp.router.gate mlp.expert_bias",
}
_NO_MODULE = ("_bias",)  # the ends of names of parameters


def names_in_layers(model_type: str) -> list[str]:
    """Return what tensors of a layer may be called; {} stands for the number of an expert."""
    modules = _OWN_MODULES.get(model_type, f"{_USUAL} {_EXPERTS}").split()
    ends = [("",) if module.endswith(_NO_MODULE) else (".weight", ".bias") for module in modules]
    return [module + end for module, of in zip(modules, ends, strict=True) for end in of]


_LOCAL, _ROUTED = {"num_experts": "num_local_experts"}, {"num_experts": "n_routed_experts"}
# What a type calls keys that are called otherwise in most.
NATIVE_KEYS = {
    "mixtral": _LOCAL,
    "minimax_m2": _LOCAL,
    "hunyuan_v1_moe": {"num_experts_per_tok": "moe_topk"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "dots1": _ROUTED,
    "glm4_moe": _ROUTED,
}
# Keys that say which tensors there are, and what one of these is called in the first layer of a file.
_BIASED, _MLP_BIAS = (("attention_bias", "attn_q.bias"),), (("mlp_bias", "ffn_up.bias"),)
PRESENT = {
    **dict.fromkeys(("llama", "arcee", "granite"), _BIASED + _MLP_BIAS),
    **dict.fromkeys(("gemma", "olmo2", "olmo3", "qwen3", "qwen3_moe", "smollm3"), _BIASED),
    **dict.fromkeys(("cohere", "cohere2", "glm4", "hunyuan_v1_dense", "hunyuan_v1_moe"), _BIASED),
    "glm4_moe": (*_BIASED, ("use_qk_norm", "attn_q_norm.weight")),
    "seed_oss": (*_BIASED, *_MLP_BIAS, ("attention_out_bias", "attn_output.bias")),
    "stablelm": (("use_qkv_bias", "attn_q.bias"),),
}
