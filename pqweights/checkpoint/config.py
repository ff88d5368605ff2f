"""config.json of a result: the source's JSON with some keys edited.

It is never saved through transformers, which would rename keys.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pqweights.checkpoint.readers import LogicalTensor, element_count

CONFIG_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# transformers loads the weight file that this key names; if there is no such file, it stops with the value in its
# message. Without the guard and without pqweights, it would ignore our quantization_config and load random weights.
GUARD_KEY = "transformers_weights"
GUARD = (
    "this model is a pqweights master: run `import pqweights` before loading it (pip install "
    "'pqweights[transformers]'), or convert it with `pqweights export --target bf16`"
)

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

# The end of an architecture's name -> the auto class of transformers that loads such models.
AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForImageTextToText": "AutoModelForImageTextToText",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
}


def model_dtype(config: dict[str, Any] | None, tensors: Sequence[LogicalTensor]) -> str:
    """Return the dtype of a model, BF16, F16, F32 or F64: the one in its configuration, else that of most elements."""
    names = {value: key for key, value in CONFIG_DTYPES.items()}
    for key in ("dtype", "torch_dtype"):
        named = str((config or {}).get(key, "")).removeprefix("torch.")
        if named in names:
            return names[named]
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.plain_dtype in CONFIG_DTYPES:
            counts[tensor.plain_dtype] += element_count(tensor)
    return counts.most_common(1)[0][0] if counts else "F32"


def edited_config(
    config: dict[str, Any] | None, dtype: str, *, old_dtype: str, quantization: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a copy of a configuration for a result with another dtype and another quantization_config, or none.

    config: the source's configuration; None gives a new one
    dtype: the dtype of the result's model, BF16, F16, F32 or F64
    old_dtype: that of the source's model; a nested configuration that names another dtype keeps it
    quantization: the quantization_config of the result

    The dtype is stated wherever transformers looks for it: without one, transformers takes the dtype of the first
        tensor that it meets, which would be that of our float16 norms. The key `transformers_weights` is dropped,
        because the weights get other files.
    """
    result = copy.deepcopy(config) if config is not None else {}
    for place in _places(result):
        for key in (*QUANTIZATION_KEYS, GUARD_KEY):
            place.pop(key, None)
        stated = str(place.get("dtype") or place.get("torch_dtype") or CONFIG_DTYPES[old_dtype]).removeprefix("torch.")
        place["dtype"] = CONFIG_DTYPES[dtype] if stated == CONFIG_DTYPES[old_dtype] else stated
        if "torch_dtype" in place:
            place["torch_dtype"] = place["dtype"]
    if quantization is not None:
        result["quantization_config"] = quantization
    return result


def guarded_config(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """Return an edited configuration as that of a master: with our quantization_config and the guard for transformers.

    Nested configurations get the guard, too: AutoModelForCausalLM loads a model of images and text by its text_config.
    """
    result = copy.deepcopy(config)
    for place in _places(result):
        place[GUARD_KEY] = GUARD
    return {**result, "quantization_config": quantization}


def _places(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration and the nested configurations in it."""
    return [config, *(value for key, value in config.items() if _is_nested(key, value))]


def _is_nested(key: str, value: Any) -> bool:
    """Whether an entry of a configuration is the configuration of a part of the model, rather than settings.

    Other entries are called `_config`, too, such as `per_layer_config`, whose keys are the numbers of layers.
    """
    if not isinstance(value, dict) or not key.endswith("_config") or key in QUANTIZATION_KEYS:
        return False
    return "model_type" in value or key in PARTS
