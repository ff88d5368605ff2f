"""Optional packages: imported when a folder needs them, kept quiet, their errors turned into one line."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from pqweights.common.advice import pip_install
from pqweights.errors import MemoryShortageError, MissingDependencyError, PqweightsWarning, SourceError

# Loggers that log at import, or while something is loaded.
NOISY = ("torchao", "torch.utils._pytree", "transformers", "datasets", "huggingface_hub")
# What these packages raise in their own code for configurations, tokenizers and weights that they do not take.
REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def package(name: str, extra: str, why: str = "evaluating this folder") -> Any:
    """Import an optional package, untyped: with its types, mypy would check the package together with pqweights.

    name: the module to import.
    extra: the extra of pqweights that installs it.
    why: what needs it, for the message of the error.

    Raises MissingDependencyError.
    """
    try:
        with silent():
            return importlib.import_module(name)
    except ImportError:
        missing = name.partition(".")[0]
        raise MissingDependencyError(f"{why} needs {missing}: {pip_install(extra)}") from None


# How messages of torch and MLX say that there is no memory.
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or MLX says that there is no memory, and so nothing about the model."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in said for words in OUT_OF_MEMORY)
    )


def memory_shortage(what: str, error: BaseException) -> MemoryShortageError:
    """Return the line for an error that `is_out_of_memory`. what: what there was no memory for"""
    said = " ".join(str(error).split())[:200] or "MemoryError"
    return MemoryShortageError(
        f"{what}: not enough memory ({said}); end other programs, and run the same command again"
    )


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress warnings and log messages; those of pqweights itself come afterwards."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", PqweightsWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    for warning in heard:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, log messages and progress bars.

    Do not import inside it: an imported module may keep the stream that it finds as standard error.
    """
    with silent(), contextlib.redirect_stderr(io.StringIO()):
        yield


def _is_bug(error: BaseException) -> bool:
    """Whether an error was raised in a line of pqweights, not in a package that it calls."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and Path(frames[-1][0].f_code.co_filename).is_relative_to(Path(__file__).parents[1])


class Refused(contextlib.AbstractContextManager["Refused"]):
    """A context in which the errors of a package become SourceError; it may hold nothing but calls of that package.

    what: the input and the package, for the message.
    own: a function that the package calls, whose errors stay as they are.
    """

    def __init__(self, what: str, own: Callable[..., object] | None = None) -> None:
        self._what, self._own = what, getattr(own, "__code__", None)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is None or error is None:
            return
        if not isinstance(error, OSError) and _is_bug(error):
            return  # a bug keeps its traceback
        if self._own and any(frame.f_code is self._own for frame, _ in traceback.walk_tb(trace)):
            return
        if is_out_of_memory(error):
            raise memory_shortage(self._what, error) from error
        # For files that they cannot parse, safetensors raises its own child of Exception, and tokenizers Exception
        # itself.
        if isinstance(error, REFUSALS) or error_type is Exception or error_type.__name__ == "SafetensorError":
            raise SourceError(f"{self._what}: {error_type.__name__}: {' '.join(str(error).split())[:300]}") from error


def give_back_memory() -> None:
    """Return what was freed to the system: glibc keeps the room of temporary tensors that lies below what stays."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
