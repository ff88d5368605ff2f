"""Which coordinates of keys RoPE rotates together (arXiv:2104.09864), by a model's configuration."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rotary models whose modules have no function that shows the layout: they rotate neighbours.
INTERLEAVED = ("gptj", "codegen", "llama4_text", "cohere", "cohere2", "deepseek_v2")
# Functions of modeling modules that turn every pair by a right angle.
QUARTER_TURNS = ("rotate_half", "rotate_every_two", "rotate_interleave")


@dataclass(frozen=True)
class RopePairs:
    """The pairs of coordinates.

    size: coordinates of a key
    rotated: how many of them, from the first on, RoPE rotates; the others are paired in the same way among themselves
    interleaved: whether neighbours are pairs (2j, 2j + 1), instead of the halves (j, j + rotated / 2)
    """

    size: int
    rotated: int
    interleaved: bool

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second coordinates of all pairs, [..., size] -> twice [..., size / 2]."""
        parts = [self._split(part) for part in states.split([self.rotated, self.size - self.rotated], dim=-1)]
        firsts, seconds = zip(*parts, strict=True)
        return torch.cat(firsts, dim=-1), torch.cat(seconds, dim=-1)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Undo `split`."""
        halves = [self.rotated // 2, (self.size - self.rotated) // 2]
        parts = zip(first.split(halves, dim=-1), second.split(halves, dim=-1), strict=True)
        return torch.cat([self._joined(*pair) for pair in parts], dim=-1)

    def _split(self, part: Tensor) -> tuple[Tensor, Tensor]:
        half = part.shape[-1] // 2
        return (part[..., 0::2], part[..., 1::2]) if self.interleaved else (part[..., :half], part[..., half:])

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], dim=-1).flatten(-2) if self.interleaved else torch.cat([first, second], -1)


def rope_pairs(config: Any, size: int) -> RopePairs | None:
    """Return the pairs of a model's keys; None for a model without RoPE.

    config: of the decoder, a PreTrainedConfig
    size: coordinates of a key
    """
    parameters = getattr(config, "rope_parameters", None)
    rotary = getattr(config, "rotary_dim", None)
    if (not parameters and rotary is None) or getattr(config, "alibi", False):
        return None
    nested = (parameters or {}).values()
    of_layers = [each for each in (parameters, *nested) if isinstance(each, dict)]
    share = next((each["partial_rotary_factor"] for each in of_layers if "partial_rotary_factor" in each), 1.0)
    rotated = int(rotary if rotary is not None else size * share) // 2 * 2
    return RopePairs(size, min(size, rotated), _is_interleaved(config))


def _is_interleaved(config: Any) -> bool:
    """Whether a model rotates neighbours, by what its own function for quarter turns does to 0, 1, 2, 3."""
    if getattr(config, "rope_interleave", None) is not None:
        return bool(config.rope_interleave)
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return config.model_type in INTERLEAVED
    turn = next((getattr(module, name) for name in QUARTER_TURNS if hasattr(module, name)), None)
    if turn is None:
        return config.model_type in INTERLEAVED
    return bool(
        turn(torch.arange(4.0, device="cpu")[None, None, None])[..., 1] == 0
    )  # GPT-J's takes four dimensions only
