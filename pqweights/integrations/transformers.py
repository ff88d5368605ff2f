"""load_model: a model in a folder, by transformers, with every weight accounted for. (The quantizer is in quantizer.py.)"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from pqweights import autoload
from pqweights.checkpoint.config import AUTO_CLASSES
from pqweights.checkpoint.master import is_master
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.source import read_config
from pqweights.errors import MasterError, MissingDependencyError, SourceError
from pqweights.hub.sources import Access, local_folder, repository_id


def load_model(
    path: str | os.PathLike[str], *, packed: bool = False, dtype: Any = "auto", device_map: Any = None, **options: Any
) -> Any:
    """See pqweights.load_model."""
    folder = Path(path)
    if isinstance(path, str) and repository_id(path) is not None:
        # token=True is the one that the user logged in with; False, none, is left to transformers for custom code alone.
        token = options.get("token")
        access = Access(options.get("revision"), token if isinstance(token, str) else None)
        folder = local_folder(path, access).path
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder; give a local folder, or ORG/NAME of a model on the Hub")
    config = read_config(folder)
    if config is None:
        raise SourceError(f"{folder}: expected a model with {CONFIG_FILE}, found none")
    ours = is_master(config)
    if packed and not ours:
        raise SourceError(f"{folder}: packed=True: expected a pqweights master, found another model")
    try:
        import transformers

        from pqweights.integrations.quantizer import packed_weights
    except ImportError as error:
        raise MissingDependencyError(
            f"load_model needs transformers 5.23 or newer, and torch ({error}): pip install 'pqweights[transformers]'"
        ) from None
    autoload.arrange()
    architectures = config.get("architectures") or [""]
    loader = _class_for(transformers, str(architectures[0]))
    with packed_weights() if packed else contextlib.nullcontext():
        model, info = loader.from_pretrained(
            folder, dtype=dtype, device_map=device_map, output_loading_info=True, **options
        )
    for kind, names in (("missing", info["missing_keys"]), ("left over", info["unexpected_keys"])):
        if names:
            what = (
                f"{folder}: {len(names)} weights of {type(model).__name__} are {kind}, {min(names)!r} among them; the folder "
                "does not hold this model: fetch or make it again"
            )
            raise MasterError(what) if ours else SourceError(what)
    return model


def _class_for(transformers: Any, architecture: str) -> Any:
    """The class of that name, or for custom code the one that finds it."""
    found = getattr(transformers, architecture, None) if architecture else None
    if found is not None:
        return found
    for end, name in AUTO_CLASSES.items():
        if architecture.endswith(end):
            return getattr(transformers, name)
    return transformers.AutoModel
