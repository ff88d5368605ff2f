"""Registering the quantizer with transformers, whether transformers is imported before or after pqweights.

transformers keeps its quantizers in the module `transformers.quantizers.auto`, and has no entry points for others. A
finder on `sys.meta_path` registers the quantizer of pqweights when that module has been executed. It stays there, so
that a reload registers again. Neither transformers nor torch is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

QUANTIZERS = "transformers.quantizers.auto"
INTEGRATION = "pqweights.runtime.loading.quantizer"


def arrange() -> None:
    """Register now if the quantizers of transformers are loaded, and again whenever they are loaded."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if QUANTIZERS in sys.modules:
        _register()


def _register() -> None:
    # Importing pqweights must not break a version of transformers with which the integration does not work; loading a
    # master then fails with the message of the guard in its config.json.
    with contextlib.suppress(ImportError):
        register = getattr(importlib.import_module(INTEGRATION), "register", None)
        if register is not None:  # otherwise the integration is being imported, and its own imports led here
            register()


class _Finder:
    """Finds one module with the other finders, and has the quantizer registered after it was executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module, see importlib.abc.MetaPathFinder; None for any other module."""
        if name != QUANTIZERS:
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                _register_after(spec.loader)
                return spec
        return None


def _register_after(loader: Any) -> None:
    """Have a loader, which is that of one module, register the quantizer after it has executed the module."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _register()

    loader.exec_module = exec_module
