"""Tiny models of many architectures of transformers, with random weights, and inputs that they take."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

VOCABULARY = 256
IDS = [[5, 77, 3, 9, 100, 42, 7, 8]]
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **SPECIAL,
}
HEADS_OF_32 = {**TEXT, "head_dim": 32}
SMALL_EXPERTS = {**TEXT, "intermediate_size": 64}
LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
ROUTED = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128, **SPECIAL}
STATE_SPACE = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 8, **SPECIAL}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
SEQUENCE = {
    "vocab_size": VOCABULARY,
    "d_model": 128,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TEXT_TOWER = {**ENCODER, "hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 32, **SPECIAL}

# For each architecture, the class of the model and the arguments of its configuration.
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", TEXT),
    "mistral": ("MistralForCausalLM", TEXT),
    "qwen2": ("Qwen2ForCausalLM", TEXT),
    "qwen3": ("Qwen3ForCausalLM", HEADS_OF_32),
    "gemma": ("GemmaForCausalLM", HEADS_OF_32),
    "gemma2": ("Gemma2ForCausalLM", HEADS_OF_32),
    "gemma3": ("Gemma3ForCausalLM", HEADS_OF_32),
    "phi": ("PhiForCausalLM", TEXT),
    "phi3": ("Phi3ForCausalLM", TEXT),
    "stablelm": ("StableLmForCausalLM", TEXT),
    "starcoder2": ("Starcoder2ForCausalLM", TEXT),
    "olmo2": ("Olmo2ForCausalLM", TEXT),
    "cohere": ("CohereForCausalLM", TEXT),
    "granite": ("GraniteForCausalLM", TEXT),
    "glm": ("GlmForCausalLM", HEADS_OF_32),
    "smollm3": ("SmolLM3ForCausalLM", TEXT),
    "nemotron": ("NemotronForCausalLM", TEXT),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "openai-gpt": ("OpenAIGPTLMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 16}),
    "codegen": ("CodeGenForCausalLM", {**GPT, "n_ctx": 128, "rotary_dim": 16}),
    "ctrl": ("CTRLLMHeadModel", {**GPT, "dff": 256}),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {**TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "opt": (
        "OPTForCausalLM",
        {**TEXT, "ffn_dim": 256, "word_embed_proj_dim": 128},
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconForCausalLM", TEXT),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    ),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": VOCABULARY, "d_model": 128, "n_layer": 2, "n_head": 4}),
    "mixtral": ("MixtralForCausalLM", {**SMALL_EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**TEXT, **ROUTED, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**HEADS_OF_32, **ROUTED}),
    "olmoe": ("OlmoeForCausalLM", {**SMALL_EXPERTS, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**HEADS_OF_32, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {**HEADS_OF_32, "intermediate_size": 64, "intermediate_size_mlp": 128, "num_local_experts": 4},
    ),
    "granitemoe": ("GraniteMoeForCausalLM", {**SMALL_EXPERTS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeForCausalLM", {**SMALL_EXPERTS, "num_local_experts": 4}),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 128},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        {**SMALL_EXPERTS, "kv_channels": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "aria": (
        "AriaTextForCausalLM",
        {**SMALL_EXPERTS, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "glm4_moe": ("Glm4MoeForCausalLM", {**LATENT, "head_dim": 32}),
    "mamba": ("MambaForCausalLM", {**STATE_SPACE, "time_step_rank": 8}),
    "mamba2": ("Mamba2ForCausalLM", {**STATE_SPACE, "head_dim": 32, "num_heads": 8, "n_groups": 1}),
    "falcon_mamba": ("FalconMambaForCausalLM", {**STATE_SPACE, "time_step_rank": 8}),
    "falcon_h1": ("FalconH1ForCausalLM", {**TEXT, **MAMBA_HEADS, "mamba_d_ssm": 256}),
    "bamba": ("BambaForCausalLM", {**TEXT, **MAMBA_HEADS, "attn_layer_indices": [1]}),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **TEXT,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "use_mamba_kernels": False,
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            **TEXT,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {**TEXT, "num_key_value_heads": 1, "num_hidden_layers": 3, "lru_width": 128, "attention_window_size": 32},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "rescale_every": 1,
            "context_length": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", {**TEXT, "full_attn_idxs": [1]}),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", SEQUENCE),
    "pegasus": ("PegasusForConditionalGeneration", SEQUENCE),
    "marian": ("MarianMTModel", SEQUENCE),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**SEQUENCE, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 64},
    ),
    "bert": ("BertForMaskedLM", ENCODER),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 64}),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 64}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 128, "hidden_dim": 256, "n_layers": 2, "n_heads": 4},
    ),
    "modernbert": ("ModernBertForMaskedLM", {**ENCODER, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2}),
    "vit": ("ViTForImageClassification", VISION),
    "dinov2": ("Dinov2Model", VISION),
    "clip": ("CLIPModel", {"text_config": TEXT_TOWER, "vision_config": VISION, "projection_dim": 64}),
    "siglip": ("SiglipModel", {"text_config": TEXT_TOWER, "vision_config": VISION}),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            "vocab_size": 32,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "conv_dim": (32, 32),
            "conv_kernel": (8, 4),
            "conv_stride": (4, 2),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
}


def save_tiny_model(name: str, folder: Path) -> Path:
    """Save a tiny model of an architecture in BF16."""
    import torch
    import transformers

    kind, settings = TINY_MODELS[name]
    torch.manual_seed(20251)
    model = getattr(transformers, kind)
    made = model(model.config_class(**settings)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms of one and biases of zero would hide mistakes
            elif not parameter.any():
                parameter.normal_(0, 0.05)
    made.save_pretrained(folder)
    return folder


def inputs_of(model: Any) -> dict[str, Any]:
    """Return arguments for the forward of a model, in its dtype."""
    import torch

    taken = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(7)
    ids = torch.tensor(IDS)
    made = {
        "input_features": torch.randn(1, 16, 100, generator=generator),  # of speech, [1, bins, frames]
        "input_values": torch.randn(1, 800, generator=generator),  # of sound, [1, samples]
        "pixel_values": torch.randn(1, 3, 32, 32, generator=generator),
        "input_ids": ids,
        "decoder_input_ids": ids,
    }
    given = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in made.items()}
    return {name: value for name, value in given.items() if name in taken}


def output_of(model: Any) -> Any:
    """Return what a model makes of its inputs, f32."""
    import torch

    with torch.inference_mode():
        made = model(**inputs_of(model))
    names = ("logits", "logits_per_image", "last_hidden_state")
    return next(made[name] for name in names if made.get(name) is not None).float()
