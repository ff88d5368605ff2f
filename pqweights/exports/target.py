"""What an export target is: which options it takes, how it is made, which runtime loads it, and what its card says.

Each target is one module with a constant TARGET, registered by a line in EXPORTS (the package's `__init__.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import Storage
from pqweights.exports.loading import LoadableModel
from pqweights.exports.options import PLAIN, check_known
from pqweights.options import ExportOptions
from pqweights.rewrite.folding.fold import check_fold
from pqweights.rewrite.manifest import Manifest
from pqweights.rewrite.transform import Transform
from pqweights.storage.remote.addresses import Address

# The runtimes that load exports: transformers alone, transformers with the package of that name, mlx-lm, or llama.cpp.
TRANSFORMERS, TORCHAO, COMPRESSED_TENSORS, MLX = "transformers", "torchao", "compressed-tensors", "mlx"
LLAMA_CPP = "llama.cpp"

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A master that is to be exported.

    folder: where it lies
    checkpoint: the opened master
    manifest: its manifest, if it has one
    original: the checkpoint from which it was made, if its weights are to be used instead of the decoded ones
    calibration: a file of moments, for error-compensated rounding or for the fold
    rounding: how codes are chosen, "plain" or "gptq"
    fold: whether factors are moved between layers before weights are rounded
    """

    folder: Path | Storage
    checkpoint: Checkpoint
    manifest: Manifest | None
    original: Path | Address | None
    calibration: Path | None = None
    rounding: str = PLAIN
    fold: bool = False


@dataclass(frozen=True, kw_only=True)
class PlannedMaster:
    """A master that is not made yet.

    source: the checkpoint from which it is to be made
    layers: of all layers and all experts that are alike the first one, with the weights told apart that become codes
    """

    source: Checkpoint
    layers: Checkpoint


@dataclass(frozen=True, kw_only=True)
class ExportTarget(Generic[Settings]):
    """One kind of export.

    name: its key in EXPORTS
    runtime: what loads it, one of the runtimes above
    tags: the tags of its card
    options: the fields of ExportOptions that it takes; the manifest of an export states them under the same names
    read_options: checks the values of those options, and returns what `prepare` takes;
        raises OptionError for a value that the target does not have
    prepare: returns the checkpoint to be rewritten, and the transform that does it;
        raises ExportError for a model that the target cannot store
    check: decides whether a master can be exported, from the configuration and the names and shapes of tensors;
        raises ExportError if it cannot, MissingDependencyError if a package is missing that knows
    load_section: returns the paragraphs and code blocks of a card that say how to load the result,
        from Manifest.made_by and the model
    library: the library_name of its card, if that is not transformers
    account: keys of the manifest's account besides options
    unchecked: what `check` leaves open, for a message; None if it leaves nothing open
    """

    name: str
    runtime: str
    tags: tuple[str, ...]
    options: tuple[str, ...]
    read_options: Callable[[ExportOptions], Settings]
    prepare: Callable[[ExportSource, Settings], tuple[Checkpoint, Transform]]
    check: Callable[[PlannedMaster, Settings], object]
    load_section: Callable[[Mapping[str, Any], LoadableModel], list[str]]
    library: str | None = None
    account: tuple[str, ...] = ()
    unchecked: str | None = None

    def settings(self, asked: ExportOptions) -> Settings:
        """Return what `prepare` takes for the options that a user gave.

        Raises OptionError for an option, or a value, that the target does not have.
        """
        check_known(asked, self.name, self.options)
        check_fold(asked.fold)
        return self.read_options(asked)
