"""What is known of types of models: one table, which GGUF, the other targets, roles and caches read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pqweights.models.description import UNKNOWN, ModelDescription
from pqweights.models.table import MODELS
from pqweights.models.traits import Trait


def described(model_type: object) -> ModelDescription:
    """Return the row of a type; one without any facts for an unknown type, or what is not the name of one."""
    return MODELS.get(model_type, UNKNOWN) if isinstance(model_type, str) else UNKNOWN


def has_trait(model_type: object, trait: Trait) -> bool:
    """Whether something is true of a type."""
    return trait in described(model_type).traits


def text_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the text model: its text_config, or all of it."""
    config = config or {}
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def text_model(config: Mapping[str, Any] | None) -> ModelDescription:
    """Return the row of the text model of a configuration, with its number of layers.

    It is that of the model where its text_config names no type.
    """
    config = config or {}
    types = (part.get("model_type") for part in (text_config(config), config))
    row = next((MODELS[name] for name in types if isinstance(name, str) and name in MODELS), UNKNOWN)
    layers = text_config(config).get("num_hidden_layers")
    return replace(row, layers=layers) if isinstance(layers, int) else row
