"""Architectures that a target cannot store, because of what transformers does with their weights: by model_type.

An export is made from names and shapes alone, so whether it loads must be known from these names. The sets were found
with transformers 5.23 by building each of its models on the meta device (tools/architectures.py), and
tests/architectures checks those that can be built tiny. Of a type that was not examined the user is warned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pqweights.errors import ExportError

TORCHAO, VLLM, MLX = "torchao-int4", "vllm", "mlx"
PLAIN = "bf16"


def _types(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Linear weights are stored transposed, [in, out] (transformers' Conv1D).
TRANSPOSED = _types("clvp decision_transformer gpt2 imagegpt openai-gpt")
# transformers splits fused experts, for compressed-tensors alone, into layers that no checkpoint has.
UNPACKED_EXPERTS = _types("llama4 llama4_text")
# transformers cuts a stored weight into several, or joins several, without regard to packed codes; of those that it
# joins it even loses the plain ones of a compressed-tensors checkpoint.
RESHAPED = _types(
    """
bailing_hybrid depth_pro dinov2 dinov2_with_registers gradium_phonon_tts gte hrm_text inkling_mm_model
jina_embeddings_v3 kimi_linear minimax_m3_vl molmo2 molmo2_text nemo_speechlm nomic_bert qianfan_ocr radio sapiens2
tipsv2 tipsv2_vision_model unlimited_ocr
"""
)
# Layers have other names in memory than in the file, and torchao's metadata names tensors as they are in memory.
RENAMED = RESHAPED | _types(
    """
altclip audio-spectrogram-transformer axk2 beit cohere_asr cosmos3_edge cosmos3_omni csm d_fine deepseek_v4 deit
dinov3_vit ernie4_5_vl_moe glm5_next glm5_next_text granite_speech granite_speech_plus grounding-dino hy_v3 hy_v4 ijepa
inkling2 inkling2_text kimi_k25 kyutai_speech_to_text laguna lfm3 lfm3_vl lfm3_vl_vision lw_detr mask2former maskformer
mimi mistral_large4 mistral_large4_text mm-grounding-dino nemotron_h_omni oneformer paddleocr_vl pi0 pixio
pp_doclayout_v3 pp_doclayout_v4 rf_detr rt_detr rt_detr_v2 sam3_tracker sam3_tracker_video sam3_video segformer step3p7
swin t5gemma2 timesfm2_5 tipsv2_text_model ultrabert ultravbert vibevoice_asr video_llava vision-encoder-decoder vit
vit_mae vit_msn vivit
"""
)
# Layers of the text model that stay plain have other names in memory than in the file, where `ignore` misses them.
RENAMED_PLAIN = _types("axk2")
# Layers of a tower, which stay plain, have other names in memory than in the file: `ignore` must name the whole tower.
RENAMED_TOWERS = _types("altclip cosmos3_edge kimi_k25")
# The model computes with a weight otherwise than by F.linear, the only product that torchao's tensors have.
USED_DIRECTLY = _types("falcon rwkv wavlm")
# Code of the model that initializes linear weights needs them as they are loaded.
USED_EARLY = _types(
    """
bit blt bridgetower chinese_clip_vision_model clap clipseg clvp cvt d_fine deimv2 depth_pro dinov2 dinov2_with_registers
dinov3_vit falcon falcon_mamba fastspeech2_conformer fastspeech2_conformer_with_hifigan gpt_bigcode grounding-dino
groupvit hiera ijepa kosmos-2 longt5 lw_detr mamba mamba2 mask2former mgp-str mlcd mlcd_vision_model mm-grounding-dino
modernbert modernbert-decoder modernvbert mt5 nanochat neomme oneformer owlv2 owlvit pe_audio pix2struct pop2piano
pp_doclayout_v3 pp_doclayout_v4 pvt pvt_v2 radio recurrent_gemma regnet resnet rf_detr rt_detr rt_detr_v2 rwkv sapiens2
seggpt siglip siglip2 siglip2_vision_model siglip_vision_model swiftformer swin2sr switch_transformers t5 timesformer
tipsv2_vision_model udop umt5 videoprism videoprism_vision_model vitdet vjepa2 xclip xlstm
"""
)
# Of all these, the architectures of which mlx makes a model that mlx-lm runs.
RUN_BY_MLX = _types("gpt2 laguna llama4")
# The types that were examined: those of transformers 5.23 that generate text.
EXAMINED = _types(
    """
