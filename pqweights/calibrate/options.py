"""The options of what measures models."""

from __future__ import annotations

from collections.abc import Sequence

from pqweights.common import parameters as checks
from pqweights.common.parameters import Options, StrPath, option, options
from pqweights.planning.options import MOST_THREADS
from pqweights.runtime.options import DEVICES, MODEL_DTYPES


@options
class TextOptions(Options):
    """How a text is cut into windows that are scored.

    window, stride: in tokens; by default 2048, or the model's limit if smaller, and a quarter of that, at most 512
    score_first: score all tokens of the first window, not only its last ones
    max_tokens: how many tokens of the text are read at most; None for all
    """

    tokenizer: StrPath | None = None
    no_bos: bool = False
    window: int | None = option(least=2, default=None)
    stride: int | None = option(least=1, default=None)
    score_first: bool = False
    max_tokens: int | None = option(least=2, default=None)


@options
class EvaluationOptions(TextOptions):
    """What is measured, and how models are computed.

    reference: a model to compare with, token by token, or the .pqref file that was saved of one
    save_reference: the .pqref file to write of the reference, or of the only model without one
    kv_caches: how keys and values are quantized, for each measurement
    text_name: the name of the text in the report
    """

    reference: StrPath | None = option(checks.location, default=None)
    save_reference: StrPath | None = option(checks.location, default=None)
    dtype: str = option(default="float32", choices=MODEL_DTYPES)
    device: str = option(default="cpu", choices=DEVICES)
    packed: bool = False
    kv_caches: str | Sequence[str] = option(checks.patterns, default=())
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)
    text_name: str = "the text"
