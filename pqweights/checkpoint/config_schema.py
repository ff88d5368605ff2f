"""What the values of a config.json may be: the type and the range of every key that is read here.

A configuration is checked once, when it is opened (model_config), so that whatever reads it later can trust it.
The types are those of transformers' configuration classes; the bounds are far above every published model, and low
enough that nothing that is made in proportion to a value fills the memory. null stands for a key that is absent. Keys
that are not listed may hold anything: they are copied, not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pqweights.checkpoint.names import CONFIG_FILE, QUANT_METHOD
from pqweights.checkpoint.storage import Storage, read_json_object
from pqweights.common.documents import as_document
from pqweights.errors import SourceError
from pqweights.models.conventions import PARTS

QUANTIZATIONS = ("quantization_config", "compression_config", "quantization")
OTHER_PARTS = ("linear_attn_config", "attn_config")
# The keys that count layers; so many need no tensors of their own.
LAYER_COUNTS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers", "n_layer", "n_layers", "num_layers")
FEW_LAYERS = 512
# A component of a name that is a number.
_LONG_NUMBER = re.compile(r"\.(\d{4,})(?=\.)")
MOST_DIGITS = 9
# llama.cpp has room for 512 layers, and no model of 65,536 heads, experts or channels in a head is known.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH, MOST_TOKENS, MOST_POSITIONS = 4096, 1 << 16, 1 << 24, 1 << 28, (1 << 31) - 1

Truth, Object = bool, dict[str, Any]
Text = Annotated[str, Meta(max_length=200)]  # a name, by which modules and files may be looked for
Texts = list[Text]
Layers = Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
Heads = Annotated[int, Meta(ge=-1, le=MOST_HEADS)]
Width = Annotated[int, Meta(ge=-1, le=MOST_WIDTH)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Token = Annotated[int, Meta(ge=-MOST_TOKENS, le=MOST_TOKENS)]
Positions = Annotated[float, Meta(ge=-1, le=MOST_POSITIONS)]
Window = Annotated[int, Meta(ge=-1, le=MOST_POSITIONS)]
Factor = Annotated[float, Meta(ge=-1e6, le=1e6)]
Base = Annotated[float, Meta(ge=0, le=1e15)]
Share = Annotated[float, Meta(ge=0, le=64)]
Bits = Annotated[float, Meta(ge=0, le=64)]
GroupSize = Annotated[int, Meta(ge=-1, le=MOST_POSITIONS)]


def _keys(kind: Any, names: str) -> dict[str, Any]:
    """Return a row for each of some keys."""
    return dict.fromkeys(names.split(), kind)


def _or_listed(kind: Any) -> Any:
    """Return the type of one value, or of one for each layer."""
    return kind | list[kind | None]


_ROPE = {
    **_keys(Text, "rope_type type"),
    **_keys(Base, "rope_theta"),
    **_keys(Share, "partial_rotary_factor"),
    **_keys(
        Factor,
        "factor alpha attention_factor beta_fast beta_slow high_freq_factor low_freq_factor llama_4_scaling_beta "
        "mscale mscale_all_dim long_mscale short_mscale",
    ),
    **_keys(Positions, "original_max_position_embeddings"),
    **_keys(list[Factor], "long_factor short_factor"),
    **_keys(list[Heads], "mrope_section"),
    **_keys(Truth, "truncate mrope_interleaved"),
}

# The keys of a configuration and of the parts of one.
_MODEL = {
    **_keys(Text, "model_type torch_dtype dtype quant_method feed_forward_proj position_embedding_type norm_type"),
    **_keys(Text | Truth, "hidden_act hidden_activation activation activation_function mlp_hidden_act "
            "mamba_hidden_act projector_hidden_act classifier_pooling use_bidirectional_attention topk_method "
            "scoring_func vision_feature_select_strategy"),
    **_keys(Texts, "architectures"),
    **_keys(
        Object,
        "auto_map per_layer_config rope_scaling rope_parameters quantization_config compression_config quantization "
        "linear_attn_config text_config vision_config audio_config thinker_config decoder_config encoder_config "
        "attention_other_setting sparse_attention_config",
    ),
    **_keys(Object | Texts, "id2label"),
    **_keys(Texts, "layers_block_type layer_block_type block_types mlp_layer_types mtp_layer_types indexer_types "
            "draft_layer_types layer_types"),
    **_keys(Texts | Text, "hybrid_override_pattern"),
    **_keys(Object | Layers, "num_hidden_layers"),  # LXMERT has a number for each of its parts
    **_keys(Layers, "num_decoder_layers decoder_layers encoder_layers n_layer n_layers num_layers num_kv_shared_layers "
            "num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers num_mtp_modules "
            "num_hash_layers num_dense_layers first_k_dense_replace leading_dense_block_count "
            "global_attn_every_n_layers"),
    **_keys(_or_listed(Layers), "depth"),
    **_keys(
        _or_listed(Heads),
        "num_attention_heads decoder_attention_heads n_head n_heads num_heads num_key_value_heads kv_n_heads "
        "num_kv_heads multi_query_group_num num_attention_groups num_global_key_value_heads "
        "swa_num_attention_heads swa_num_key_value_heads num_sliding_attention_heads index_n_heads "
        "attention_head_dim head_dim d_kv kv_channels global_head_dim swa_head_dim v_head_dim qk_nope_head_dim "
        "qk_rope_head_dim qk_head_dim index_head_dim rotary_dim linear_num_key_heads linear_num_value_heads "
        "linear_key_head_dim linear_value_head_dim linear_num_heads linear_head_dim linear_conv_kernel_dim "
        "mamba_d_conv mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads mamba_num_heads n_mamba_heads "
        "mamba_n_groups mamba_ngroups mamba_d_state mamba_expand expand conv_kernel conv1d_width conv_L_cache "
        "n_groups num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok "
        "num_experts_per_token moe_k moe_topk moe_top_k top_k_experts n_shared_experts num_shared_experts "
        "moe_num_shared_experts n_group topk_group num_expert_group altup_num_inputs altup_active_idx o_groups "
        "hc_mult hc_sinkhorn_iters relative_attention_num_buckets index_topk_blocks index_local_blocks "
        "interleave_moe_layer_step moe_layer_interval decoder_sparse_step attn_layer_period attn_layer_offset "
        "expert_layer_period expert_layer_offset full_attention_interval no_rope_layer_interval moe_layer_start_index "
        "short_conv_kernel_size spatial_merge_size temporal_patch_size moe_layer_freq",
    ),
    **_keys(
        _or_listed(Width),
        "hidden_size n_embd d_model dim embed_dim intermediate_size decoder_ffn_dim n_inner ffn_hidden_size d_ff "
        "hidden_dim intermediate_size_mlp dense_intermediate_size moe_intermediate_size share_expert_dim "
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
        "moe_latent_size kv_lora_rank q_lora_rank o_lora_rank lru_width laurel_rank hidden_size_per_layer_input "
        "mamba_d_ssm ssm_state_size state_size index_topk index_block_size block_dim block_ff_dim block_multiple_of "
        "num_position_embeddings pos_emb_height pos_emb_width mm_tokens_per_image type_vocab_size num_patches",
    ),
    **_keys(Width | list[Any] | Object, "num_channels image_size patch_size"),
    **_keys(Width | Text, "mamba_dt_rank"),  # "auto"
    **_keys(Heads | Text, "sliding_window_pattern"),  # "LLLG"
    **_keys(Tokens, "vocab_size vocab_size_per_layer_input"),
    **_keys(_or_listed(Token), "bos_token_id eos_token_id pad_token_id decoder_start_token_id"),
    **_keys(
        Positions,
        "max_position_embeddings n_positions max_trained_positions max_seq_len max_target_positions n_ctx "
        "original_max_position_embeddings relative_attention_max_distance floor_scale",
    ),
    **_keys(
        _or_listed(Window),
        "sliding_window sliding_window_size attention_chunk_size attention_window_size local_attention "
        "max_window_layers",
    ),
    **_keys(_or_listed(Base), "rope_theta"),  # Step 3.7 has one for each layer
    **_keys(Base, "rope_local_base_freq rotary_emb_base global_rope_theta local_rope_theta compress_rope_theta"),
    **_keys(_or_listed(Share), "partial_rotary_factor"),
    **_keys(
        Factor,
        "rms_norm_eps norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon layernorm_epsilon hc_eps attn_scale "
        "projection_layer_norm_eps attention_multiplier embedding_multiplier residual_multiplier logits_scaling "
        "logit_scale lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
        "ssm_in_multiplier ssm_out_multiplier attention_value_scale router_scaling_factor routed_scaling_factor "
        "moe_router_scaling_factor attn_logit_softcapping final_logit_softcapping block_ffn_dim_multiplier clip_qkv "
        "query_pre_attn_scalar swiglu_alpha swiglu_limit pixel_shuffle_ratio downsample_ratio scale_emb scale_depth "
        "dim_model_base",
    ),
    **_keys(list[Factor], "ssm_multipliers mlp_multipliers activation_sparsity_pattern"),
    **_keys(list[Factor | None], "swiglu_limits swiglu_limits_shared"),
    **_keys(list[Share], "partial_rotary_factors"),
    **_keys(list[Heads], "compress_ratios hybrid_layer_pattern"),
    **_keys(Annotated[str, Meta(max_length=8 * MOST_LAYERS)], "moe_layers_enum"),  # "3,4,5"
    **_keys(_or_listed(Factor), "mlp_ratio"),
    **_keys(list[Layers], "moe_layers mlp_only_layers full_attn_layers kda_layers deepstack_visual_indexes "
            "fullatt_block_indexes attn_layer_indices no_rope_layers"),
    **_keys(
        Truth,
        "tie_word_embeddings is_decoder is_encoder_decoder attention_bias mlp_bias use_sliding_window "
        "scale_decoder_outputs altup_correct_scale block_auto_adjust_ff_dim conv_bias mamba_conv_bias mamba_proj_bias "
        "mamba_rms_norm multi_query new_decoder_architecture norm_topk_prob qk_layernorm rope_interleave use_bias "
        "use_double_wide_mlp use_expert_bias use_parallel_residual use_qk_norm attn_temperature_tuning alibi "
        "norm_expert_weight route_norm use_conv_bias use_head_wise_attn_gate moe_renormalize",
    ),
}  # fmt: skip


class _QuantizedWeights(msgspec.Struct, frozen=True):
    """What compressed-tensors says of the weights of a group."""

    num_bits: Annotated[int, Meta(ge=0, le=64)] | None = None
    group_size: GroupSize | None = None


class _QuantizedGroup(msgspec.Struct, frozen=True):
    weights: _QuantizedWeights | None = None


# The keys of a quantization that other tools describe; that of a master is read in master.py.
_QUANTIZATION = {
    **_keys(Text, "quant_method checkpoint_format quant_algo"),
    **_keys(Bits, "bits w_bit"),
    **_keys(GroupSize, "group_size q_group_size"),
    **_keys(list[Window], "weight_block_size"),
    **_keys(Object, "sparsity_config transform_config"),
    **_keys(dict[str, _QuantizedGroup], "config_groups"),
}


def _struct(name: str, types: dict[str, Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, [(key, kind | None, None) for key, kind in types.items()])


_MODEL_KEYS = _struct("Model", _MODEL)
_ROPE_KEYS = _struct("Rope", _ROPE)
_QUANTIZATION_KEYS = _struct("Quantization", _QUANTIZATION)


def model_config(storage: Storage) -> dict[str, Any] | None:
    """Return the configuration of the model in a folder or repository, checked; None if there is none.

    Raises SourceError if config.json does not hold a JSON object, or if checked_config refuses it.
    """
    if CONFIG_FILE not in storage.files():
        return None
    return checked_config(read_json_object(storage, CONFIG_FILE), CONFIG_FILE)


def checked_config(config: dict[str, Any], file: str) -> dict[str, Any]:
    """Return a configuration, all of whose values that are read have the types and ranges of the tables above.

    file: what messages call it

    Raises SourceError for one that has not.
    """
    _check(file, "", config, _MODEL_KEYS)
    for key, value in config.items():
        if not isinstance(value, dict):
            continue
        if key.startswith("rope_"):
            for inner, of_layers in (("", value), *((f".{name}", of) for name, of in value.items())):
                if isinstance(of_layers, dict):
                    _check(file, f"{key}{inner}", of_layers, _ROPE_KEYS)
        elif key in QUANTIZATIONS and value.get("quant_method") != QUANT_METHOD:
            _check(file, key, value, _QUANTIZATION_KEYS)
        elif key == "per_layer_config":
            for layer, of_layer in value.items():
                checked_config(of_layer if isinstance(of_layer, dict) else {}, f"{file}: {key}.{layer}")
        elif key in PARTS or key in OTHER_PARTS or (key.endswith("_config") and "model_type" in value):
            checked_config(value, f"{file}: {key}")
    return config


def check_layers(config: dict[str, Any], names: Collection[str]) -> None:
    """Raise SourceError for more layers than so many tensors can be, in a configuration or in their names.

    Runtimes and tables of names are made of one object for each layer, whatever the files hold.

    names: those of the stored tensors
    """
    most, tensor_count = max(FEW_LAYERS, len(names)), len(names)
    text = "\n".join(["", *names])
    for match in _LONG_NUMBER.finditer(text):
        digits, of_layer = match[1], text.endswith((".layers", "\nlayers"), 0, match.start())
        if len(digits) > MOST_DIGITS or int(digits) > (most if of_layer else max(MOST_HEADS, tensor_count)):
            name = text[text.rfind("\n", 0, match.start()) + 1 : match.end()]
            raise SourceError(
                f"tensor '{name[:80]}...': a number so large does not fit {tensor_count} tensors: fetch the "
                "files of this model"
            )
    for part in (config, *(config[key] for key in PARTS if isinstance(config.get(key), dict))):
        for key in LAYER_COUNTS:
            layers = part.get(key)
            if isinstance(layers, int) and layers > most:
                raise SourceError(
                    f"{CONFIG_FILE}: {key}: {layers} layers do not fit {tensor_count} tensors: fetch the "
                    "configuration of this model"
                )


def _check(file: str, part: str, values: dict[str, Any], keys: type[msgspec.Struct]) -> None:
    def damaged(problem: str) -> SourceError:
        return SourceError(f"{file}: {part}{'.' if part else ''}{problem}; fetch the original's configuration")

    as_document(values, keys, damaged)
