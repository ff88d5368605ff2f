"""load_model: a model in a folder or on the Hub through transformers, which takes what transformers takes.

The quantizer that reads the weights of a master is in quantizer.py.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.config import AUTO_CLASSES
from pqweights.checkpoint.master import is_master
from pqweights.checkpoint.names import CONFIG_FILE, QUANT_METHOD
from pqweights.checkpoint.source import read_config
from pqweights.common.advice import pip_install
from pqweights.common.options import Options
from pqweights.convert.listed_files import check_weight_files
from pqweights.errors import MissingDependencyError, OptionError, PqweightsWarning, SourceError
from pqweights.runtime.loading import autoload
from pqweights.storage.addresses import repository_id
from pqweights.storage.sources import local_folder

# The module that each method of quantization needs, and the extra that has it.
NEEDED = {"torchao": ("torchao", "torchao"), "compressed-tensors": ("compressed_tensors", "vllm")}
# What transformers and these libraries raise for a checkpoint that they do not take.
REFUSALS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, ValueError)
# What becomes of weights that the folder cannot give.
AT_RANDOM = "initialized at random"


@dataclass(frozen=True)
class LoadOutcome:
    """A model that transformers loaded.

    folder: where it was loaded from
    model: the PreTrainedModel
    missing: its weights that the folder does not have: transformers initialized them at random
    unexpected: tensors of the folder that the model has no place for
    mismatched: its weights that have another shape in the folder, initialized at random because the caller asked for it
    """

    folder: Path
    model: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    @property
    def warnings(self) -> Iterator[str]:
        """Yield how folder and model differ, a line each."""
        name = type(self.model).__name__
        if self.missing:
            yield self._line(self.missing, f"weight of {name} is not in the folder", AT_RANDOM)
        if self.mismatched:
            yield self._line(self.mismatched, f"weight of {name} has another shape in the folder", AT_RANDOM)
        if self.unexpected:
            yield self._line(self.unexpected, f"tensor of the folder has no place in {name}", "left out")

    def _line(self, names: tuple[str, ...], what: str, then: str) -> str:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{self.folder}: {what}: {names[0]!r}{more}; {then}, as transformers does"


def load_model(
    path: str | os.PathLike[str], *, packed: bool = False, dtype: Any = "auto", device_map: Any = None, **options: Any
) -> Any:
    """Load a model, see pqweights.load_model."""
    loaded = load(path, packed=packed, dtype=dtype, device_map=device_map, **options)
    for line in loaded.warnings:
        warnings.warn(line, PqweightsWarning, stacklevel=3)
    return loaded.model


def load(
    path: str | os.PathLike[str], *, packed: bool = False, dtype: Any = "auto", device_map: Any = None, **options: Any
) -> LoadOutcome:
    """Load a model, see pqweights.load_model, and say how it differs from its folder."""
    folder = _folder(path, options)
    check_weight_files(folder)
    config = read_config(folder)
    if config is None:
        raise SourceError(f"{folder}: expected a model with {CONFIG_FILE}, found none")
    ours = is_master(config)
    if packed and not ours:
        raise SourceError(f"{folder}: packed=True: expected a pqweights master, found another model")
    experts = options.get("experts_implementation")
    if packed and experts not in (None, "eager"):
        raise OptionError(
            f"experts_implementation={experts!r}: packed experts are computed one by one, which is 'eager'; leave it "
            "out, or load the model without packed=True"
        )
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            f"load_model needs transformers 5.23 or newer, and torch ({error}): {pip_install('transformers')}"
        ) from None
    autoload.arrange()
    architectures = config.get("architectures") or [""]
    loader = _class_for(transformers, str(architectures[0]))
    if packed and isinstance(options.get("config"), transformers.PreTrainedConfig):
        options["config"] = copy.deepcopy(options["config"])  # transformers gives options only to those that it reads
        options["config"].packed = True
    elif packed:
        options["packed"] = True
    with _loading(folder, config):
        model, info = loader.from_pretrained(
            folder, dtype=dtype, device_map=device_map, output_loading_info=True, **options
        )
    return LoadOutcome(
        folder,
        model,
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(sorted(name for name, *_ in info["mismatched_keys"])),
    )


def _folder(path: str | os.PathLike[str], options: dict[str, Any]) -> Path:
    """Return the folder of a model; one on the Hub is fetched into the cache."""
    folder = Path(path)
    if isinstance(path, str) and repository_id(path) is not None:
        # True is the token with which the user logged in, which the Hub client finds itself. False, for no token, only
        # reaches transformers, for custom code.
        token = options.get("token")
        hub = Options(revision=options.get("revision"), token=token if isinstance(token, str) else None)
        folder = local_folder(path, hub).path
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder; give a local folder, or ORG/NAME of a model on the Hub")
    return folder


def _class_for(transformers: Any, architecture: str) -> Any:
    """Return the class of transformers with this name; for custom code, the auto class that finds it."""
    own = getattr(transformers, architecture, None) if architecture else None
    if own is not None:
        return own
    for end, name in AUTO_CLASSES.items():
        if architecture.endswith(end):
            return getattr(transformers, name)
    return transformers.AutoModel


@contextlib.contextmanager
def _loading(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
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
