"""Architectures that a target cannot store, because of what transformers does with their weights.

An export is made from names and shapes alone, so whether it loads must be known from the types of models: their traits
tell. Of a type that was not examined the user is warned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pqweights.errors import ExportError
from pqweights.models import described, has_trait, text_config
from pqweights.models.conventions import TOWERS
from pqweights.models.traits import Trait

TORCHAO, VLLM, MLX = "torchao", "vllm", "mlx"
PLAIN = "bf16"


_TRANSPOSED = "it stores its linear weights transposed, which the format cannot hold"
_RESHAPED = "transformers cuts or joins its weights as it loads them, which packed codes do not survive"
# In the order in which they are reported.
_REFUSALS: dict[str, tuple[tuple[Trait, str], ...]] = {
    TORCHAO: (
        (Trait.TRANSPOSED, _TRANSPOSED),
        (Trait.RESHAPED, _RESHAPED),
        (Trait.RENAMED, "transformers renames its layers as it loads them, and would not find torchao's tensors"),
        (Trait.USED_DIRECTLY, "it computes with its weights directly, which torchao's tensors do not support"),
    ),
    VLLM: (
        (Trait.TRANSPOSED, _TRANSPOSED),
        (Trait.RESHAPED, _RESHAPED),
    ),
}


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


def check_computed(config: Mapping[str, Any]) -> None:
    """Raise ExportError for a model that mlx-lm would load, and compute otherwise."""
    text = text_config(config)
    if differs := described(text.get("model_type")).mlx.differs(text):
        raise ExportError(f"config.json: {differs}; {other_targets(MLX, config)}")
    if text.get("use_bidirectional_attention") is True:
        raise ExportError(
            "config.json: mlx-lm's models attend to what comes before alone, and this one attends both ways "
            f"(use_bidirectional_attention); {other_targets(MLX, config)}"
        )


def other_targets(target: str, config: Mapping[str, Any] | None) -> str:
    """Return advice to use the other targets that can store a model of this configuration."""
    config = config or {}
    others = [other for other in (VLLM, TORCHAO) if other != target and _refusal(other, config) is None]
    if target != MLX and has_trait(config.get("model_type"), Trait.RUN_BY_MLX):
        others.append(MLX)
    return f"use --target {' or '.join([*others, PLAIN])}"


def renames_towers(config: Mapping[str, Any] | None) -> bool:
    """Whether transformers renames layers of a tower as it loads a model."""
    return any(has_trait(model_type, Trait.RENAMED_TOWERS) for model_type, _ in _model_types(config or {}))


def uses_weights_early(config: Mapping[str, Any] | None) -> bool:
    """Whether transformers needs the linear weights of a model as it loads it, so that they must not be packed then."""
    return any(has_trait(name, Trait.USED_EARLY) and not is_tower for name, is_tower in _model_types(config or {}))


def _refusal(target: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the model_type that a target cannot store, and the reason; None if there is none."""
    for model_type, is_tower in _model_types(config):
        for trait, reason in _REFUSALS[target]:
            if target == VLLM and has_trait(model_type, Trait.VLLM_ALONE):
                continue  # a warning says that transformers cannot
            # compressed-tensors also fails at plain weights that transformers cuts.
            counts = not is_tower or (target == VLLM and trait == Trait.RESHAPED)
            if counts and has_trait(model_type, trait):
                return model_type, reason
    return None


def _model_types(config: Mapping[str, Any], is_tower: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each model_type of a configuration, the outermost first, and whether it is that of a tower."""
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        yield model_type, is_tower
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _model_types(value, is_tower or TOWERS.fullmatch(key) is not None)


# What a plan says of a model of a type that was not examined.
UNEXAMINED = "if transformers does not rename its layers"


def is_examined(config: Mapping[str, Any] | None) -> bool:
    """Whether it is known what transformers does with the layers of a model; nothing if it does not load any."""
    model_type = (config or {}).get("model_type")
    return not isinstance(model_type, str) or has_trait(model_type, Trait.EXAMINED)


def unexamined_warnings(target: str, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a warning if nothing is known of the names that transformers gives the layers of a model."""
    if config is None or target not in _REFUSALS:
        return ()
    if not isinstance(config.get("model_type"), str):
        return (
            "config.json: no model_type, by which the runtime finds the class of a model: it will not load this "
            "export; fetch the original's config.json",
        )
    if is_examined(config):
        return ()
    return (
        f"nobody has examined what transformers does with the layers of the model type {config['model_type']}: if it "
        "renames, cuts or joins them as it loads them, it will not load this export; try it before you publish it",
    )
