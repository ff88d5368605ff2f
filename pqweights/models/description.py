"""What is known of one type of model: a row of the table, with where mlx-lm differs from transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from pqweights.models.conventions import FUSED, FusedLayer
from pqweights.models.llama_cpp import Architecture
from pqweights.models.tensor_names import Names
from pqweights.models.traits import Trait

# What is done to the tensors of transformers before mlx-lm's own sanitize.
UNPREFIXED, TRANSPOSED, STACKED = "unprefixed", "transposed experts", "stacked experts"
AS_PUBLISHED = "stacks of experts [experts, in, out]"
NESTED, UNWRAPPED = "below language_model", "the text model alone"


@dataclass(frozen=True, kw_only=True)
class MlxDifferences:
    """Where mlx-lm differs from transformers.

    module: the type under which it has the model
    layout: one of the constants above: what its sanitize expects, and transformers does not write
    head_in_text: whether the text_config of a model of images and text must say whether the head is tied
    tied: what it takes if that does not say it, where it is known
    vocabulary: its default for the size, which it looks for in the outer configuration only
    rope_names: keys, and the keys in rope_parameters under which transformers 5 writes them
    constants: settings that it requires, and that are a matter of course for transformers
    computed: returns settings that transformers 5 writes under other names; a KeyError means that it did not
    folds: whether its sanitize multiplies matrices by settings
    differs: returns what it computes otherwise with a configuration of the text model, if it does
    """

    module: str | None = None
    layout: str | None = None
    head_in_text: bool = False
    tied: bool | None = None
    vocabulary: int | None = None
    rope_names: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    computed: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    folds: bool = False
    differs: Callable[[Mapping[str, Any]], str] = lambda config: ""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A type of model. What a row leaves out is not known, or as the conventions have it.

    llama_cpp: how llama.cpp runs it; None if that is not known, and no GGUF file of it can be written
    variants: how it runs those models of the type of which `when` says so
    llama_cpp_differs: what llama.cpp computes otherwise, or why that is not known, so that no GGUF file of it is
        written
    restate: states a configuration as transformers 5 does, where earlier versions and published files do otherwise, and
        what follows from it; it gets the keys of the text model, and leaves values of other types for others to refuse
    publish: states a configuration that was read from a GGUF file as its class wants it: the inverse. held: the names
        of the tensors in the file
    names: what transformers calls its class, tensors and keys, if GGUF files of it are read
    mlx: where mlx-lm differs from transformers
    roles: the roles of modules, by expressions for the last component of their names; they come before the conventions,
        in plans and what becomes a linear layer of vllm and torchao
    fused: which modules runtimes compute with in one layer
    plain_in_vllm: an expression found in the names of weights that vLLM takes in BF16 only
    always: the modules that its layers hold, whatever the configuration says; of hybrids, in some layers
    defaults: what keys of its configuration mean that are left out, as in transformers' class; a key without a default
        is None
    in_memory: expressions for parts of the names of weights, and what transformers has in their place in memory
    traits: what else is true of it
    layers: how many the text model of one configuration has, if it says; no row of the table has it
    """

    llama_cpp: Architecture | None = None
    variants: tuple[Architecture, ...] = ()
    llama_cpp_differs: str = ""
    restate: Callable[[dict[str, Any]], None] = lambda values: None
    publish: Callable[[dict[str, Any], Set[str]], None] = lambda config, held: None
    names: Names | None = None
    mlx: MlxDifferences = field(default_factory=MlxDifferences)
    roles: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[FusedLayer, ...] = FUSED
    plain_in_vllm: str = ""
    always: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    in_memory: Mapping[str, str] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()
    layers: int | None = None


UNKNOWN = ModelDescription()


def stated_or_default(config: Mapping[str, Any], model: ModelDescription, key: str) -> Any:
    """Return the value of a key; the default of transformers for one that is absent, None if that is not known."""
    return config[key] if key in config else model.defaults.get(key)


# Defaults that the configurations of many types have.
_HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def sizes(*sizes: int) -> dict[str, Any]:
    """Return the defaults of sizes: of a whole model, or of its heads alone."""
    return dict(zip(_SHAPE if len(sizes) == len(_SHAPE) else _HEAD_SIZES, sizes, strict=True))


TIED: dict[str, Any] = {"tie_word_embeddings": True}
OWN_HEAD: dict[str, Any] = {"tie_word_embeddings": False}
SILU = {"hidden_act": "silu"}
LIKE_LLAMA = OWN_HEAD | SILU | {"rms_norm_eps": 1e-6}
LATENT = {"qk_rope_head_dim": 64, "kv_lora_rank": 512, "rope_interleave": True, "attention_bias": False}


# How experts are chosen by DeepSeek V3, and by many since.
BIASED_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def head_width(config: Mapping[str, Any], inner: int) -> int:
    """Return how wide the heads of Mamba 2 are, which a configuration may leave to be computed. inner: of all heads"""
    stated = config.get("mamba_d_head")
    return stated if isinstance(stated, int) else inner // config["mamba_n_heads"]
