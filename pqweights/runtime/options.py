"""The options of what computes with models."""

from __future__ import annotations

from typing import Any

from pqweights.common import parameters as checks
from pqweights.common.parameters import Options, option, options
from pqweights.errors import OptionError
from pqweights.planning.options import MOST_THREADS

DEFAULT_MAX_TOKENS = 512
DEVICES = ("cpu", "cuda", "auto")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")


def _temperature(name: str, value: Any) -> float:
    """Take a temperature by which logits can be divided, or 0."""
    if not (checks.number(name, value) == 0 or 1e-6 <= value <= 1e6):
        raise OptionError(f"`{name}`: expected 0 (the likeliest token) to 1e6, found {value:g}")
    return float(value)


@options
class GenerationOptions(Options):
    """How text is generated: see `generate` in api.py."""

    no_chat: bool = False
    max_tokens: int = option(default=DEFAULT_MAX_TOKENS, least=1)
    temperature: float | None = option(_temperature, default=None)
    seed: int | None = option(least=0, default=None)
    packed: bool | None = None
    kv_cache: str | None = None
    device: str = option(default="cpu", choices=DEVICES)
    dtype: str = option(default="auto", choices=MODEL_DTYPES)
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)
