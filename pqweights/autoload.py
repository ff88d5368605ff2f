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
INTEGRATION = "pqweights.integrations.quantizer"


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
    """Finds one module with the other finders, and gives it a loader that then registers the quantizer."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module, see importlib.abc.MetaPathFinder; None for any other module."""
        if name != QUANTIZERS:
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _RegisteringLoader:
    """Wraps a loader, and registers the quantizer after it has executed a module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create a module with the wrapped loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute a module with the wrapped loader, then register."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
