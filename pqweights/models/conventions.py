"""How the parts of models are called: conventions that most types share, and that a row of the table can override.

The names of tensors are those that transformers gives to the parameters of the architectures that it supports (checked
on the hybrids, mixtures of experts and vision-language models listed in docs/method.md). Expressions match whole
components of dotted names, unless they say otherwise.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Where the text model lies in models of images and text, as transformers 5 and as earlier versions wrote them, and what
# the names of the text model alone begin with.
TEXT_PREFIXES = {"model.language_model.": "model.", "model.text_model.": "model.", "language_model.": ""}
# A whole name: the prefix of all layers of the text model, the number of one, and what follows.
LAYER = re.compile(r"((?:|model\.|backbone\.|model\.language_model\.|language_model\.model\.)layers\.)(\d+)\.(.+)")
# What the names of the layers of a text model begin with, and the number of one.
TEXT_LAYERS = re.compile(
    r"(?:|model\.|backbone\.|transformer\.|gpt_neox\.|model\.language_model\.|language_model\.model\.|"
    r"model\.text_model\.)(?:layers|h|blocks)\.(\d+)\."
)
HEADS = ("lm_head", "model.lm_head", "language_model.lm_head")
# The embeddings of tokens, by what the names of layers begin with.
EMBEDDINGS_OF = {
    re.compile(layers): name
    for layers, name in {
        r"model\.layers\.": "model.embed_tokens",
        r"layers\.": "embed_tokens",
        r"model\.language_model\.layers\.": "model.language_model.embed_tokens",
        r"model\.text_model\.layers\.": "model.text_model.embed_tokens",
        r"language_model\.model\.layers\.": "language_model.model.embed_tokens",
        r"transformer\.h\.\d+\.self_attention\.": "transformer.word_embeddings",
        r"h\.\d+\.self_attention\.": "word_embeddings",
        r"transformer\.(h|blocks)\.": "transformer.wte",
        r"h\.": "wte",
        r"gpt_neox\.layers\.": "gpt_neox.embed_in",
        r"backbone\.layers\.": "backbone.embeddings",
        r"encoder\.block\.": "shared",
        r"model\.encoder\.layers\.": "model.shared",
        r"model\.decoder\.layers\.": "model.decoder.embed_tokens",
    }.items()
}
# Whole names: of one expert's matrix, and of those of all experts in one tensor, or their biases.
OF_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>.+)")
OF_ALTUP = re.compile(r"(?P<layer>model\.altup_\w+)\.(?P<expert>\d+)\.(?P<matrix>weight)")  # of Gemma 3n
OF_TABLE = re.compile(r"model\.layers\.(?P<layer>\d+)\.ple\.ple_embedding\.ngram_embedding\b.*")
OF_SHARD = re.compile(r"(?P<table>ngram_embedding)\.shard_(?P<shard>\d+)\.weight")  # of Qwen4-Exp
STACKED_EXPERTS = re.compile(r"(?P<layer>.*\.experts)\.(?P<matrix>gate_up_proj|down_proj)(?P<bias>_bias)?(\.weight)?")
# Whole names of modules: what holds all experts of a layer.
EXPERTS_OF_LAYER = re.compile(r"(.*?\.?(?:experts|\w*_experts))\..+")

VISION = re.compile(
    r"visual|vision\w*|vit_\w+|image_\w+|audio\w*|speech\w*|multi_modal_projector|mm_projector|patch_merge_mlp|"
    r"connector|embed_vision|embed_audio"
)
MTP = re.compile(r"mtp|mtp_\w+|nextn\w*")
# A whole name below `mtp`: the number of the layer and what follows, or what there is beside the layers.
BELOW_MTP = re.compile(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.(.+)|(.+))")
# Modules that only layers have that predict further tokens.
DRAFT_PARTS = re.compile(r"(?:^|\.)(?:eh_proj|enorm|hnorm|shared_head|nextn\w*|mtp\w*|pre_fc_norm_\w+)(?:\.|$)")
# How many layers predict further tokens, in the configurations of DeepSeek, GLM and others, Qwen3.5, and MiniMax, which
# says by one more key whether there are any.
DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules", "use_mtp")
SSM_PARAMETERS = re.compile(r"A_log|A|D|dt_bias|dt_proj|in_proj_(a|b|ba)|time_(decay|first|mix\w*|maa\w*)")
MAMBA_PATH = re.compile(r"mamba\w*|mixer|ssm\w*")
NORM = re.compile(r"\w*norm(s|\d+|_\w+)?|\w*normali[sz]ation|ln|ln_\w+|ln\d+", re.IGNORECASE)
CONV = re.compile(r"\w*conv\w*|patch_embed\w*")
ROUTER = re.compile(r"gate|router|\w*_router|shared_expert_gate|gate_weight|wg")
LM_HEAD = re.compile(r"lm_head|embed_out|output|output_projection")
# embed_q and unembed_out are mlx-lm's names for the two halves of kv_b_proj in multi-head latent attention.
EMBEDDING = re.compile(r"(?!(embed_q|unembed_out)$)\w*embed\w*|wte|wpe|emb|\w+_emb|shared")
# Embeddings of tokens; embeddings of positions and the like are never tied.
INPUT_EMBEDDING = re.compile(r"embed_tokens|wte|word_embeddings?|tok_embeddings|embed_in|shared|embeddings?|embedding")
EXPERTS = re.compile(r"experts|\w*_experts(?<!shared_experts)")
ATTENTION = re.compile(r"\w*attn\w*|\w*attention\w*|mixer", re.IGNORECASE)
MLP = re.compile(
    r"mlp|\w*mlp|ffn|feed_?forward|intermediate|shared_experts?|(gate|up|down|gate_up)_proj|fc\d|c_fc|w[123]"
)


class FusedLayer(NamedTuple):
    """Modules that runtimes compute with in one layer.

    parts: an expression for the last component of their names
    whole: the name of the layer
    in_masters: whether masters store them with one bit width, too
    """

    parts: str
    whole: str
    in_masters: bool = True


# vLLM 0.32, `packed_modules_mapping` of its models.
FUSED = (
    FusedLayer(r"[qkv]_proj|[qkv]_lin|query|key|value|w[qkv]|[qkv]", "qkv"),
    FusedLayer(r"q_a_proj|kv_a_proj_with_mqa", "qkv_a"),
    FusedLayer(r"gate_proj|up_proj|w1|w3", "gate_up"),
    FusedLayer(r"in_proj_(qkv|z)", "in_proj_qkvz"),
    FusedLayer(r"[gb]_proj", "qkv", in_masters=False),  # linear attention of OLMo Hybrid and Bailing v3
    FusedLayer(r"c_fc_[01]", "gate_up", in_masters=False),  # EXAONE 3
)
# The last parts of names of scales for activations and caches, by which other runtimes compute, of one element; and of
# the largest values that ModelOpt saw.
RUN_SCALE = re.compile(
    r"([qkv]|kv|prob_output|input|output|activation)_(scale|zero_point)|input_(scale_ub|global_scale)"
)
SEEN_LARGEST = re.compile(r".*_amax")
# The end of names. Of sparse attention (DeepSeek V3.2, GLM-MoE-DSA): vLLM 0.32 has these two in one layer that is not
# quantized.
NEVER_QUANTIZED = re.compile(r"\.indexer\.(wk|weights_proj)\.weight$")

# The keys of nested configurations: those of transformers' classes, and two of custom code. Older files leave out the
# model_type in them.
_PART_NAMES = """
acoustic_model acoustic_tokenizer_encoder adapter adaptor asr attn audio audio_encoder audio_video backbone bigvgan
coarse_acoustics code2wav codec dac decoder depth_decoder detector detr_decoder detr_encoder diarization
diffusion_head dit encoder esmc esmfold ffn fine_acoustics flow_head fov_model geometry_encoder global head
high_res_vision image_codebook image image_model keypoint_detector language llm mask_decoder model multimodal
patch_model patcher perceiver projector prompt_encoder protein_encoder qformer reading_order sam semantic
semantic_model semantic_tokenizer_encoder speech streaming talker text thinker token2wav tracker video vision vlm
vocoder vq word_timestamp
"""
PARTS = frozenset(f"{name}_config" for name in _PART_NAMES.split())
# Of these, the keys of towers, whose weights stay plain.
TOWERS = re.compile(r"(vision|visual|vit|image|audio|speech)\w*")
