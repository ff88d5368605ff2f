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
    "gpt_oss": "GptOssForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "llama4_text": "Llama4ForCausalLM", "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM", "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM", "gemma3n_text": "Gemma3nForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "nemotron_h": "NemotronHForCausalLM", "falcon_h1": "FalconH1ForCausalLM", "jamba": "JambaForCausalLM",
    "bert": "BertModel", "distilbert": "DistilBertModel", "jina_embeddings_v3": "JinaEmbeddingsV3Model",
    "nomic_bert": "NomicBertModel", "modernbert": "ModernBertModel", "eurobert": "EuroBertModel",
    "t5": "T5ForConditionalGeneration", "umt5": "UMT5ForConditionalGeneration",
    "kimi_k2": "DeepseekV3ForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM", "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM", "mistral4": "Mistral4ForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}  # fmt: skip

# Models that the file alone becomes a BERT of, and that have these names of their own.
ROBERTAS = ("roberta", "xlm-roberta", "camembert")
# Models of images and text whose files hold the text model alone, and those that compute the same of texts: positions
# in time, height and width are equal there. The keys are of images alone.
TEXT_PARTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")


def _below(module: str, names: str) -> str:
    """Return names below a module."""
    return "".join(f" {module}.{name}" for name in names.split())


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
_DELTA_NET = _below("linear_attn", "A_log conv1d dt_bias norm out_proj")
_LFM2 = (
    "conv.conv conv.in_proj conv.out_proj feed_forward.w1 feed_forward.w2 feed_forward.w3 ffn_norm operator_norm "
    "feed_forward.gate feed_forward.expert_bias self_attn.k_layernorm self_attn.q_layernorm self_attn.q_proj "
    "self_attn.k_proj self_attn.v_proj self_attn.out_proj "
    + " ".join(f"feed_forward.experts.{{}}.w{n}" for n in (1, 2, 3))
)
_MAMBA = _below("mamba", "A_log D conv1d dt_bias norm in_proj out_proj")
_GRANITE = " block_sparse_moe.input_linear block_sparse_moe.output_linear block_sparse_moe.router.layer"
_GRANITE_SHARED = " shared_mlp.input_linear shared_mlp.output_linear"
_FEED_FORWARD = " feed_forward.gate_proj feed_forward.up_proj feed_forward.down_proj"
_PER_LAYER = (
    " pre_feedforward_layernorm post_feedforward_layernorm per_layer_input_gate per_layer_projection "
    "post_per_layer_input_norm"
)
_MLA = _below("self_attn", "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj")
_T5_PARTS = {part: f"{part}.q {part}.k {part}.v {part}.o" for part in ("SelfAttention", "EncDecAttention")}
_T5_PARTS["DenseReluDense"] = "".join(_below("DenseReluDense", "wi wi_0 wi_1 wo"))
_T5_STACKS = {"encoder": ("SelfAttention", "DenseReluDense"), "decoder": tuple(_T5_PARTS)}
_T5 = "".join(
    _below(f"{stack}.block.#.layer.{place}", f"layer_norm {_T5_PARTS[part]}")
    for stack, parts in _T5_STACKS.items()
    for place, part in enumerate(parts)
)
_T5_BIASES = "".join(
    f" {stack}.block.{{}}.layer.0.SelfAttention.relative_attention_bias.weight" for stack in _T5_STACKS
)
_BERT = (
    "attention.self.query attention.self.key attention.self.value attention.output.dense "
    "attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm"
)
_DEEPSEEK = _SHARED + _MLA + " mlp.gate.e_score_correction_bias"
_OWN_MODULES = {
    "gpt_oss": f"{_ATTENTION} self_attn.sinks mlp.router"
    + _below("mlp.experts", "gate_up_proj down_proj gate_up_proj_bias down_proj_bias"),
    "qwen3_next": f"{_USUAL} {_EXPERTS}{_DELTA_NET}" + _below("linear_attn", "in_proj_ba in_proj_qkvz"),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        f"{_USUAL} {_EXPERTS}{_DELTA_NET}" + _below("linear_attn", "in_proj_a in_proj_b in_proj_qkv in_proj_z"),
    ),
    "llama4_text": f"{_ATTENTION}{_FEED_FORWARD} feed_forward.router feed_forward.experts.gate_up_proj "
    "feed_forward.experts.down_proj "
    + " ".join(f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "granitemoe": _ATTENTION + _GRANITE,
    "granitemoeshared": _ATTENTION + _GRANITE + _GRANITE_SHARED,
    "granitemoehybrid": _ATTENTION + _GRANITE + _GRANITE_SHARED + _MAMBA,
    "gemma4_text": _ATTENTION + _MLP + _PER_LAYER + " layer_scalar experts.gate_up_proj experts.down_proj router.proj "
    "router.scale router.per_expert_scale post_feedforward_layernorm_1 post_feedforward_layernorm_2 "
    "pre_feedforward_layernorm_2",
    "gemma3n_text": _ATTENTION + _MLP + _PER_LAYER + " altup.correct_output_scale altup.correction_coefs "
    "altup.modality_router altup.prediction_coefs altup.router_norm laurel.linear_left laurel.linear_right "
    "laurel.post_laurel_norm",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), _DEEPSEEK),
    **dict.fromkeys(
        ("glm_moe_dsa", "deepseek_v32"), _DEEPSEEK + _below("self_attn.indexer", "k_norm weights_proj wk wq_b")
    ),
    "deepseek_v4": "attn_norm ffn_norm hc_attn_fn hc_attn_base hc_attn_scale hc_ffn_fn hc_ffn_base hc_ffn_scale"
    + _below("attn", "attn_sink norm q_norm wkv wo_a wo_b wq_a wq_b indexer.weights_proj indexer.wq_b")
    + _below("attn.compressor", "ape norm wgate wkv")
    + _below("attn.indexer.compressor", "ape norm wgate wkv")
    + _below("ffn", "gate gate.tid2eid shared_experts.w1 shared_experts.w2 shared_experts.w3")
    + _below("ffn.experts.{}", "w1 w2 w3"),
    "kimi_linear": f"{_ATTENTION}{_MLP}{_MLA} {_W123}"
    + _below("block_sparse_moe", "gate gate.e_score_correction_bias shared_experts.gate_proj shared_experts.up_proj")
    + " block_sparse_moe.shared_experts.down_proj"
    + _below("self_attn", "A_log dt_bias b_proj f_a_proj f_b_proj g_a_proj g_b_proj o_norm")
    + _below("self_attn", "q_conv1d k_conv1d v_conv1d"),
    "mimo_v2_flash": f"{_SHARED} mlp.gate.e_score_correction_bias self_attn.attention_sink_bias",
    "minimax_m3_vl_text": _ATTENTION
    + _below("self_attn.indexer", "q_proj k_proj q_norm k_norm")
    + _below("mlp", "gate_up_proj down_proj gate gate.e_score_correction_bias experts.gate_up_proj experts.down_proj")
    + _below("mlp.shared_experts", "gate_up_proj down_proj"),
    "mistral4": f"{_USUAL}{_MLA}"
    + _below("mlp", "shared_experts.gate_proj shared_experts.up_proj shared_experts.down_proj")
    + _below("mlp.experts", "gate_up_proj down_proj"),
    "step3p5": f"{_ATTENTION}{_MLP} self_attn.g_proj"
    + _below("moe", "gate router_bias gate_proj up_proj down_proj")
    + _below("share_expert", "gate_proj up_proj down_proj"),
    "falcon_h1": _ATTENTION + _FEED_FORWARD + _MAMBA + " pre_ff_layernorm",
    "jamba": _ATTENTION + _FEED_FORWARD + _MAMBA.replace(" mamba.norm", "") + " pre_ff_layernorm feed_forward.router "
    "mamba.b_layernorm mamba.c_layernorm mamba.dt_layernorm mamba.dt_proj mamba.x_proj "
    + " ".join(f"feed_forward.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")),
    "nemotron_h": "norm "
    + " ".join(
        f"mixer.{name}"
        for name in (
            *[
                "A_log",
                "D",
                "conv1d",
                "dt_bias",
                "in_proj",
                "norm",
                "out_proj",
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "up_proj",
                "down_proj",
            ],
            *["experts.{}.up_proj", "experts.{}.down_proj", "gate", "gate.e_score_correction_bias"],
            *["shared_experts.up_proj", "shared_experts.down_proj", "fc1_latent_proj", "fc2_latent_proj"],
        )
    ),
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
    **dict.fromkeys(("bert", *ROBERTAS), _BERT),
    "distilbert": "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2 "
    "output_layer_norm",
    "jina_embeddings_v3": "mixer.Wqkv mixer.out_proj mlp.fc1 mlp.fc2 norm1 norm2",
    "nomic_bert": "attn.Wqkv attn.out_proj mlp.fc11 mlp.fc12 mlp.fc2 norm1 norm2",
    "modernbert": "attn.Wqkv attn.Wo attn_norm mlp.Wi mlp.Wo mlp_norm",
    "t5": _T5,
    "umt5": _T5 + _T5_BIASES.format("#", "#"),
}
# What stands before these names; # is the number of the layer.
_BEFORE = {
    "nemotron_h": "backbone.layers.#.",
    "bert": "bert.encoder.layer.#.",
    **dict.fromkeys(ROBERTAS, "roberta.encoder.layer.#."),
    "distilbert": "distilbert.transformer.layer.#.",
    **dict.fromkeys(("jina_embeddings_v3", "nomic_bert"), "encoder.layers.#."),
    **dict.fromkeys(("t5", "umt5"), ""),
}
# The ends of names of parameters.
_NO_MODULE = (
    *(".weight", "_bias", "sinks", "A_log", ".D", "scale", "_scalar", ".experts.gate_up_proj", ".experts.down_proj"),
    *("_sink", ".ape", ".tid2eid", "_fn", "_base"),
)
_OUTSIDE = "model.embed_tokens model.norm lm_head"
_EMBEDDINGS = _below("{0}.embeddings", "word_embeddings position_embeddings token_type_embeddings LayerNorm")
_OWN_OUTSIDE = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), "model.embed_tokens model.embedding_norm lm_head"),
    **dict.fromkeys(("falcon_h1", "jamba"), "model.embed_tokens model.final_layernorm lm_head"),
    "nemotron_h": "backbone.embeddings backbone.norm_f lm_head",
    "bert": _EMBEDDINGS.format("bert") + " bert.pooler.dense classifier",
    **dict.fromkeys(ROBERTAS, _EMBEDDINGS.format("roberta") + " classifier.dense classifier.out_proj"),
    "distilbert": "distilbert.embeddings.word_embeddings distilbert.embeddings.position_embeddings "
    "distilbert.embeddings.LayerNorm",
    **dict.fromkeys(
        ("jina_embeddings_v3", "nomic_bert"),
        "embeddings.word_embeddings embeddings.token_type_embeddings emb_ln",
    ),
    "modernbert": "model.embeddings.tok_embeddings model.embeddings.norm model.final_norm head.dense head.norm "
    "classifier",
    "t5": "shared encoder.final_layer_norm decoder.final_layer_norm lm_head" + _T5_BIASES.format(0, 0),
    "umt5": "shared encoder.final_layer_norm decoder.final_layer_norm lm_head",
    "deepseek_v4": "model.embed_tokens model.norm head" + _below("model.hc_head", "hc_fn hc_base hc_scale"),
    **dict.fromkeys(
        ("gemma4_text", "gemma3n_text"),
        f"{_OUTSIDE} model.embed_tokens_per_layer model.per_layer_model_projection model.per_layer_projection_norm "
        "model.altup_projections.{} model.altup_unembed_projections.{}",
    ),
}


