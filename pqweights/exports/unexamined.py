"""Models of types that nobody examined for architectures.py: the names of their layers are checked in transformers.

It is imported only for such a model. Without it, or if it does not know the type either, the user is warned.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pqweights.common.installing import pip_install
from pqweights.exports.architectures import (
    EXAMINED,
    RENAMED_PLAIN_REASON,
    RENAMED_REASON,
    RESHAPED_REASON,
    TORCHAO,
    VLLM,
    names_in_memory,
    refused,
)

if TYPE_CHECKING:
    from pqweights.exports.renamed_layers import LoadedWeight

# What a plan says of such a model.
UNEXAMINED = "if transformers does not rename its layers"
# What a model's own code raises for a configuration that it does not take.
REFUSALS = (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def is_examined(config: Mapping[str, Any] | None) -> bool:
    """Whether it is known what transformers does with the layers of a model; nothing if it does not load any."""
    model_type = (config or {}).get("model_type")
    return not isinstance(model_type, str) or model_type in EXAMINED


def check_names(
    target: str, config: Mapping[str, Any] | None, *, rounded: Collection[str], plain: Sequence[str]
) -> tuple[str, ...]:
    """Return a warning if nothing is known of the names that transformers gives the layers of a model.

    target: the target of integers
    rounded, plain: the weights that become integers, and the others

    Raises ExportError if it gives them names, or cuts them, so that it would not load the export.
    """
    if config is None or is_examined(config) or target not in (TORCHAO, VLLM):
        return ()
    model_type = config["model_type"]
    warning = (
        f"nobody has examined what transformers does with the layers of the model type {model_type}: if it renames, "
        "cuts or joins them as it loads them, it will not load this export; try it before you publish it"
    )
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return (f"{warning}. Their names are checked where transformers is installed: {pip_install('transformers')}",)
    try:
        reason = _renamed(target, config, rounded=rounded, plain=plain)
    except REFUSALS as error:
        said = " ".join(str(error).split())[:200]
        return (f"{warning}. The installed transformers cannot tell: {type(error).__name__}: {said}",)
    if reason is not None:
        raise refused(target, config, model_type, reason)
    return ()


def _renamed(target: str, config: Mapping[str, Any], *, rounded: Collection[str], plain: Sequence[str]) -> str | None:
    """Return why a target cannot hold a model, by what transformers does with its layers; None if it can.

    Raises what transformers raises for a model that it does not know, and ImportError for a version without these
    functions.
    """
    from pqweights.exports import renamed_layers

    model = renamed_layers.build(config)
    has_compressed_tensors = importlib.util.find_spec("compressed_tensors") is not None
    if target == VLLM and has_compressed_tensors and renamed_layers.compressed_tensors_errors(model):
        return RESHAPED_REASON
    for weight in renamed_layers.loaded_weights(model, [*rounded, *plain]):
        reason = _reason(weight, target, is_rounded=weight.name in rounded, has_vision="vision_config" in config)
        if reason is not None:
            return f"{reason} ({weight.name} -> {weight.loaded})"
    return None


def _reason(weight: LoadedWeight, target: str, *, is_rounded: bool, has_vision: bool) -> str | None:
    """Return why a target cannot hold a weight that transformers puts elsewhere; None if it can."""
    if weight.is_reshaped:
        # Of a compressed-tensors checkpoint, transformers joins single experts in a way of its own, and loses others.
        return RESHAPED_REASON if (is_rounded or target == VLLM) and ".experts." not in weight.name else None
    if not weight.is_linear or weight.loaded in names_in_memory(weight.name, has_vision):
        return None
    if is_rounded:
        return RENAMED_REASON if target == TORCHAO else None
    is_same_layer = weight.loaded.endswith(weight.name) or weight.name.endswith(weight.loaded)  # in another prefix
    return RENAMED_PLAIN_REASON if target == VLLM and not is_same_layer else None
