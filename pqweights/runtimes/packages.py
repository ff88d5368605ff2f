"""The packages that compute: imported when a folder needs them, kept quiet, and their refusals as one line."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from pqweights.errors import MissingDependencyError, SourceError

# Loggers that speak at import, or while something is loaded.
NOISY = ("torchao", "torch.utils._pytree", "transformers", "datasets", "huggingface_hub")
# What these packages raise, in their own code, for configurations, tokenizers and weights that they do not take.
REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def package(name: str, extra: str, why: str = "evaluating this folder") -> Any:
    """An optional package; untyped, because the types of these would be checked with ours.

    Raises MissingDependencyError.
    """
    try:
        with silent():
            return importlib.import_module(name)
    except ImportError:
        missing = name.partition(".")[0]
        raise MissingDependencyError(f"{why} needs {missing}: pip install 'pqweights[{extra}]'") from None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Hold back warnings and remarks."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """And progress bars. Not for imports: what they import may keep the stream that it finds as standard error."""
    with silent(), contextlib.redirect_stderr(io.StringIO()):
        yield


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised in a line of pqweights, not in a package that it calls."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and Path(frames[-1][0].f_code.co_filename).is_relative_to(Path(__file__).parents[1])


class Refused(contextlib.AbstractContextManager["Refused"]):
    """Around calls of a package alone: what it raises for an input becomes a SourceError. what: the input, and the package."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, OSError) and _is_ours(error):
            return  # a bug keeps its traceback
        # safetensors and tokenizers raise bare children of Exception, and Exception itself, for files that they cannot parse.
        if (
            isinstance(error, REFUSALS)
            or kind is Exception
            or (kind is not None and kind.__name__ == "SafetensorError")
        ):
            assert kind is not None
            raise SourceError(f"{self._what}: {kind.__name__}: {' '.join(str(error).split())[:300]}") from error
