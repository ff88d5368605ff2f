"""Sources in formats that are not decoded: refused by the name that the configuration or their tensors give them.

What follows the configuration of a format that is decoded was taken out before (formats/sources.py), so
integers that are left in the place of weights are codes of something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.errors import SourceError
from pqweights.formats.sources import TOOLS, why_not

GIVE_ORIGINAL = "it is already quantized with loss; give the original checkpoint"

NOT_DESCRIBED = "the quantization_config of config.json does not say how it is packed; give the folder as published"

# The names of tensors that mark a format that is not decoded, whatever the configuration says.
FOREIGN_MARKS = {
    "weight_g_idx": "compressed-tensors with an order of columns",
    "pre_quant_scale": "ModelOpt with scaled inputs",
    "weight._data": "quanto",
    "weight._scale": "quanto",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "centroids.weight": "VPTQ",
    "res_centroids.weight": "VPTQ",
    "dense_weights": "SpQR",
    "Qidxs": "QuIP#",
    "q_invperm": "EXL2",
    "q_scale_max": "EXL2",
    "suh": "EXL3",
    "lookup_table": "SqueezeLLM",
    "tables2": "HIGGS",
    "weight_scales": "EETQ",
    "dqweight": "FP-Quant",
    "wscales": "Nunchaku",
}
# And those that mark one that is decoded if the configuration says so.
DECODED_MARKS = {
    "weight_scale_2": "NVFP4 (ModelOpt)",
    "weight_global_scale": "NVFP4 (compressed-tensors)",
    "weight_packed": "compressed-tensors",
    "_weight_qdata": "torchao",
    "weight.absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "g_idx": "GPTQ",
    "qweight": "GPTQ or AWQ",
}
# Methods of which tools leave the configuration behind when they decode all weights, as it is read of those that are
# decoded here.
LEFT_BEHIND = ("aqlm", "eetq", "higgs", "hqq", "quanto", "spqr", "vptq")
# Codes are stored in these. What else models have of them: masks, and numbers of positions, tokens and experts.
CODES = ("I8", "U8", "I16", "U16", "I32", "U32")
NO_CODES = re.compile(r"bias|\w*mask\w*|\w*_ids?|\w*ind(?:ex|ices)\w*|\w*2eid|num_\w+|\w*position\w*|\w*token\w*")


def refuse_method(settings: dict[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    """Raise SourceError if the configuration states a quantization that is not decoded."""
    method = str(settings.get("quant_method", "")).lower()
    described = _unsupported_method(method, settings) if settings else None
    is_plain = method in LEFT_BEHIND and not any(map(_is_code, stored.values()))
    if described and (not is_plain or any(name.endswith(tuple(FOREIGN_MARKS)) for name in stored)):
        raise SourceError(f"config.json: the source is {described}: {GIVE_ORIGINAL}")


def refuse_foreign(stored: Mapping[str, StoredTensor]) -> None:
    """Raise SourceError if a tensor shows a quantization that is not decoded, or that no configuration describes."""
    marks = FOREIGN_MARKS | DECODED_MARKS
    # gpt-oss calls the scales of its MXFP4 blocks as EETQ calls those of its integers.
    marked = [
        name for name in stored if name.endswith(tuple(marks)) and name.removesuffix("scales") + "blocks" not in stored
    ]
    for mark, format_name in marks.items():
        for name in marked:
            if name == mark or name.endswith("." + mark):
                fix = NOT_DESCRIBED if mark in DECODED_MARKS else GIVE_ORIGINAL
                raise SourceError(f"{stored[name].file}: tensor {name!r} marks {format_name}: {fix}")
    for name, tensor in stored.items():
        if tensor.dtype == "U32" and name.endswith("weight"):
            scales = name.removesuffix("weight") + "scales"
            if scales in stored:
                raise SourceError(f"{tensor.file}: tensor {name!r} with {scales!r} marks MLX: {NOT_DESCRIBED}")
        if tensor.dtype in ("I8", "I32") and name + "_scale" in stored:
            raise SourceError(
                f"{tensor.file}: tensor {name!r} with {name + '_scale'!r} marks integer compressed-tensors: "
                f"{NOT_DESCRIBED}"
            )


def refuse_codes(stored: Iterable[StoredTensor]) -> None:
    """Raise SourceError for integers in the place of a weight. stored: what no format has taken"""
    for tensor in filter(_is_code, stored):
        raise SourceError(
            f"{tensor.file}: tensor {tensor.name!r}: expected a weight in floating point, found {tensor.dtype} "
            f"{list(tensor.shape)}: codes in a format that is not known; give the original checkpoint"
        )


def _is_code(tensor: StoredTensor) -> bool:
    """Whether a stored tensor holds integers, and neither a mask nor numbers of something."""
    is_integer = tensor.dtype in CODES and len(tensor.shape) > 1
    return is_integer and not NO_CODES.fullmatch(tensor.name.rpartition(".")[2])


def _unsupported_method(method: str, settings: dict[str, Any]) -> str | None:
    """Return the name of a quantization that is not decoded; None for one that is."""
    if method in ("fbgemm_fp8", "mxfp4", "mxfp8"):
        return None
    if method in TOOLS:
        return why_not(settings)
    return f"quantized by {method!r}" if method else "quantized by an unnamed method"
