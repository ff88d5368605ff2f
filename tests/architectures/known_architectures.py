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
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDE, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ENCODER = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": WIDE, "decoder_ffn_dim": WIDE,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip
BLT: dict[str, Any] = {**ENCODER, "num_key_value_heads": 4, "hidden_size_global": WIDTH, "tie_word_embeddings": False}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 16, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": WIDTH, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
YARN: dict[str, Any] = {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": WIDE, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 16, "projection_dim": WIDTH,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    **ENCODER, "conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 64, "embed_dim": 64, "intermediate_size": 128, "num_heads": 4,
    "out_hidden_size": WIDTH, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
QWEN_VL: dict[str, Any] = {**UNTIED, "text_config": {**TEXT, **UNTIED}, "vision_config": QWEN_VISION}
SEEING: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "llama"}, "image_token_index": 99, "vision_feature_layer": -1,
}  # fmt: skip
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 32, "d_ff": WIDE, "num_layers": 2, "num_heads": 4,
}  # fmt: skip
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
# Multi-head latent attention and experts in groups, of DeepSeek's models.
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": WIDTH, "q_lora_rank": WIDTH, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
QWEN4: dict[str, Any] = {
    **TEXT, **EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": WIDTH, "hc_count": 2, "hc_lowrank": 16,
    "ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32,
    "indexer_budget": 4, "indexer_compress_ratio": 2,
}  # fmt: skip
MUSE: dict[str, Any] = {
    "out_hidden_size": 4 * WIDTH, "projector_hidden_size": WIDTH,
    "vision_config": {**IMAGE, "patch_size": 8, "pos_emb_height": 4, "pos_emb_width": 4},
}  # fmt: skip
INKLING: dict[str, Any] = {
    **TEXT, **EXPERTS, "n_routed_experts": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 32, "sliding_window_size": 4, "d_rel": 8, "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip
LOADS = "loads"
UNKNOWN_TO_MLX = "it has no model of type"
TRANSPOSED = "it stores its linear weights transposed"
RESHAPED = "transformers cuts or joins its weights"
RENAMED = "transformers renames its layers"
DIRECTLY = "computes with its weights directly"
# vLLM is not here; test_vllm_formats.py compares files of Qwen3 VL with those of its text model.
IN_VLLM = "written for vLLM alone"
BOTH_WAYS = "attends both ways"
ON_METAL = "written for Macs alone"  # mlx-lm computes it by a kernel that there is for Metal only


@dataclass(frozen=True)
class Architecture:
    """An architecture, and what the targets make of it.

    model, config: names of its classes in transformers
    settings: arguments of the config
    takes: what the model is called with: "ids", "seq2seq", "image", "image and ids", "sound" or "features"
    expected: what is expected of each target: LOADS, IN_VLLM, ON_METAL, or a pattern of its refusal
    published: patterns in the names of tensors that transformers saves, and what published files have in their place
    """

    model: str
    config: str
    settings: dict[str, Any]
    takes: str
    expected: dict[str, str]
    published: dict[str, str]


def A(
    stem: str,
    *groups: dict[str, Any],
    head: str = "ForCausalLM",
    config: str | None = None,
    takes: str = "ids",
    vllm: str = LOADS,
    torchao: str = LOADS,
    mlx: str = UNKNOWN_TO_MLX,
    published: dict[str, str] | None = None,
    **settings: Any,
) -> Architecture:
    """Return an architecture whose classes are named by a stem, with the settings of some groups and its own."""
    merged = {key: value for group in (*groups, settings) for key, value in group.items()}
    expected = {"bf16": LOADS, "vllm": vllm, "torchao": torchao, "mlx": mlx}
    return Architecture(f"{stem}{head}", f"{config or stem}Config", merged, takes, expected, published or {})


GENERATES = "ForConditionalGeneration"
ARCHITECTURES: dict[str, Architecture] = {
    "bert": A("Bert", ENCODER, head="ForMaskedLM"),
    "modernbert": A("ModernBert", ENCODER, head="ForMaskedLM", cls_token_id=1, sep_token_id=2),
    "electra": A("Electra", ENCODER, head="ForMaskedLM", embedding_size=WIDE),
    "rembert": A("RemBert", ENCODER, head="ForMaskedLM", input_embedding_size=WIDE, output_embedding_size=WIDE),
    # The layers of its four transformers have the same names; 32 does not divide the rows of one of them.
    "blt": A(
        "Blt", TOKENS, BLT, encoder_config={**BLT, "intermediate_size": 150}, decoder_config=BLT, global_config=BLT,
        patcher_config=BLT, encoder_hash_byte_group_vocab=64, encoder_hash_byte_group_size=[3], use_cache=False,
    ),
    "roberta": A("Roberta", ENCODER, head="ForMaskedLM"),
    "camembert": A("Camembert", ENCODER, head="ForMaskedLM"),
    "xlm-roberta": A("XLMRoberta", ENCODER, head="ForMaskedLM"),
    "distilbert": A(
        "DistilBert", head="ForMaskedLM", vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=WIDE, n_layers=2, n_heads=4,
        max_position_embeddings=64
    ),
    "eurobert": A("EuroBert", TEXT, head="ForMaskedLM"),
    "nomic_bert": A("NomicBert", ENCODER, head="Model", vllm=IN_VLLM, torchao=RESHAPED),
    "jina_embeddings_v3": A("JinaEmbeddingsV3", ENCODER, head="ForMaskedLM", vllm=RESHAPED, torchao=RESHAPED),
    "EmbeddingGemma": A(
        "Gemma3Text", TEXT, head="Model", config="Gemma3Text", mlx=BOTH_WAYS, use_bidirectional_attention=True
    ),
    "embedding_gemma2": A(
        "EmbeddingGemma2", head="Model",
        text_config={**TEXT, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    ),
    "gte": A("Gte", ENCODER, head="ForMaskedLM", vllm=RESHAPED, torchao=RESHAPED),
    "t5": A("T5", T5, head=GENERATES, takes="seq2seq"),
    "mt5": A("MT5", T5, head=GENERATES, takes="seq2seq"),
    "bart": A("Bart", SEQ2SEQ, head=GENERATES, takes="seq2seq"),
    "whisper": A(
        "Whisper", SEQ2SEQ, head=GENERATES, takes="features", num_mel_bins=16, max_source_positions=32,
        max_target_positions=32
    ),
    "gpt2": A("GPT2", GPT, head="LMHeadModel", vllm=TRANSPOSED, torchao=TRANSPOSED, mlx=LOADS),
    "gpt_neo": A(
        "GPTNeo", TOKENS, hidden_size=WIDTH, num_layers=2, num_heads=4, intermediate_size=WIDE,
        max_position_embeddings=64, attention_types=[[["global", "local"], 1]], window_size=8
    ),
    "gpt_neox": A("GPTNeoX", ENCODER, mlx=LOADS, intermediate_size=512),
    "gptj": A("GPTJ", GPT, mlx=LOADS, rotary_dim=16),
    "gpt_bigcode": A("GPTBigCode", GPT, mlx=r"\(TypeError in gpt_bigcode.py, line \d+\)"),
    "openai-gpt": A("OpenAIGPT", GPT, head="LMHeadModel", vllm=TRANSPOSED, torchao=TRANSPOSED),
    "dbrx": A(
        "Dbrx", mlx=LOADS, vocab_size=VOCABULARY, d_model=WIDTH, n_heads=4, n_layers=2, max_seq_len=64,
        ffn_config={"ffn_hidden_size": WIDTH, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
    ),
    "jetmoe": A("JetMoe", TEXT, EXPERTS, kv_channels=32),
    "aria_text": A("AriaText", TEXT, intermediate_size=WIDTH, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "bloom": A("Bloom", TOKENS, hidden_size=WIDTH, n_layer=2, n_head=4),
    "falcon": A("Falcon", ENCODER, torchao=DIRECTLY, alibi=False, new_decoder_architecture=False),
    "llama": A("Llama", TEXT, mlx=LOADS),
    "llama with a tied head": A("Llama", TEXT, mlx=LOADS, tie_word_embeddings=True),
    "mistral": A("Mistral", TEXT, mlx=LOADS),
    "mixtral": A("Mixtral", TEXT, EXPERTS, mlx=LOADS),
    "phimoe": A("Phimoe", TEXT, EXPERTS, mlx=LOADS, attention_bias=True, lm_head_bias=True),
    "qwen2": A("Qwen2", TEXT, mlx=LOADS),
    "qwen3": A("Qwen3", TEXT, mlx=LOADS),
    "qwen2_moe": A("Qwen2Moe", TEXT, EXPERTS, mlx=LOADS, shared_expert_intermediate_size=WIDTH),
    "qwen3_moe": A("Qwen3Moe", TEXT, EXPERTS, mlx=LOADS),
    "qwen3_next": A("Qwen3Next", TEXT, EXPERTS, DELTA_NET, mlx=LOADS, shared_expert_intermediate_size=WIDTH),
    "qwen3_5": A("Qwen3_5", TEXT, DELTA_NET, config="Qwen3_5Text", mlx=LOADS),
    "qwen3_5_moe": A(
        "Qwen3_5Moe", TEXT, EXPERTS, DELTA_NET, config="Qwen3_5MoeText", mlx=LOADS,
        shared_expert_intermediate_size=WIDTH
    ),
    "gemma": A("Gemma", TEXT, mlx=LOADS),
    "gemma2": A("Gemma2", TEXT, mlx=LOADS),
    "gemma3_text": A("Gemma3", TEXT, config="Gemma3Text", mlx=LOADS, num_hidden_layers=6),
    "gemma4_text": A(
        "Gemma4", TEXT, SLIDING, config="Gemma4Text", mlx=LOADS, global_head_dim=512, hidden_size_per_layer_input=64,
        vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=0
    ),
    "gemma3n_text": A(
        "Gemma3n", TEXT, config="Gemma3nText", mlx=LOADS, vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": A("Phi", TEXT, mlx=LOADS),
    "phi3": A("Phi3", TEXT, mlx=LOADS),
    "cohere": A("Cohere", TEXT, mlx=LOADS),
    "cohere2": A("Cohere2", TEXT, mlx=LOADS, num_hidden_layers=4),
    "olmo": A("Olmo", TEXT, mlx="a package that it needs is not installed"),
    "olmo2": A("Olmo2", TEXT, mlx=LOADS),
    "olmo3": A("Olmo3", TEXT, SLIDING, mlx=LOADS),
    "olmoe": A("Olmoe", TEXT, EXPERTS, mlx=LOADS),
    "stablelm": A("StableLm", TEXT, mlx=LOADS),
    "starcoder2": A("Starcoder2", TEXT, mlx=LOADS),
    "granite": A("Granite", TEXT, mlx=LOADS),
    "granitemoe": A("GraniteMoe", TEXT, EXPERTS, mlx=LOADS),
    "granitemoehybrid": A(
        "GraniteMoeHybrid", TEXT, EXPERTS, mlx=LOADS, shared_intermediate_size=WIDTH,
        layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16
    ),
    "deepseek_v2": A(
        "DeepseekV2", TEXT, MLA, YARN, mlx=LOADS, moe_intermediate_size=WIDTH, num_experts=4, num_local_experts=4,
        num_experts_per_tok=2
    ),
    "deepseek_v3": A("DeepseekV3", TEXT, EXPERTS, MLA, mlx=LOADS),
    "deepseek_v32": A("DeepseekV32", TEXT, EXPERTS, MLA, mlx=LOADS, index_n_heads=4, index_head_dim=64),
    "deepseek_v4": A(
        "DeepseekV4", TEXT, EXPERTS, torchao=DIRECTLY, num_key_value_heads=1, head_dim=64, n_routed_experts=4,
        q_lora_rank=WIDTH, o_groups=2, o_lora_rank=WIDTH, index_n_heads=4, index_head_dim=32,
        layer_types=["sliding_attention", "compressed_sparse_attention"], mlp_layer_types=["hash_moe", "moe"],
        published={r"^model\.": "", r"^embed_tokens": "embed", r"^hc_head\.hc_": "hc_head_"}
    ),
    "mimo_v2_flash": A("MiMoV2Flash", TEXT, EXPERTS, SLIDING, mlx=LOADS, n_routed_experts=4, v_head_dim=32),
    "axk2": A("AXK2", TEXT, EXPERTS, MLA),
    "kimi_linear": A(
        "KimiLinear", TEXT, EXPERTS, vllm=IN_VLLM, mlx=LOADS, num_key_value_heads=4, kv_lora_rank=WIDTH,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, linear_head_dim=32, linear_num_heads=4,
        num_experts_per_tok=3, layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        published={r"(layers\.0)\.block_sparse_moe": r"\1.mlp"}
    ),
    "glm": A("Glm", TEXT, mlx="rotary embeddings of this model .glm."),
    "glm4": A("Glm4", TEXT, mlx=LOADS),
    "glm4_moe": A(
        "Glm4Moe", TEXT, EXPERTS, mlx=LOADS, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "ernie4_5": A("Ernie4_5", TEXT, mlx=LOADS),
    "ernie4_5_moe": A("Ernie4_5_Moe", TEXT, mlx=LOADS, moe_num_experts=4, moe_k=2, moe_intermediate_size=WIDTH),
    "arcee": A("Arcee", TEXT),
    "afmoe": A("Afmoe", TEXT, EXPERTS, SLIDING, mlx=LOADS, num_dense_layers=1, num_shared_experts=1),
    "apertus": A("Apertus", TEXT, mlx=LOADS),
    "helium": A("Helium", TEXT, mlx=LOADS),
    "internlm3": A("Llama", TEXT, config="InternLM3", mlx=LOADS),
    "mellum": A("Mellum", TEXT, EXPERTS, mlx=LOADS),
    "solar_open": A("SolarOpen", TEXT, EXPERTS, mlx=LOADS, n_routed_experts=4),
    "seed_oss": A("SeedOss", TEXT, mlx=LOADS),
    "ministral3": A("Ministral3", TEXT, mlx=LOADS),
    "granitemoeshared": A("GraniteMoeShared", TEXT, EXPERTS, shared_intermediate_size=WIDTH),
    "dots1": A(
        "Dots1", TEXT, EXPERTS, mlx=LOADS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
        topk_group=1
    ),
    "glm4_moe_lite": A("Glm4MoeLite", TEXT, MLA, mlx=LOADS),
    "glm_moe_dsa": A(
        "GlmMoeDsa", TEXT, MLA, mlx=LOADS, num_experts_per_tok=2, moe_intermediate_size=WIDTH, index_n_heads=4,
        index_head_dim=64
    ),
    "minimax_m2": A("MiniMaxM2", TEXT, EXPERTS, mlx=LOADS),
    "mistral4": A("Mistral4", TEXT, MLA, mlx=LOADS, num_experts_per_tok=2, head_dim=48, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3}),
    "hunyuan_v1_moe": A("HunYuanMoEV1", TEXT, num_experts=4, moe_topk=2),
    "lfm2_moe": A(
        "Lfm2Moe", TEXT, EXPERTS, mlx=LOADS, layer_types=["conv", "full_attention"], num_dense_layers=1
    ),
    "smollm3": A("SmolLM3", TEXT, mlx=LOADS),
    "exaone4": A("Exaone4", TEXT, SLIDING, mlx=LOADS, sliding_window_pattern="LG"),
    "nemotron": A("Nemotron", TEXT, mlx=LOADS),
    "hunyuan_v1_dense": A("HunYuanDenseV1", TEXT, mlx=LOADS),
    "llama4_text": A(
        "Llama4", TEXT, EXPERTS, config="Llama4Text", mlx="no place for 7 tensors: lm_head.weight",
        intermediate_size_mlp=WIDE, interleave_moe_layer_step=2
    ),
    "llama4": A(
        "Llama4", head=GENERATES, mlx=LOADS,
        text_config={**TEXT, **EXPERTS, "num_hidden_layers": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": WIDE,
            "interleave_moe_layer_step": 2},
        vision_config={**IMAGE, "vision_output_dim": WIDTH, "projector_input_dim": WIDTH, "projector_output_dim": WIDTH}
    ),
    "laguna": A("Laguna", TEXT, EXPERTS, mlx=LOADS, shared_expert_intermediate_size=WIDTH),
    "hy_v3": A("HYV3", TEXT, EXPERTS),
    "exaone_moe": A("ExaoneMoe", TEXT, EXPERTS, mlx=LOADS),
    "hrm_text": A("HrmText", TEXT, vllm=RESHAPED, torchao=RESHAPED),
    "gpt_oss": A("GptOss", TEXT, EXPERTS, mlx=LOADS, intermediate_size=WIDTH, sliding_window=32),
    "jamba": A(
        "Jamba", TEXT, EXPERTS, mlx="weighs the experts of a jamba by a softmax", attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16, mamba_dt_rank=16
    ),
    "bamba": A("Bamba", TEXT, MAMBA2, attn_layer_indices=[1]),
    "zamba2": A(
        "Zamba2", TEXT, num_key_value_heads=4, mamba_d_state=16, mamba_headdim=32, n_mamba_heads=8, mamba_ngroups=1,
        layers_block_type=["mamba", "hybrid"], hybrid_layer_ids=[1], attention_head_dim=64, num_mem_blocks=1
    ),
    "nemotron_h": A(
        "NemotronH", TEXT, EXPERTS, mlx=LOADS, layers_block_type=["mamba", "attention", "moe"], mamba_num_heads=8,
        mamba_head_dim=32, ssm_state_size=16, n_groups=1, n_routed_experts=4, moe_shared_expert_intermediate_size=WIDTH,
        n_group=1, topk_group=1
    ),
    "mamba": A("Mamba", MAMBA, mlx=LOADS),
    "mamba2": A("Mamba2", MAMBA, mlx=LOADS, num_heads=8, head_dim=32, n_groups=1),
    "falcon_mamba": A("FalconMamba", MAMBA, mlx=LOADS),
    "falcon_h1": A("FalconH1", TEXT, MAMBA2, mlx=LOADS, mamba_d_ssm=WIDTH, mamba_n_heads=4),
    "olmo_hybrid": A("OlmoHybrid", TEXT, DELTA_NET, vllm=IN_VLLM, mlx="no place for 7 tensors"),
    "rwkv": A(
        "Rwkv", TOKENS, torchao=DIRECTLY, hidden_size=WIDTH, attention_hidden_size=WIDTH, num_hidden_layers=2,
        intermediate_size=WIDE, context_length=64
    ),
    "recurrent_gemma": A(
        "RecurrentGemma", TEXT, mlx=LOADS, num_key_value_heads=1, lru_width=WIDTH,
        block_types=["recurrent", "attention"], attention_window_size=32
    ),
    "lfm2": A("Lfm2", TEXT, mlx=LOADS, layer_types=["conv", "full_attention"]),
    "minimax": A(
        "MiniMax", TEXT, EXPERTS, mlx="does not have: 'shared_intermediate_size' and 'rotary_dim'",
        layer_types=["linear_attention", "full_attention"], block_size=32
    ),
    "clip": A(
        "CLIP", head="Model", takes="image and ids", text_config={**ENCODER, "projection_dim": WIDTH},
        vision_config=IMAGE, projection_dim=WIDTH
    ),
    "siglip": A(
        "Siglip", head="Model", takes="image and ids", text_config={**ENCODER, "projection_size": WIDTH},
        vision_config=IMAGE
    ),
    "vit": A("ViT", IMAGE, head="ForImageClassification", takes="image", torchao=RENAMED),
    "beit": A("Beit", IMAGE, head="ForImageClassification", takes="image", torchao=RENAMED),
    "dinov2": A("Dinov2", IMAGE, head="Model", takes="image", vllm=RESHAPED, torchao=RESHAPED, mlp_ratio=2),
    "dinov3_vit": A("DINOv3ViT", IMAGE, head="Model", takes="image", torchao=RENAMED),
    "swin": A(
        "Swin", head="ForImageClassification", takes="image", torchao=RENAMED, image_size=32, patch_size=4,
        embed_dim=WIDTH, depths=[1, 1], num_heads=[4, 4], window_size=4
    ),
    "wav2vec2": A("Wav2Vec2", SPEECH, head="ForCTC", takes="sound"),
    "wavlm": A("WavLM", SPEECH, head="ForCTC", takes="sound", torchao=DIRECTLY),
    "blip": A(
        "Blip", head=GENERATES, takes="image and ids", text_config={**ENCODER, "encoder_hidden_size": WIDTH},
        vision_config=IMAGE, projection_dim=WIDTH, image_text_hidden_size=WIDTH
    ),
    "llava": A("Llava", SEEING, head=GENERATES, mlx=LOADS, vision_config={**IMAGE, "model_type": "clip_vision_model"}),
    "llava with dinov2": A(
        "Llava", SEEING, head=GENERATES, vllm=RESHAPED, mlx=LOADS,
        vision_config={**IMAGE, "model_type": "dinov2", "mlp_ratio": 2}
    ),
    "llava_onevision": A(
        "LlavaOnevision", SEEING, head=GENERATES, mlx=LOADS, text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**IMAGE, "model_type": "siglip_vision_model"}
    ),
    "internvl": A(
        "InternVL", head=GENERATES, mlx=LOADS, text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**IMAGE, "image_size": [32, 32], "patch_size": [16, 16]}, image_token_id=99
    ),
    "mistral3": A(
        "Mistral3", SEEING, UNTIED, head=GENERATES, mlx=LOADS, text_config={**TEXT, **UNTIED, "model_type": "mistral"},
        vision_config={**IMAGE, "model_type": "pixtral"}
    ),
    "paligemma": A(
        "PaliGemma", head=GENERATES, text_config={**TEXT, "model_type": "gemma"},
        vision_config={**IMAGE, "model_type": "siglip_vision_model"}, image_token_index=99, projection_dim=WIDTH
    ),
    "gemma3": A(
        "Gemma3", head=GENERATES, mlx=LOADS, text_config={**TEXT, "num_hidden_layers": 6}, vision_config=IMAGE,
        image_token_index=99, mm_tokens_per_image=4, vocab_size=VOCABULARY
    ),
    "qwen2_vl": A(
        "Qwen2VL", QWEN_VL, head=GENERATES, mlx=LOADS, text_config={**TEXT, **MROPE, **UNTIED},
        vision_config={**QWEN_VISION, "hidden_size": WIDTH}
    ),
    "qwen2_5_vl": A("Qwen2_5_VL", QWEN_VL, head=GENERATES, mlx=LOADS, text_config={**TEXT, **MROPE, **UNTIED}),
    "qwen2_5_omni_thinker": A(
        "Qwen2_5OmniThinker", head=GENERATES, text_config={**TEXT, **MROPE}, vision_config=QWEN_VISION,
        audio_config={"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
            "output_dim": WIDTH, "num_mel_bins": 16}
    ),
    "glm4v": A(
        "Glm4v", QWEN_VL, head=GENERATES, text_config={**TEXT, **MROPE, **UNTIED},
        vision_config={**QWEN_VISION, "image_size": 32, "patch_size": 8}
    ),
    "qwen3_vl": A("Qwen3VL", QWEN_VL, head=GENERATES, mlx=LOADS),
    "qwen3_vl_moe": A(
        "Qwen3VLMoe", QWEN_VL, head=GENERATES, vllm=IN_VLLM, mlx=LOADS,
        text_config={**TEXT, **EXPERTS, **UNTIED},
    ),
    "qwen3_5 with images": A(
        "Qwen3_5", head=GENERATES, mlx=LOADS, text_config={**TEXT, **DELTA_NET}, vision_config=QWEN_VISION
    ),
    "qwen3_5_moe with images": A(
        "Qwen3_5Moe", head=GENERATES, mlx=LOADS, vision_config=QWEN_VISION,
        text_config={**TEXT, **EXPERTS, **DELTA_NET, "num_experts_per_tok": 3, "shared_expert_intermediate_size": WIDTH}
    ),
    "phi4_multimodal": A(
        "Phi4Multimodal", TEXT, vision_config={**IMAGE, "crop_size": 32},
        audio_config={"hidden_size": WIDTH, "intermediate_size": WIDE, "num_blocks": 1, "num_attention_heads": 4,
            "input_size": 16, "nemo_conv_channels": 32, "ext_pw_out_channel": WIDTH,
            "depthwise_separable_out_channel": WIDTH}
    ),
    "step3p7": A(
        "Step3p7", head=GENERATES, vllm=IN_VLLM, mlx=LOADS, vision_config={**IMAGE, "mlp_ratio": 2.0},
        text_config={**TEXT, **EXPERTS, **SLIDING, "n_routed_experts": 4, "share_expert_dim": WIDTH,
            "mlp_layer_types": ["dense", "sparse"]}
    ),
    "minimax_m3_vl": A(
        "MiniMaxM3Sparse", config="MiniMaxM3VL", head=GENERATES, vllm=RESHAPED, torchao=RESHAPED, mlx=LOADS,
        text_config={**TEXT, **EXPERTS, "dense_intermediate_size": WIDE, "shared_intermediate_size": WIDTH,
            "index_head_dim": 32, "mlp_layer_types": ["dense", "sparse"], "rotary_dim": 16, "rope_parameters":
            {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        vision_config=IMAGE, projector_hidden_size=WIDTH
    ),
    "kimi_k25": A(
        "Kimi_K25", head=GENERATES, mlx=LOADS,
        published={r"^(language_model\.model)\.blocks": r"\1.layers", r"^model\.mm_projector": "mm_projector"},
        text_config={**TEXT, **EXPERTS, **MLA, "model_type": "deepseek_v3", "tie_word_embeddings": False},
        tie_word_embeddings=False,
        vision_config={"hidden_size": WIDTH, "intermediate_size": WIDE, "num_hidden_layers": 2,
            "num_attention_heads": 4, "patch_size": 8, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 4},
        image_token_id=99, projection_hidden_size=WIDTH
    ),
    "qwen4_exp": A("Qwen4Exp", QWEN4, config="Qwen4ExpText", vllm=IN_VLLM, torchao=RESHAPED),
    "qwen4_exp with images": A(
        "Qwen4Exp", head=GENERATES, text_config=QWEN4, vision_config=QWEN_VISION, vllm=IN_VLLM, torchao=RESHAPED
    ),
    "muse_glimmer": A("MuseGlimmer", MUSE, head=GENERATES, mlx=LOADS, text_config={**TEXT, "sliding_window": 4}),
    "muse_spark": A(
        "MuseSpark", MUSE, head=GENERATES, mlx=ON_METAL,  # which quantizes neither the first nor the last layer
        text_config={**TEXT, **EXPERTS, "num_hidden_layers": 3, "moe_hidden_size": WIDTH, "sliding_window": 4},
        audio_config={"patch_sizes": [16, 6, 5, 4], "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
            "out_hidden_size": WIDTH}
    ),
    "muse_spark with a dense layer": A(
        "MuseSpark", MUSE, head=GENERATES, mlx="Dense feed-forward layers are not supported",
        text_config={**TEXT, **EXPERTS, "moe_hidden_size": WIDTH, "mlp_layer_types": ["dense", "sparse"]},
        audio_config={"patch_sizes": [16, 6, 5, 4], "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
            "out_hidden_size": WIDTH}
    ),
    "glm5_next": A(
        "Glm5Next", head=GENERATES, vllm=IN_VLLM, torchao=RENAMED,
        text_config={**TEXT, **EXPERTS, **MLA, "num_hidden_layers": 4, "qk_rope_head_dim": 0, "index_n_heads": 4,
            "index_head_dim": 32, "index_topk": 4, "index_kpool": 2, "linear_head_dim": 32, "linear_num_heads": 4,
            "hc_mult": 2, "n_group": 1, "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        vision_config={**QWEN_VISION, "image_size": 32, "patch_size": 8, "projection_intermediate_size": WIDTH}
    ),
    "hy_v4": A(
        "HYV4", TEXT, EXPERTS, MLA, torchao=RENAMED, n_group=1, num_hidden_layers=3, index_n_heads=4, index_head_dim=32,
        index_topk=4, hc_mult=2, indexer_types=["full", "shared", "full"]
    ),
    "inkling": A(
        "Inkling", INKLING, config="InklingText", mlp_layer_types=["dense", "sparse"]
    ),
    "inkling with images": A(
        "Inkling", head=GENERATES, vllm=RESHAPED, torchao=RESHAPED,
        text_config={**INKLING, "mlp_layer_types": ["dense", "sparse"]},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 8},
        vision_config={"patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    ),
    "inkling2": A(
        "Inkling2", INKLING, config="Inkling2Text", torchao=RENAMED, unpadded_vocab_size=VOCABULARY - 3,
        n_layers_per_attn_res_block=1
    ),
    "lfm2_vl": A(
        "Lfm2Vl", head=GENERATES, mlx=LOADS,
        text_config={**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_ff_dim": WIDE},
        vision_config={**IMAGE, "model_type": "siglip2_vision_model", "num_patches": 16}, image_token_id=99
    ),
    "idefics3": A(
        "Idefics3", head=GENERATES, mlx=LOADS, text_config={**TEXT, "model_type": "llama"}, vision_config=IMAGE,
        image_token_id=99
    ),
    "smolvlm": A(
        "SmolVLM", head=GENERATES, mlx=LOADS, text_config={**TEXT, "model_type": "llama"}, vision_config=IMAGE,
        image_token_id=99
    ),
}  # fmt: skip

# Types that transformers knows under another name, or with towers that need further packages: the architecture above
# that has their text model, and what published files have in the place of parts of its names.
OF_THE_HUB: dict[str, tuple[str, dict[str, str]]] = {
    "kimi_k2": ("deepseek_v3", {}), "mimo": ("qwen2", {}),
    "gemma3n": ("gemma3n_text", {r"^model\.": "model.language_model."}),
}  # fmt: skip

# Types that mlx-lm has and transformers has not: configurations, and the shapes of tensors by their published names.
_KDA = {f"self_attn.{p}_proj.weight": (WIDTH, WIDTH) for p in ("q", "k", "v", "o", "g")}
_KDA |= {f"self_attn.{p}_conv1d.weight": (WIDTH, 1, 4) for p in ("q", "k", "v")}
_KDA |= {"self_attn.f_a_proj.weight": (32, WIDTH), "self_attn.f_b_proj.weight": (WIDTH, 32)}
_KDA |= {"self_attn.b_proj.weight": (4, WIDTH), "self_attn.A_log": (4,), "self_attn.dt_bias": (WIDTH,)}
_KDA |= {"self_attn.o_norm.weight": (32,)}
_LATENT = {
    "self_attn.q_a_proj.weight": (WIDTH, WIDTH), "self_attn.q_a_layernorm.weight": (WIDTH,),
    "self_attn.q_b_proj.weight": (4 * 48, WIDTH), "self_attn.kv_a_proj_with_mqa.weight": (WIDTH + 16, WIDTH),
    "self_attn.kv_a_layernorm.weight": (WIDTH,), "self_attn.kv_b_proj.weight": (4 * 64, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, 4 * 32), "self_attn.g_proj.weight": (4 * 32, WIDTH),
}  # fmt: skip
_DENSE = {f"mlp.{p}_proj.weight": (WIDE, WIDTH) for p in ("gate", "up")} | {"mlp.down_proj.weight": (WIDTH, WIDE)}
_SPARSE = {
    f"experts.{e}.{w}.weight": (WIDTH, 64) if w != "w2" else (64, WIDTH) for e in range(4) for w in ("w1", "w2", "w3")
}
_SPARSE |= {"gate.weight": (4, WIDTH), "gate.e_score_correction_bias": (4,), "routed_expert_norm.weight": (64,)}
_SPARSE |= {"routed_expert_down_proj.weight": (64, WIDTH), "routed_expert_up_proj.weight": (WIDTH, 64)}
_SPARSE |= {f"shared_experts.{p}_proj.weight": (WIDTH, WIDTH) for p in ("gate", "up", "down")}
_EVERY = dict.fromkeys(
    ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"), (WIDTH,)
) | {"self_attention_res_proj": (1, WIDTH), "mlp_res_proj": (1, WIDTH)}  # fmt: skip
_LAYERS = [_KDA | _DENSE, _LATENT | {f"block_sparse_moe.{name}": shape for name, shape in _SPARSE.items()}]
OF_MLX_LM: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "kimi_k3": (
        {"text_config": {
            **TEXT, "model_type": "kimi_linear", "num_key_value_heads": 4, "hidden_act": "situ", "rms_norm_eps": 1e-5,
            "activation_situ_beta": 4.0, "activation_situ_linear_beta": 7.0, "attn_res_block_size": 1,
            "linear_attn_config": {
                "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2],
                "gate_lower_bound": -5.0, "use_full_rank_gate": True,
            },
            "q_lora_rank": WIDTH, "kv_lora_rank": WIDTH, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "mla_use_output_gate": True, "num_experts": 4, "num_experts_per_token": 2,
            "num_shared_experts": 1, "moe_intermediate_size": WIDTH, "first_k_dense_replace": 1,
            "routed_expert_hidden_size": 64, "latent_moe_use_norm": True,
        }},
        {f"language_model.{name}": shape for name, shape in {
            **{f"model.layers.{n}.{name}": shape for n, layer in enumerate(_LAYERS) for name, shape in layer.items()},
            **{f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in _EVERY.items()},
            "model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH),
            "model.norm.weight": (WIDTH,), "model.output_attn_res_norm.weight": (WIDTH,),
            "model.output_attn_res_proj.weight": (1, WIDTH),
        }.items()},
    ),
}  # fmt: skip


# What the page says of a pattern of refusal.
IN_SHORT = {
    LOADS: "yes", IN_VLLM: "written for vLLM alone: transformers does not load it",
    ON_METAL: "written: mlx-lm runs it on Metal alone",
    TRANSPOSED: "no: its weights are stored transposed",
    RESHAPED: "no: transformers cuts or joins its weights", RENAMED: "no: transformers renames its layers",
    DIRECTLY: "no: it computes with its weights directly", UNKNOWN_TO_MLX: "no",
}  # fmt: skip
BEGIN, END = "<!-- architectures, from tests/architectures -->\n\n", "\n<!-- /architectures -->"


def markdown() -> str:
    """The table of docs/exports.md: architectures with the same outcomes share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, about in ARCHITECTURES.items():
        outcomes = (about.expected[target] for target in ("vllm", "torchao", "mlx"))
        refusals = tuple(IN_SHORT.get(outcome, "refused by mlx-lm") for outcome in outcomes)
        rows.setdefault(refusals, []).append(name)
    lines = ["| architectures | vllm | torchao | mlx |", "|---|---|---|---|"]
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
