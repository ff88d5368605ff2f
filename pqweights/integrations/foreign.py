"""Checkpoints that other libraries quantized, exports among them: what transformers needs to load them, or why not."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pqweights.checkpoint.master import QUANT_METHOD
from pqweights.common.installing import pip_install
from pqweights.errors import MissingDependencyError, SourceError

# The module that each method of quantization needs, and the extra that has it.
NEEDED = {"torchao": ("torchao", "torchao"), "compressed-tensors": ("compressed_tensors", "vllm")}
# What transformers and these libraries raise for a checkpoint that they do not take.
REFUSALS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, ValueError)


@contextlib.contextmanager
def loading(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """Check that transformers can load a folder, and turn its errors for quantized ones into one line.

    Raises MissingDependencyError, or SourceError with what to do instead. Errors of models that nobody quantized, and
    of masters, stay as they are.
    """
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method is None and config.get("quantization"):
        raise SourceError(
            f"{folder}: transformers cannot load a checkpoint for MLX; load it with mlx_lm.load, or load the master"
        )
    if method in (None, QUANT_METHOD):
        yield
        return
    module, extra = NEEDED.get(str(method), ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise MissingDependencyError(f"{folder}: loading a {method} checkpoint needs {module}: {pip_install(extra)}")
    try:
        yield
    except REFUSALS as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which says nothing about the checkpoint
            raise
        said = " ".join(str(error).split())[:300]
        raise SourceError(
            f"{folder}: transformers cannot load this {method} checkpoint: {type(error).__name__}: {said}; load the "
            "master, or export it to another target"
        ) from error
