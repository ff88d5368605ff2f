"""The options of what computes with models, and of what measures them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pqweights.common import options as checks
from pqweights.common.options import MOST_THREADS, Checked, StrPath, option, options
from pqweights.errors import OptionError

DEFAULT_MAX_TOKENS = 512
DEVICES = ("cpu", "cuda", "auto")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")


def _temperature(name: str, value: Any) -> float:
    """Take a temperature by which logits can be divided, or 0."""
    if not (checks.number(name, value) == 0 or 1e-6 <= value <= 1e6):
        raise OptionError(f"`{name}`: expected 0 (the likeliest token) to 1e6, found {value:g}")
    return float(value)


@options
class GenerationOptions(Checked):
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


@options
class EvaluationOptions(Checked):
    """What is measured, how a text is cut into windows that are scored, and how models are computed.

    window, stride: in tokens; by default 2048, or the model's limit if smaller, and a quarter of that, at most 512
    score_first: score all tokens of the first window, not only its last ones
    max_tokens: how many tokens of the text are read at most; None for all
    reference: a model to compare with, token by token, or the .pqref file that was saved of one
    save_reference: the .pqref file to write of the reference, or of the only model without one
    kv_caches: how keys and values are quantized, for each measurement
    text_name: the name of the text in the report
    """

    tokenizer: StrPath | None = None
    no_bos: bool = False
    window: int | None = option(least=2, default=None)
    stride: int | None = option(least=1, default=None)
    score_first: bool = False
    max_tokens: int | None = option(least=2, default=None)
    reference: StrPath | None = option(checks.location, default=None)
    save_reference: StrPath | None = option(checks.location, default=None)
    dtype: str = option(default="float32", choices=MODEL_DTYPES)
    device: str = option(default="cpu", choices=DEVICES)
    packed: bool = False
    kv_caches: str | Sequence[str] = option(checks.patterns, default=())
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)
    text_name: str = "the text"
