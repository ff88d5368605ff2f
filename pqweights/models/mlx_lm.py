"""What mlx-lm has to be told of a type of model, because it takes it otherwise than transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What is done to the tensors of transformers before mlx-lm's own sanitize.
UNPREFIXED, TURNED_EXPERTS, STACKED_EXPERTS = "unprefixed", "turned experts", "stacked experts"


@dataclass(frozen=True, kw_only=True)
class MlxDifferences:
    """Where mlx-lm differs from transformers.

    layout: UNPREFIXED, TURNED_EXPERTS or STACKED_EXPERTS: what sanitize expects, and transformers does not
        write
    other_head_dim: whether its default for head_dim is not that of transformers
    head_in_text: whether the text_config of a model of images and text must say whether the head is tied
    tied: what it takes if that does not say it, where it is known
    vocabulary: its default for the size, which it looks for in the outer configuration only
    rope_names: keys, and the keys in rope_parameters under which transformers 5 writes them
    """

    layout: str | None = None
    other_head_dim: bool = False
    head_in_text: bool = False
    tied: bool | None = None
    vocabulary: int | None = None
    rope_names: Mapping[str, str] = field(default_factory=dict)
