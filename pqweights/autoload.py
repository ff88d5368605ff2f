"""Registers our quantizer with transformers when that is imported, before or after pqweights; imports neither it nor torch.

transformers keeps its quantizers in the module `transformers.quantizers.auto` and has no entry points for others. A finder on
`sys.meta_path` adds ours as soon as that module has been executed. It stays there: a reload registers again.
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
    """Register now where transformers' quantizers are loaded already, and whenever they are loaded from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if QUANTIZERS in sys.modules:
        _register()


def _register() -> None:
    # Importing pqweights must not break a transformers of another age; what cannot be registered is refused when a master
    # is loaded, by the guard in its config.json.
    with contextlib.suppress(ImportError):
        register = getattr(importlib.import_module(INTEGRATION), "register", None)
        if register is not None:  # else it is being imported, and what it imports led here
            register()


class _Finder:
    """Finds one module, as the other finders do, and gives it a loader that registers when it is done."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
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
    """Another loader, whose modules register our quantizer; everything else is the other loader's."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See importlib.abc.Loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See importlib.abc.Loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
