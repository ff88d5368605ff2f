"""What a generation returns: the text, how it ended, and what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pqweights.inference.runtimes.cached import CacheFigures
from pqweights.inference.runtimes.steps import TokenChoice

# How a reply ends: with a token that ends a text, at the most tokens asked for, at the most that the model takes, or
# because the user broke it off.
END, LENGTH, CONTEXT, INTERRUPTED = "end", "length", "context", "interrupted"


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What generated a text.

    runtime: which library computes, in words
    device: cpu or cuda
    dtype: the dtype of the arithmetic
    packed: whether the weights stay packed
    chat: whether the prompt was a turn of a conversation
    max_tokens: the most tokens of a reply
    choice: how each token was chosen
    """

    runtime: str
    device: str
    dtype: str
    packed: bool
    chat: bool
    max_tokens: int
    choice: TokenChoice

    def to_json(self) -> dict[str, Any]:
        """Return the settings as generate --json prints them."""
        settings = {name: value for name, value in vars(self).items() if name != "choice"}
        return settings | vars(self.choice)


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation:
    """One text that a model generated.

    model: its folder, or its name on the Hub
    text: what was generated, without tokens that end a text
    token_ids: all tokens that were chosen
    prompt_tokens: how many tokens came before them
    read_tokens: how many of those the model had to read, because the last call had not left them
    stop: END, LENGTH, CONTEXT or INTERRUPTED
    load_seconds: for opening the tokenizer and the model, with the import of their libraries
    first_token_seconds: from the start, with the model loaded, until the first token was chosen; None if none was
    generation_seconds: from the first token until the last
    peak_bytes: the peak memory of the process so far; on cuda, what torch allocated on the GPU
    kv_cache: what the quantized cache of keys and values takes; None without one
    settings: what generated it
    """

    model: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    read_tokens: int
    stop: str
    load_seconds: float
    first_token_seconds: float | None
    generation_seconds: float
    peak_bytes: int
    kv_cache: CacheFigures | None
    settings: GenerationSettings

    @property
    def prompt_rate(self) -> float | None:
        """Tokens of the prompt that were read per second; None if the first token never came."""
        return self.read_tokens / self.first_token_seconds if self.first_token_seconds else None

    @property
    def rate(self) -> float | None:
        """Tokens generated per second, after the first, which comes with the prompt; None if it was the only one."""
        count, seconds = len(self.token_ids) - 1, self.generation_seconds
        return count / seconds if count > 0 and seconds > 0 else None

    def __repr__(self) -> str:
        return f"<Generation by {self.model}: {len(self.token_ids)} tokens, {self.text[:40]!r}>"

    def to_json(self) -> dict[str, Any]:
        """Return what `generate --json` prints."""
        return {
            "model": self.model,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "stop": self.stop,
            "prompt_tokens": self.prompt_tokens,
            "read_tokens": self.read_tokens,
            "generated_tokens": len(self.token_ids),
            "prompt_tokens_per_second": self.prompt_rate,
            "generated_tokens_per_second": self.rate,
            "first_token_seconds": self.first_token_seconds,
            "generation_seconds": self.generation_seconds,
            "load_seconds": self.load_seconds,
            "peak_bytes": self.peak_bytes,
            "kv_cache": None if self.kv_cache is None else self.kv_cache.to_json(),
            "settings": self.settings.to_json(),
        }
