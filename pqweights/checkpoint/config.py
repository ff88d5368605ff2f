"""config.json of an output: the source's JSON, edited; never saved again through transformers, which renames keys."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pqweights.checkpoint.readers import LogicalTensor, element_count

CONFIG_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
QUANTIZATION_KEYS = ("quantization_config", "compression_config")


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
    our float16 norms. A nested configuration keeps a dtype that differs from the model's.
    """
    result = copy.deepcopy(config) if config is not None else {}
    nested = [value for key, value in result.items() if key.endswith("_config") and isinstance(value, dict)]
    for place in [result, *(n for n in nested if n is not result.get("quantization_config"))]:
        for key in QUANTIZATION_KEYS:
            place.pop(key, None)
        found = str(place.get("dtype") or place.get("torch_dtype") or CONFIG_DTYPES[old_dtype]).removeprefix("torch.")
        place["dtype"] = CONFIG_DTYPES[dtype] if found == CONFIG_DTYPES[old_dtype] else found
        if "torch_dtype" in place:
            place["torch_dtype"] = place["dtype"]
    if quantization is not None:
        result["quantization_config"] = quantization
    return result
