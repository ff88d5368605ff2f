"""The architectures that the tests build tiny: how, what they take, and what each target makes of them.

Layers are as narrow as groups and blocks of 128 allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 128
WIDTH, WIDE = 128, 256

# Names that the configurations of different models have for the same sizes.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": WIDE,
    "decoder_ffn_dim": WIDE,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "state_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": WIDTH,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
IMAGE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
    "projection_dim": WIDTH,
}
SPEECH: dict[str, Any] = {
    **ENCODER,
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "embed_dim": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
LOADS = "loads"
UNKNOWN_TO_MLX = "it has no model of type"
TRANSPOSED = "it stores its linear weights transposed"
FUSED = "transformers splits its fused experts"
RESHAPED = "transformers cuts or joins its weights"
RENAMED = "transformers renames its layers"
DIRECTLY = "computes with its weights directly"


@dataclass(frozen=True)
class Architecture:
    """An architecture, and what the targets make of it.

    model, config: names of its classes in transformers
    settings: arguments of the config
    takes: what the model is called with: "ids", "seq2seq", "image", "image and ids", "sound" or "features"
    vllm, torchao, mlx: what is expected of each target: LOADS, or a pattern of its refusal
    """

    model: str
    config: str
    settings: dict[str, Any]
    takes: str = "ids"
    vllm: str = LOADS
    torchao: str = LOADS
    mlx: str = UNKNOWN_TO_MLX

    @property
    def expected(self) -> dict[str, str]:
        """What is expected of each target."""
        return {"bf16": LOADS, "vllm": self.vllm, "torchao-int4": self.torchao, "mlx": self.mlx}


A = Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "bert": A("BertForMaskedLM", "BertConfig", ENCODER),
    "roberta": A("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "xlm-roberta": A("XLMRobertaForMaskedLM", "XLMRobertaConfig", ENCODER),
    "distilbert": A(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "hidden_dim": WIDE,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "albert": A("AlbertForMaskedLM", "AlbertConfig", {**ENCODER, "embedding_size": WIDTH}),
    "electra": A("ElectraForMaskedLM", "ElectraConfig", {**ENCODER, "embedding_size": WIDTH}),
    "deberta-v2": A(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    ),
    "mpnet": A("MPNetForMaskedLM", "MPNetConfig", ENCODER),
    "modernbert": A("ModernBertForMaskedLM", "ModernBertConfig", {**ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    "rembert": A(
        "RemBertForMaskedLM",
        "RemBertConfig",
        {**ENCODER, "input_embedding_size": WIDTH, "output_embedding_size": WIDTH},
    ),
    "gte": A("GteForMaskedLM", "GteConfig", ENCODER, vllm=RESHAPED, torchao=RESHAPED),
    "nomic_bert": A(
        "NomicBertForMaskedLM", "NomicBertConfig", {**ENCODER, "head_dim": 32}, vllm=RESHAPED, torchao=RESHAPED
    ),
    "jina_embeddings_v3": A(
        "JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Config", ENCODER, vllm=RESHAPED, torchao=RESHAPED
    ),
    "t5": A(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 32, "d_ff": WIDE, "num_layers": 2, "num_heads": 4},
        "seq2seq",
    ),
    "mt5": A(
        "MT5ForConditionalGeneration",
        "MT5Config",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 32, "d_ff": WIDE, "num_layers": 2, "num_heads": 4},
        "seq2seq",
    ),
    "bart": A("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, "seq2seq"),
    "mbart": A("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ, "seq2seq"),
    "marian": A("MarianMTModel", "MarianConfig", SEQ2SEQ, "seq2seq"),
    "pegasus": A("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, "seq2seq"),
    "m2m_100": A("M2M100ForConditionalGeneration", "M2M100Config", SEQ2SEQ, "seq2seq"),
    "whisper": A(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
        "features",
    ),
    "gpt2": A("GPT2LMHeadModel", "GPT2Config", GPT, vllm=TRANSPOSED, torchao=TRANSPOSED, mlx=LOADS),
    "gpt_neo": A(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": WIDE,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": A("GPTNeoXForCausalLM", "GPTNeoXConfig", {**ENCODER, "intermediate_size": 4 * WIDTH}, mlx=LOADS),
    "gptj": A("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 16}, mlx=LOADS),
    "codegen": A("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 16}),
    "gpt_bigcode": A("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT, mlx="n_inner: expected int, found null"),
    "openai-gpt": A("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT, vllm=TRANSPOSED, torchao=TRANSPOSED),
    "ctrl": A("CTRLLMHeadModel", "CTRLConfig", {**GPT, "dff": WIDE}),
    "dbrx": A(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "ffn_config": {"ffn_hidden_size": WIDTH, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
        mlx=LOADS,
    ),
    "jetmoe": A("JetMoeForCausalLM", "JetMoeConfig", {**TEXT, **EXPERTS, "kv_channels": 32}),
    "aria_text": A(
        "AriaTextForCausalLM",
        "AriaTextConfig",
        {**TEXT, "intermediate_size": WIDTH, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    ),
    "umt5": A(
        "UMT5ForConditionalGeneration",
        "UMT5Config",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 32, "d_ff": WIDE, "num_layers": 2, "num_heads": 4},
        "seq2seq",
    ),
    "opt": A("OPTForCausalLM", "OPTConfig", {**ENCODER, "ffn_dim": WIDE, "word_embed_proj_dim": WIDTH}),
    "bloom": A(
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "falcon": A(
        "FalconForCausalLM",
        "FalconConfig",
        {**ENCODER, "alibi": False, "new_decoder_architecture": False},
        torchao=DIRECTLY,
    ),
    "mpt": A(
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "n_layers": 2,
            "n_heads": 4,
            "expansion_ratio": 2,
            "max_seq_len": 64,
        },
    ),
    "xglm": A("XGLMForCausalLM", "XGLMConfig", {**SEQ2SEQ, "num_layers": 2, "attention_heads": 4, "ffn_dim": WIDE}),
    "llama": A("LlamaForCausalLM", "LlamaConfig", TEXT, mlx=LOADS),
    "llama with a tied head": A("LlamaForCausalLM", "LlamaConfig", {**TEXT, "tie_word_embeddings": True}, mlx=LOADS),
    "mistral": A("MistralForCausalLM", "MistralConfig", TEXT, mlx=LOADS),
    "ministral": A("MinistralForCausalLM", "MinistralConfig", TEXT),
    "mixtral": A("MixtralForCausalLM", "MixtralConfig", {**TEXT, **EXPERTS}, mlx=LOADS),
    "phimoe": A(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {**TEXT, **EXPERTS, "attention_bias": True, "lm_head_bias": True},
        mlx=LOADS,
    ),
    "qwen2": A("Qwen2ForCausalLM", "Qwen2Config", TEXT, mlx=LOADS),
    "qwen3": A("Qwen3ForCausalLM", "Qwen3Config", TEXT, mlx=LOADS),
    "qwen2_moe": A(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**TEXT, **EXPERTS, "shared_expert_intermediate_size": WIDTH},
        mlx=LOADS,
    ),
    "qwen3_moe": A("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**TEXT, **EXPERTS}, mlx=LOADS),
    "qwen3_next": A(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**TEXT, **EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": WIDTH},
        mlx=LOADS,
    ),
    "qwen3_5": A("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**TEXT, **DELTA_NET}),
    "qwen3_5_moe": A(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {**TEXT, **EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": WIDTH},
    ),
    "gemma": A("GemmaForCausalLM", "GemmaConfig", TEXT, mlx=LOADS),
    "gemma2": A("Gemma2ForCausalLM", "Gemma2Config", TEXT, mlx=LOADS),
    "gemma3_text": A("Gemma3ForCausalLM", "Gemma3TextConfig", {**TEXT, "num_hidden_layers": 6}, mlx=LOADS),
    "gemma4_text": A(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **TEXT,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "global_head_dim": 512,  # which mlx-lm takes for granted
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
        mlx=LOADS,
    ),
    "gemma3n_text": A(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **TEXT,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "intermediate_size": WIDE,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi": A("PhiForCausalLM", "PhiConfig", TEXT, mlx=LOADS),
    "phi3": A("Phi3ForCausalLM", "Phi3Config", TEXT, mlx=LOADS),
    "cohere": A("CohereForCausalLM", "CohereConfig", TEXT, mlx=LOADS),
    "cohere2": A("Cohere2ForCausalLM", "Cohere2Config", {**TEXT, "num_hidden_layers": 4}, mlx=LOADS),
    "olmo": A("OlmoForCausalLM", "OlmoConfig", TEXT, mlx="a package that it needs is not installed"),
    "olmo2": A("Olmo2ForCausalLM", "Olmo2Config", TEXT, mlx=LOADS),
    "olmo3": A("Olmo3ForCausalLM", "Olmo3Config", {**TEXT, **SLIDING}, mlx=LOADS),
    "olmoe": A("OlmoeForCausalLM", "OlmoeConfig", {**TEXT, **EXPERTS}, mlx=LOADS),
    "stablelm": A("StableLmForCausalLM", "StableLmConfig", TEXT, mlx=LOADS),
    "starcoder2": A("Starcoder2ForCausalLM", "Starcoder2Config", TEXT, mlx=LOADS),
    "granite": A("GraniteForCausalLM", "GraniteConfig", TEXT, mlx=LOADS),
    "granitemoe": A("GraniteMoeForCausalLM", "GraniteMoeConfig", {**TEXT, **EXPERTS}, mlx=LOADS),
    "granitemoehybrid": A(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **TEXT,
            **EXPERTS,
            "shared_intermediate_size": WIDTH,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
        mlx="Unknown layer type",
    ),
    "deepseek_v2": A(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **TEXT,
            **YARN,
            **EXPERTS,
            "n_routed_experts": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": WIDTH,
            "q_lora_rank": WIDTH,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
        mlx=LOADS,
    ),
    "deepseek_v3": A(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **TEXT,
            **EXPERTS,
            "n_routed_experts": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": WIDTH,
            "q_lora_rank": WIDTH,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
        mlx=LOADS,
    ),
    "kimi_linear": A(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **TEXT,
            **EXPERTS,
            "num_key_value_heads": 4,
            "kv_lora_rank": WIDTH,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
        },
        vllm=RESHAPED,
        torchao=RESHAPED,
        mlx="settings that config.json does not have: 'rope_theta' and 'linear_attn_config'",
    ),
    "glm": A("GlmForCausalLM", "GlmConfig", TEXT, mlx=LOADS),
    "glm4": A("Glm4ForCausalLM", "Glm4Config", TEXT, mlx=LOADS),
    "glm4_moe": A(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {**TEXT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        mlx=LOADS,
    ),
    "ernie4_5": A("Ernie4_5ForCausalLM", "Ernie4_5Config", TEXT, mlx=LOADS),
    "smollm3": A("SmolLM3ForCausalLM", "SmolLM3Config", TEXT, mlx=LOADS),
    "exaone4": A("Exaone4ForCausalLM", "Exaone4Config", {**TEXT, **SLIDING, "sliding_window_pattern": "LG"}, mlx=LOADS),
    "seed_oss": A("SeedOssForCausalLM", "SeedOssConfig", TEXT, mlx=LOADS),
    "nemotron": A("NemotronForCausalLM", "NemotronConfig", TEXT, mlx=LOADS),
    "arcee": A("ArceeForCausalLM", "ArceeConfig", TEXT),
    "persimmon": A("PersimmonForCausalLM", "PersimmonConfig", ENCODER),
    "helium": A("HeliumForCausalLM", "HeliumConfig", TEXT, mlx=LOADS),
    "hunyuan_v1_dense": A("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", TEXT, mlx=LOADS),
    "llama4_text": A(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**TEXT, **EXPERTS, "intermediate_size_mlp": WIDE, "interleave_moe_layer_step": 2},
        vllm=FUSED,
        mlx="no place for 7 tensors: lm_head.weight",
    ),
    "llama4": A(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "text_config": {
                **TEXT,
                **EXPERTS,
                "num_hidden_layers": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": WIDE,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {
                **IMAGE,
                "vision_output_dim": WIDTH,
                "projector_input_dim": WIDTH,
                "projector_output_dim": WIDTH,
            },
        },
        vllm=FUSED,
        mlx=LOADS,
    ),
    "laguna": A(
        "LagunaForCausalLM",
        "LagunaConfig",
        {**TEXT, **EXPERTS, "shared_expert_intermediate_size": WIDTH},
        torchao=RENAMED,
        mlx=LOADS,
    ),
    "hy_v3": A("HYV3ForCausalLM", "HYV3Config", {**TEXT, **EXPERTS}, torchao=RENAMED),
    "exaone_moe": A(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {**TEXT, **EXPERTS},
        mlx="settings that config.json does not have: 'is_moe_layer'",
    ),
    "hrm_text": A("HrmTextForCausalLM", "HrmTextConfig", TEXT, vllm=RESHAPED, torchao=RESHAPED),
    "gpt_oss": A(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**TEXT, **EXPERTS, "intermediate_size": WIDTH, "sliding_window": 32},
        mlx=LOADS,
    ),
    "jamba": A(
        "JambaForCausalLM",
        "JambaConfig",
        {
            **TEXT,
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 16,
        },
        mlx=LOADS,
    ),
    "bamba": A(
        "BambaForCausalLM",
        "BambaConfig",
        {
            **TEXT,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "zamba2": A(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **TEXT,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_headdim": 32,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "attention_head_dim": 64,
            "num_mem_blocks": 1,
        },
    ),
    "nemotron_h": A(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **TEXT,
            **EXPERTS,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": WIDTH,
            "n_group": 1,
            "topk_group": 1,
        },
        mlx=LOADS,
    ),
    "mamba": A("MambaForCausalLM", "MambaConfig", MAMBA, mlx=LOADS),
    "mamba2": A(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**MAMBA, "num_heads": 8, "head_dim": 32, "n_groups": 1},
        mlx=LOADS,
    ),
    "falcon_mamba": A("FalconMambaForCausalLM", "FalconMambaConfig", MAMBA, mlx=LOADS),
    "falcon_h1": A(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **TEXT,
            "mamba_d_ssm": WIDTH,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
        mlx=LOADS,
    ),
    "rwkv": A(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "attention_hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "intermediate_size": WIDE,
            "context_length": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        torchao=DIRECTLY,
    ),
    "recurrent_gemma": A(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {
            **TEXT,
            "num_key_value_heads": 1,
            "lru_width": WIDTH,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 32,
        },
        mlx=LOADS,
    ),
    "lfm2": A(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**TEXT, "layer_types": ["conv", "full_attention"]},
        mlx=LOADS,
    ),
    "minimax": A(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**TEXT, **EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 32},
        mlx="does not have: 'shared_intermediate_size' and 'rotary_dim'",
    ),
    "clip": A(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**ENCODER, "projection_dim": WIDTH}, "vision_config": IMAGE, "projection_dim": WIDTH},
        "image and ids",
    ),
    "siglip": A(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**ENCODER, "projection_size": WIDTH}, "vision_config": IMAGE},
        "image and ids",
    ),
    "vit": A("ViTForImageClassification", "ViTConfig", IMAGE, "image", torchao=RENAMED),
    "deit": A("DeiTForImageClassification", "DeiTConfig", IMAGE, "image", torchao=RENAMED),
    "beit": A("BeitForImageClassification", "BeitConfig", IMAGE, "image", torchao=RENAMED),
    "dinov2": A("Dinov2Model", "Dinov2Config", {**IMAGE, "mlp_ratio": 2}, "image", vllm=RESHAPED, torchao=RESHAPED),
    "dinov3_vit": A("DINOv3ViTModel", "DINOv3ViTConfig", IMAGE, "image", torchao=RENAMED),
    "swin": A(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": WIDTH,
            "depths": [1, 1],
            "num_heads": [4, 4],
            "window_size": 4,
        },
        "image",
        torchao=RENAMED,
    ),
    "wav2vec2": A("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, "sound"),
    "hubert": A("HubertForCTC", "HubertConfig", SPEECH, "sound"),
    "wavlm": A("WavLMForCTC", "WavLMConfig", SPEECH, "sound", torchao=DIRECTLY),
    "blip": A(
        "BlipForConditionalGeneration",
        "BlipConfig",
        {
            "text_config": {**ENCODER, "encoder_hidden_size": WIDTH},
            "vision_config": IMAGE,
            "projection_dim": WIDTH,
            "image_text_hidden_size": WIDTH,
        },
        "image and ids",
    ),
    "llava": A(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **IMAGE},
            "image_token_index": 99,
            "vision_feature_layer": -1,
        },
        mlx=LOADS,
    ),
    "llava with dinov2": A(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "dinov2", **IMAGE, "mlp_ratio": 2},
            "image_token_index": 99,
            "vision_feature_layer": -1,
        },
        vllm=RESHAPED,
        mlx=LOADS,
    ),
    "mistral3": A(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", **TEXT, **UNTIED},
            **UNTIED,
            "vision_config": {"model_type": "pixtral", **IMAGE},
            "image_token_index": 99,
            "vision_feature_layer": -1,
        },
        mlx=LOADS,
    ),
    "paligemma": A(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": {"model_type": "gemma", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **IMAGE},
            "image_token_index": 99,
            "projection_dim": WIDTH,
        },
    ),
    "gemma3": A(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**TEXT, "num_hidden_layers": 6},
            "vision_config": IMAGE,
            "image_token_index": 99,
            "mm_tokens_per_image": 4,
            "vocab_size": VOCABULARY,
        },
        mlx=LOADS,
    ),
    "qwen2_vl": A(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**TEXT, **MROPE, **UNTIED},
            **UNTIED,
            "vision_config": QWEN_VISION | {"hidden_size": WIDTH},
        },
        mlx=LOADS,
    ),
    "qwen2_5_vl": A(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**TEXT, **MROPE, **UNTIED},
            **UNTIED,
            "vision_config": QWEN_VISION,
        },
        mlx=LOADS,
    ),
    "qwen3_vl": A(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"text_config": {**TEXT, **UNTIED}, **UNTIED, "vision_config": QWEN_VISION},
        mlx=LOADS,
    ),
    "qwen3_vl_moe": A(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {"text_config": {**TEXT, **EXPERTS, **UNTIED}, **UNTIED, "vision_config": QWEN_VISION},
        mlx="norm_topk_prob",
    ),
    "qwen3_5 with images": A(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": {**TEXT, **DELTA_NET}, "vision_config": QWEN_VISION},
        mlx=LOADS,
    ),
    "kimi_k25": A(
        "Kimi_K25ForConditionalGeneration",
        "Kimi_K25Config",
        {
            "text_config": {
                "model_type": "deepseek_v3",
                **TEXT,
                **EXPERTS,
                **UNTIED,
                "n_routed_experts": 4,
                "num_key_value_heads": 4,
                "kv_lora_rank": WIDTH,
                "q_lora_rank": WIDTH,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 16,
                "head_dim": 16,
                "v_head_dim": 32,
                "first_k_dense_replace": 1,
                "n_group": 2,
                "topk_group": 1,
            },
            **UNTIED,
            "vision_config": {
                "hidden_size": WIDTH,
                "intermediate_size": WIDE,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "patch_size": 8,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "pos_emb_time": 4,
            },
            "image_token_id": 99,
            "projection_hidden_size": WIDTH,
        },
        torchao=RENAMED,
        mlx="its model has no place for 40 tensors",
    ),
    "lfm2_vl": A(
        "Lfm2VlForConditionalGeneration",
        "Lfm2VlConfig",
        {
            "text_config": {
                "model_type": "lfm2",
                **TEXT,
                "layer_types": ["conv", "full_attention"],
                "block_ff_dim": WIDE,
            },
            "vision_config": {"model_type": "siglip2_vision_model", **IMAGE, "num_patches": 16},
            "image_token_id": 99,
        },
    ),
    "idefics3": A(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": IMAGE, "image_token_id": 99},
    ),
}


# What the page says of a pattern of refusal.
IN_SHORT = {
    LOADS: "yes",
    TRANSPOSED: "no: its weights are stored transposed",
    FUSED: "no: transformers splits its experts",
    RESHAPED: "no: transformers cuts or joins its weights",
    RENAMED: "no: transformers renames its layers",
    DIRECTLY: "no: it computes with its weights directly",
    UNKNOWN_TO_MLX: "no",
}
BEGIN, END = "<!-- architectures, from tests/architectures -->\n\n", "\n<!-- /architectures -->"


def markdown() -> str:
    """The table of docs/exports.md: architectures with the same outcomes share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, about in ARCHITECTURES.items():
        refusals = (IN_SHORT[about.vllm], IN_SHORT[about.torchao], IN_SHORT.get(about.mlx, "refused by mlx-lm"))
        rows.setdefault(refusals, []).append(name)
    lines = ["| architectures | vllm | torchao-int4 | mlx |", "|---|---|---|---|"]
    ordered = sorted(rows.items(), key=lambda row: ([cell != "yes" for cell in row[0]], -len(row[1])))
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in ordered]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown()}{END}{after}"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "exports.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
