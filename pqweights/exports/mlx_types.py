"""Which types of models the installed mlx-lm has, found in its files: to import it takes a second."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pqweights.common.installing import pip_install
from pqweights.errors import ExportError, MissingDependencyError


def check_model_type(model_type: str, advice: str) -> None:
    """Raise ExportError if mlx-lm has no models of a type. advice: the end of the message

    Raises MissingDependencyError if mlx or mlx-lm is not installed.
    """
    package = importlib.util.find_spec("mlx_lm")
    if importlib.util.find_spec("mlx") is None or package is None or not package.submodule_search_locations:
        raise MissingDependencyError(f"it needs mlx and mlx-lm: {pip_install('mlx')}")
    folder = Path(package.submodule_search_locations[0])
    if (folder / "models" / f"{model_type}.py").is_file():
        return
    # Some types are those of another module, by tables of literals that only an import would give.
    if f'"{model_type}"' not in (folder / "utils.py").read_text(encoding="utf-8"):
        raise ExportError(f"mlx-lm does not support this model ({model_type!r}); {advice}")
