"""What is known of one type of model: a row of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pqweights.models.conventions import FUSED, FusedLayer
from pqweights.models.llama_cpp import Architecture
from pqweights.models.mlx_lm import MlxDifferences
from pqweights.models.traits import Trait


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A type of model. What a row leaves out is not known, or as the conventions have it.

    llama_cpp: how llama.cpp runs it; None if that is not known, and no GGUF file of it can be written
    llama_cpp_differs: what llama.cpp computes otherwise, so that no GGUF file of it is written
    mlx: where mlx-lm differs from transformers
    roles: the roles of modules, by expressions for the last component of their names; they come before the conventions,
        in plans and what becomes a linear layer of vllm and torchao
    fused: which modules runtimes compute with in one layer
    defaults: what keys of its configuration mean that are left out, as in transformers' class; a key without a default
        is None
    in_memory: expressions for parts of the names of weights, and what transformers has in their place in memory
    traits: what else is true of it
    layers: how many the text model of one configuration has, if it says; no row of the table has it
    """

    llama_cpp: Architecture | None = None
    llama_cpp_differs: str = ""
    mlx: MlxDifferences = field(default_factory=MlxDifferences)
    roles: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[FusedLayer, ...] = FUSED
    defaults: Mapping[str, Any] = field(default_factory=dict)
    in_memory: Mapping[str, str] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()
    layers: int | None = None


UNKNOWN = ModelDescription()


def stated_or_default(config: Mapping[str, Any], model: ModelDescription, key: str) -> Any:
    """Return the value of a key; the default of transformers for one that is absent, None if that is not known."""
    return config[key] if key in config else model.defaults.get(key)
