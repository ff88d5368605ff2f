"""config.json of an output: the source's JSON, edited; never saved again through transformers, which renames keys."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pqweights.checkpoint.readers import LogicalTensor, element_count

CONFIG_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# transformers loads the weight file that this key names, and stops with the value in its message where that names none. Without
# pqweights it would ignore our quantization_config and fill the weights with random numbers.
GUARD_KEY = "transformers_weights"
GUARD = (
    "this model is a pqweights master: run `import pqweights` before loading it (pip install 'pqweights[transformers]'), or "
    "convert it with `pqweights export --target bf16`"
)

# The end of an architecture's name -> the class that knows which model of that kind a config.json means.
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
    """The dtype of a model, BF16, F16, F32 or F64: what its configuration says, else that of most of its elements."""
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
    config: dict[str, Any] | None, dtype: str, old_dtype: str, quantization: dict[str, Any] | None
) -> dict[str, Any]:
    """The configuration with another quantization_config (or none) and its dtype stated wherever transformers looks.

    transformers takes the dtype of the first tensor it meets where the configuration names none, which would be that of
    our float16 norms. A nested configuration keeps a dtype that differs from the model's. `transformers_weights` goes, as the
    weights get other files.
    """
    result = copy.deepcopy(config) if config is not None else {}
    for place in _places(result):
        for key in (*QUANTIZATION_KEYS, GUARD_KEY):
            place.pop(key, None)
        found = str(place.get("dtype") or place.get("torch_dtype") or CONFIG_DTYPES[old_dtype]).removeprefix("torch.")
        place["dtype"] = CONFIG_DTYPES[dtype] if found == CONFIG_DTYPES[old_dtype] else found
        if "torch_dtype" in place:
            place["torch_dtype"] = place["dtype"]
    if quantization is not None:
        result["quantization_config"] = quantization
    return result


def guarded_config(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """An edited configuration as that of a master: with a quantization_config of ours, and the guard for transformers.

    The guard stands in nested configurations, too: AutoModelForCausalLM loads a model of images and text by its text_config.
    """
    result = copy.deepcopy(config)
    for place in _places(result):
        place[GUARD_KEY] = GUARD
    return {**result, "quantization_config": quantization}


def _places(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration and those in it."""
    nested = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)}
    return [config, *(value for key, value in nested.items() if key != "quantization_config")]
