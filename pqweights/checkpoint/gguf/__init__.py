"""GGUF, the file format of llama.cpp: a model in its terms, its files, and what becomes of each weight."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

from pqweights.common.advice import pip_install
from pqweights.errors import MissingDependencyError


def gguf_package() -> Any:
    """Import the gguf package, untyped: it has the keys, names and vocabularies of the format, and writes headers.

    Raises MissingDependencyError.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise MissingDependencyError(f"the gguf target needs gguf: {pip_install('gguf')}") from None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress what the package logs: it warns of what is decided here."""
    logger = logging.getLogger("gguf")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