def names_in_layers(model_type: str, layers: range) -> list[str]:
    """Return what tensors of layers may be called; {} stands for the number of an expert."""
    return _numbered(_before(model_type), _of_layer(model_type), layers)


def _of_layer(model_type: str) -> list[str]:
    return _parameters(_OWN_MODULES.get(model_type, f"{_USUAL} {_EXPERTS}"))


def _before(model_type: str) -> str:
    return _BEFORE.get(model_type, "model.layers.#.")


def _numbered(before: str, names: list[str], layers: range) -> list[str]:
    return [(before + name).replace("#", str(layer)) for layer in layers for name in names]


def _parameters(modules: str) -> list[str]:
    """Return what tensors of modules may be called."""
    ends = {module: ("",) if f".{module}".endswith(_NO_MODULE) else (".weight", ".bias") for module in modules.split()}
    return [module + end for module, of in ends.items() for end in of]


# What there is beside the parts of a layer where layers predict further tokens: in such a layer, or below `mtp`.
_OF_DRAFTS = {
    "hy_v3": "eh_proj enorm hnorm final_layernorm",
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "exaone_moe"),
        _below("mtp", "fc pre_fc_norm_embedding pre_fc_norm_hidden norm"),
    ),
}
# Of Nemotron-H, where attention and experts are two layers.
_FOLDED_DRAFTS = (
    "norm eh_proj enorm hnorm" + _below("mixer", "q_proj k_proj v_proj o_proj"),
    "norm final_layernorm" + _below("mixer", "experts.{}.up_proj experts.{}.down_proj gate fc1_latent_proj")
    + _below("mixer", "fc2_latent_proj gate.e_score_correction_bias shared_experts.up_proj shared_experts.down_proj"),
)  # fmt: skip


