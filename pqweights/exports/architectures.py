"""Architectures that a target cannot store, because of what transformers does with their weights: by model_type.

An export is made from names and shapes alone, so whether it loads must be known from these names. The sets were found
with transformers 5.23 by building each of its models on the meta device (tools/architectures.py), and
tests/architectures checks those that can be built tiny.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pqweights.errors import ExportError

TORCHAO, VLLM, MLX = "torchao-int4", "vllm", "mlx"
PLAIN = "bf16"

# Linear weights are stored transposed, [in, out] (transformers' Conv1D).
TRANSPOSED = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
# transformers splits fused experts, for compressed-tensors alone, into layers that no checkpoint has.
UNPACKED_EXPERTS = frozenset({"llama4", "llama4_text"})
# transformers cuts a stored weight into several, or joins several, without regard to packed codes; of those that it
# joins it even loses the plain ones of a compressed-tensors checkpoint.
RESHAPED = frozenset(
    {
        "bailing_hybrid",
        "depth_pro",
        "dinov2",
        "dinov2_with_registers",
        "gradium_phonon_tts",
        "gte",
        "hrm_text",
        "inkling_mm_model",
        "jina_embeddings_v3",
        "kimi_linear",
        "minimax_m3_vl",
        "molmo2",
        "molmo2_text",
        "nemo_speechlm",
        "nomic_bert",
        "qianfan_ocr",
        "radio",
        "sapiens2",
        "tipsv2",
        "tipsv2_vision_model",
        "unlimited_ocr",
    }
)
# Layers have other names in memory than in the file, and torchao's metadata names tensors as they are in memory.
RENAMED = RESHAPED | frozenset(
    {
        "altclip",
        "audio-spectrogram-transformer",
        "axk2",
        "beit",
        "cohere_asr",
        "cosmos3_edge",
        "cosmos3_omni",
        "csm",
        "d_fine",
        "deepseek_v4",
        "deit",
        "dinov3_vit",
        "ernie4_5_vl_moe",
        "glm5_next",
        "glm5_next_text",
        "granite_speech",
        "granite_speech_plus",
        "grounding-dino",
        "hy_v3",
        "hy_v4",
        "ijepa",
        "inkling2",
        "inkling2_text",
        "kimi_k25",
        "kyutai_speech_to_text",
        "laguna",
        "lfm3",
        "lfm3_vl",
        "lfm3_vl_vision",
        "lw_detr",
        "mask2former",
        "maskformer",
        "mimi",
        "mistral_large4",
        "mistral_large4_text",
        "mm-grounding-dino",
        "nemotron_h_omni",
        "oneformer",
        "paddleocr_vl",
        "pi0",
        "pixio",
        "pp_doclayout_v3",
        "pp_doclayout_v4",
        "rf_detr",
        "rt_detr",
        "rt_detr_v2",
        "sam3_tracker",
        "sam3_tracker_video",
        "sam3_video",
        "segformer",
        "step3p7",
        "swin",
        "t5gemma2",
        "timesfm2_5",
        "tipsv2_text_model",
        "ultrabert",
        "ultravbert",
        "vibevoice_asr",
        "video_llava",
        "vision-encoder-decoder",
        "vit",
        "vit_mae",
        "vit_msn",
        "vivit",
    }
)
# Layers of the text model that stay plain have other names in memory than in the file, where `ignore` misses them.
RENAMED_PLAIN = frozenset({"axk2"})
# Layers of a tower, which stay plain, have other names in memory than in the file: `ignore` must name the whole tower.
RENAMED_TOWERS = frozenset({"altclip", "cosmos3_edge", "kimi_k25"})
# The model computes with a weight otherwise than by F.linear, the only product that torchao's tensors have.
USED_DIRECTLY = frozenset({"falcon", "rwkv", "wavlm"})
# Code of the model that initializes linear weights needs them as they are loaded.
USED_EARLY = frozenset(
    {
        "bit",
        "blt",
        "bridgetower",
        "chinese_clip_vision_model",
        "clap",
        "clipseg",
        "clvp",
        "cvt",
        "d_fine",
        "deimv2",
        "depth_pro",
        "dinov2",
        "dinov2_with_registers",
        "dinov3_vit",
        "falcon",
        "falcon_mamba",
        "fastspeech2_conformer",
        "fastspeech2_conformer_with_hifigan",
        "gpt_bigcode",
        "grounding-dino",
        "groupvit",
        "hiera",
        "ijepa",
        "kosmos-2",
        "longt5",
        "lw_detr",
        "mamba",
        "mamba2",
        "mask2former",
        "mgp-str",
        "mlcd",
        "mlcd_vision_model",
        "mm-grounding-dino",
        "modernbert",
        "modernbert-decoder",
        "modernvbert",
        "mt5",
        "nanochat",
        "neomme",
        "oneformer",
        "owlv2",
        "owlvit",
        "pe_audio",
        "pix2struct",
        "pop2piano",
        "pp_doclayout_v3",
        "pp_doclayout_v4",
        "pvt",
        "pvt_v2",
        "radio",
        "recurrent_gemma",
        "regnet",
        "resnet",
        "rf_detr",
        "rt_detr",
        "rt_detr_v2",
        "rwkv",
        "sapiens2",
        "seggpt",
        "siglip",
        "siglip2",
        "siglip2_vision_model",
        "siglip_vision_model",
        "swiftformer",
        "swin2sr",
        "switch_transformers",
        "t5",
        "timesformer",
        "tipsv2_vision_model",
        "udop",
        "umt5",
        "videoprism",
        "videoprism_vision_model",
        "vitdet",
        "vjepa2",
        "xclip",
        "xlstm",
    }
)
# Of all these, the architectures of which mlx makes a model that mlx-lm runs.
RUN_BY_MLX = frozenset({"gpt2", "laguna", "llama4"})

_TRANSPOSED = "it stores its linear weights transposed, which the format cannot hold"
_EXPERTS = "transformers splits its fused experts when it loads compressed-tensors, and would not find them"
RESHAPED_REASON = "transformers cuts or joins its weights as it loads them, which packed codes do not survive"
RENAMED_REASON = "transformers renames its layers as it loads them, and would not find torchao's tensors"
RENAMED_PLAIN_REASON = "transformers renames layers that stay plain as it loads them, and would look for packed ones"
_DIRECTLY = "it computes with its weights directly, which torchao's tensors do not support"
# In the order in which they are reported.
_REFUSALS: dict[str, tuple[tuple[frozenset[str], str], ...]] = {
    TORCHAO: (
        (TRANSPOSED, _TRANSPOSED),
        (RESHAPED, RESHAPED_REASON),
        (RENAMED, RENAMED_REASON),
        (USED_DIRECTLY, _DIRECTLY),
    ),
    VLLM: (
        (TRANSPOSED, _TRANSPOSED),
        (UNPACKED_EXPERTS, _EXPERTS),
        (RESHAPED, RESHAPED_REASON),
        (RENAMED_PLAIN, RENAMED_PLAIN_REASON),
    ),
}
# The keys of the configurations of towers, whose weights stay plain.
_TOWER = re.compile(r"(vision|visual|vit|image|audio|speech)\w*")


def check_architecture(target: str, config: Mapping[str, Any] | None) -> None:
    """Raise ExportError if a target of integers cannot store a model of this configuration.

    The message names the architecture, the reason, and the targets that can.
    """
    found = _refusal(target, config or {})
    if found is None:
        return
    raise refused(target, config, *found)


def refused(target: str, config: Mapping[str, Any] | None, model_type: str, reason: str) -> ExportError:
    """Return the error of a target that cannot store a model of a type."""
    advice = other_targets(target, config)
    return ExportError(f"config.json: {target} cannot hold a model of type {model_type}: {reason}; {advice}")


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
