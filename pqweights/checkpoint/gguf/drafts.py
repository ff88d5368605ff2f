"""Layers that predict further tokens, from which a runtime drafts: llama.cpp holds them as blocks behind the last one.

DeepSeek and GLM number them so, too. Qwen and EXAONE have them below `mtp`, with other names for what they have beside
a layer of the model; Nemotron-H has two layers there that llama.cpp takes for one. https://github.com/ggml-org/llama.cpp,
conversion/qwen.py (_QwenMtpMixin), conversion/glm.py and conversion/nemotron.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pqweights.models.conventions import BELOW_MTP, LAYER
from pqweights.models.names import predicts_further

# What such a layer has beside a layer of the model, and the tensor of gguf.MODEL_TENSOR that it is.
NEXTN = {
    "eh_proj": "NEXTN_EH_PROJ",
    "enorm": "NEXTN_ENORM",
    "hnorm": "NEXTN_HNORM",
    "embed_tokens": "NEXTN_EMBED_TOKENS",
    "shared_head.norm": "NEXTN_SHARED_HEAD_NORM",
    "shared_head.head": "NEXTN_SHARED_HEAD_HEAD",
}
# The norm before the experts of a layer that was two.
FOLDED_NORM = "second_norm"
_OTHER_NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
_OTHER_NAMES |= {"norm": "shared_head.norm"}


def name_behind(name: str, layers: int, folded: Mapping[str, str]) -> str | None:
    """Return the name of such a tensor in a layer behind the last one; None if that is not known.

    folded: see Architecture
    """
    if LAYER.fullmatch(name):
        return name
    match = BELOW_MTP.fullmatch(name)
    if match is None:
        return None
    if folded:
        matches = ((re.fullmatch(expression, name), known) for expression, known in folded.items())
        rest = next((match.expand(known) for match, known in matches if match), None)
        return rest and f"backbone.layers.{layers}.{rest}"
    if match[1]:
        return f"model.layers.{layers + int(match[1])}.{match[2]}"
    known = _OTHER_NAMES.get(match[3].removesuffix(".weight"))
    return known and f"model.layers.{layers}.{known}.weight"


def whole_draft_layers(names: Iterable[str], layers: int, folded: Mapping[str, str]) -> int:
    """Return how many whole layers there are behind the last one. names: those of the text model; folded: as above"""
    needed = {"eh_proj.weight", "enorm.weight", "hnorm.weight"}
    of_layer: dict[int, set[str]] = {}
    for name in names:
        if predicts_further(name, layers) and (match := LAYER.fullmatch(name_behind(name, layers, folded) or "")):
            of_layer.setdefault(int(match[2]), set()).add(match[3])
    count = len(of_layer)
    whole = all(needed <= of_layer.get(layers + index, set()) for index in range(count))
    return count if whole else 0


def nextn_tensor(name: str) -> tuple[str, str] | None:
    """Return what gguf.MODEL_TENSOR calls a tensor that only such layers have, and its name in the file."""
    match = LAYER.fullmatch(name)
    module = match[3].removesuffix(".weight") if match else ""
    if match and module == FOLDED_NORM:
        return "ATTN_POST_NORM", f"blk.{match[2]}.post_attention_norm.weight"
    known = NEXTN.get(module)
    return (known, f"blk.{match[2]}.nextn.{known.removeprefix('NEXTN_').lower()}.weight") if match and known else None