afmoe apertus arcee aria aria_text audioflamingo3 axk1 axk2 aya_vision bailing_hybrid bamba bart beam bert
bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small blip blip-2 bloom blt camembert
chameleon codegen cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text cosmos3_edge
cosmos3_omni cpmant ctrl cwm data2vec-text dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
deepseek_vl deepseek_vl_hybrid diffllama diffusion_gemma doge dots1 dots3_note dots3_note_text electra emu3
encoder-decoder ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe evolla exaone4 exaone4_5 exaone_moe falcon falcon_h1
falcon_mamba fast_vlm flex_olmo flint florence2 fsmt fun_asr_nano fuyu gemma gemma2 gemma3 gemma3_text gemma3n
gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text git glm
glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa glm_ocr glmasr glmga got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite4_vision granite_docling granite_speech
granite_speech_plus granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 idefics idefics2 idefics3
inkling2 inkling2_text inkling_mm_model inkling_text instructblip instructblipvideo internlm3 internvl iquestcoder
jais2 jamba janus jetmoe kimi_k25 kimi_linear kolibri1 kosmos-2 kosmos-2.5 kyutai_speech_to_text laguna led lfm2
lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision
longcat_flash longt5 m2m_100 mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minicpm_ocr
minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral mistral3
mistral4 mistral_large4 mixtral mllama modernbert-decoder molmo2 moshi moss_transcribe_diarize mpt mt5 muse_glimmer
muse_spark musicflamingo musicgen musicgen_melody mvp nanochat nemo_speechlm nemotron nemotron_h nemotron_h_omni
nllb-moe olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt ovis2 paddleocr_vl paligemma pegasus pegasus_x perception_lm
persimmon phi phi3 phi4_multimodal phimoe pi0 pix2struct plbart pp_chart2table pp_formulanet prophetnet qianfan_ocr
qwen2 qwen2_5_omni qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe
qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker qwen3_vl
qwen3_vl_moe qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer
rwkv seamless_m4t seamless_m4t_v2 seed_oss shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p7
switch_transformers t5 t5gemma t5gemma2 trocr udop umt5 unlimited_ocr vaultgemma vibevoice_asr video_llama_3
video_llava vipllava vision-encoder-decoder voxtral voxtral_realtime whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet
xlstm xmod youtu zamba zamba2 zaya
"""
)

_TRANSPOSED = "it stores its linear weights transposed, which the format cannot hold"
_RESHAPED = "transformers cuts or joins its weights as it loads them, which packed codes do not survive"
# In the order in which they are reported.
_REFUSALS: dict[str, tuple[tuple[frozenset[str], str], ...]] = {
    TORCHAO: (
        (TRANSPOSED, _TRANSPOSED),
        (RESHAPED, _RESHAPED),
        (RENAMED, "transformers renames its layers as it loads them, and would not find torchao's tensors"),
        (USED_DIRECTLY, "it computes with its weights directly, which torchao's tensors do not support"),
    ),
    VLLM: (
        (TRANSPOSED, _TRANSPOSED),
        (
            UNPACKED_EXPERTS,
            "transformers splits its fused experts when it loads compressed-tensors, and would not find them",
        ),
        (RESHAPED, _RESHAPED),
        (RENAMED_PLAIN, "transformers renames layers that stay plain as it loads them, and would look for packed ones"),
    ),
}
# The keys of the configurations of towers, whose weights stay plain.
_TOWER = re.compile(r"(vision|visual|vit|image|audio|speech)\w*")


def check_architecture(target: str, config: Mapping[str, Any] | None) -> None:
    """Raise ExportError if a target of integers cannot store a model of this configuration.

    The message names the architecture, the reason, and the targets that can.
    """
    refusal = _refusal(target, config or {})
    if refusal is not None:
        model_type, reason = refusal
        raise ExportError(
            f"config.json: {target} cannot hold a model of type {model_type}: {reason}; {other_targets(target, config)}"
        )


def other_targets(target: str, config: Mapping[str, Any] | None) -> str:
    """Return advice to use the other targets that can store a model of this configuration."""
    config = config or {}
    others = [other for other in (VLLM, TORCHAO) if other != target and _refusal(other, config) is None]
    if target != MLX and config.get("model_type") in RUN_BY_MLX:
        others.append(MLX)
    return f"use --target {' or '.join([*others, PLAIN])}"


def renames_towers(config: Mapping[str, Any] | None) -> bool:
    """Whether transformers renames layers of a tower as it loads a model."""
    return any(model_type in RENAMED_TOWERS for model_type, _ in _model_types(config or {}))


def uses_weights_early(config: Mapping[str, Any] | None) -> bool:
    """Whether transformers needs the linear weights of a model as it loads it, so that they must not be packed then."""
    return any(model_type in USED_EARLY and not is_tower for model_type, is_tower in _model_types(config or {}))


def names_in_memory(weight: str, has_vision: bool) -> list[str]:
    """Return the names under which transformers may look for a weight.

    They are names of parameters, which are not always those in the file. A text model may be loaded from the checkpoint
    of a model with vision, and older checkpoints have other prefixes.
    """
    if weight.startswith("backbone."):
        return [weight, "model." + weight.removeprefix("backbone.")]
    if has_vision and weight.startswith("model.layers."):
        return [weight, "model.language_model." + weight.removeprefix("model.")]
    for prefix in ("model.language_model.", "language_model.model."):
        if weight.startswith(prefix):
            rest = weight.removeprefix(prefix)
            return list(dict.fromkeys([weight, f"model.language_model.{rest}", f"model.{rest}"]))
    return [weight]


def _refusal(target: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the model_type that a target cannot store, and the reason; None if there is none."""
    for model_type, is_tower in _model_types(config):
        for refused, reason in _REFUSALS[target]:
            # compressed-tensors also fails at plain weights that transformers cuts.
            if model_type in refused and (not is_tower or (target == VLLM and refused is RESHAPED)):
                return model_type, reason
    return None


def _model_types(config: Mapping[str, Any], is_tower: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each model_type of a configuration, the outermost first, and whether it is that of a tower."""
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        yield model_type, is_tower
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _model_types(value, is_tower or _TOWER.fullmatch(key) is not None)


# What a plan says of a model of a type that was not examined.
UNEXAMINED = "if transformers does not rename its layers"


def is_examined(config: Mapping[str, Any] | None) -> bool:
    """Whether it is known what transformers does with the layers of a model; nothing if it does not load any."""
    model_type = (config or {}).get("model_type")
    return not isinstance(model_type, str) or model_type in EXAMINED


def unexamined_warnings(target: str, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a warning if nothing is known of the names that transformers gives the layers of a model."""
    if config is None or is_examined(config) or target not in _REFUSALS:
        return ()
    return (
        f"nobody has examined what transformers does with the layers of the model type {config['model_type']}: if it "
        "renames, cuts or joins them as it loads them, it will not load this export; try it before you publish it",
    )
