"""Where mlx-lm's models differ from those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


# How experts are chosen by DeepSeek V3, and by many since.
BIASED_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def head_width(config: Mapping[str, Any], inner: int) -> int:
    """Return how wide the heads of Mamba 2 are, which a configuration may leave to be computed. inner: of all heads"""
    stated = config.get("mamba_d_head")
    return stated if isinstance(stated, int) else inner // config["mamba_n_heads"]