def names_of_drafts(model_type: str, layers: range) -> list[str]:
    """Return what tensors of layers that predict further tokens may be called, as published files have them.

    layers: the numbers of these layers in a GGUF file, behind those of the model
    """
    if model_type == "nemotron_h":
        return [f"mtp.layers.{n}.{name}" for n, names in enumerate(_FOLDED_DRAFTS) for name in _parameters(names)]
    own = _parameters(_OF_DRAFTS.get(model_type, "eh_proj enorm hnorm embed_tokens shared_head.norm shared_head.head"))
    if not own[0].startswith("mtp."):
        return _numbered(_before(model_type), [*_of_layer(model_type), *own], layers)
    return _numbered("mtp.layers.#.", _of_layer(model_type), range(len(layers))) + own


def names_outside(model_type: str) -> list[str]:
    """Return what tensors outside of layers may be called; {} stands for a number."""
    return _parameters(_OWN_OUTSIDE.get(model_type, _OUTSIDE))


_NORM_EPS = {"rms_norm_eps": "norm_eps"}
_LOCAL, _ROUTED = {"num_experts": "num_local_experts"}, {"num_experts": "n_routed_experts"}
_MTP = {"num_nextn_predict_layers": "mtp_num_hidden_layers"}
_NO_GROUPS = {"num_key_value_heads": ""}
# What a type calls keys that are called otherwise in most, "" for those that it does without.
NATIVE_KEYS = {
    **dict.fromkeys(("mixtral", "gpt_oss", "llama4_text", "granitemoe", "granitemoeshared"), _LOCAL),
    "granitemoehybrid": _LOCAL,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "deepseek_v32", "deepseek_v4"), _ROUTED),
    **dict.fromkeys(("glm_moe_dsa", "mimo_v2_flash", "mistral4"), _ROUTED),
    "kimi_linear": {"num_experts_per_tok": "num_experts_per_token", "max_position_embeddings": "model_max_length"},
    "minimax_m3_vl_text": _LOCAL,
    "step3p5": {
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "num_key_value_heads": "num_attention_groups",
    },
    "nemotron_h": {**_ROUTED, "rms_norm_eps": "layer_norm_epsilon"},
    **dict.fromkeys(("lfm2", "lfm2_moe"), _NORM_EPS),
    "gemma4_text": {"num_experts_per_tok": "top_k_experts", "global_num_key_value_heads": "num_global_key_value_heads"},
    "minimax_m2": _LOCAL,
    "hunyuan_v1_moe": {"num_experts_per_tok": "moe_topk"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "dots1": _ROUTED,
    "glm4_moe": _ROUTED,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _MTP),
    **dict.fromkeys(("bert", "jina_embeddings_v3", "nomic_bert"), _NO_GROUPS),
    "distilbert": _NO_GROUPS
    | {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers"}
    | {"num_attention_heads": "n_heads", "layer_norm_eps": ""},
    "modernbert": _NO_GROUPS
    | {"sliding_window": "local_attention", "layer_norm_eps": "norm_eps"}
    | {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"},
    **dict.fromkeys(
        ("t5", "umt5"),
        _NO_GROUPS
        | {"hidden_size": "d_model", "intermediate_size": "d_ff", "num_hidden_layers": "num_layers"}
        | {"num_attention_heads": "num_heads", "head_dim": "d_kv", "rms_norm_eps": "layer_norm_epsilon"}
        | {"max_position_embeddings": "n_positions", "decoder_scale": ""},
    ),
}
# Types that list the layers with experts.
MLP_TYPES = ("mimo_v2_flash", "minimax_m3_vl_text")
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
