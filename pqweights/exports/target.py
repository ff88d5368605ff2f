"""What an export target is: a name, what it takes and makes, which runtime loads that, and what its card says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pqweights.checkpoint.source import Checkpoint
from pqweights.exports.loading import LoadableModel
from pqweights.exports.options import ExportOptions
from pqweights.rewrite.transform import Transform

# The runtimes that load exports: transformers alone, or with the package of that name; mlx-lm.
TRANSFORMERS, TORCHAO, COMPRESSED_TENSORS, MLX = "transformers", "torchao", "compressed-tensors", "mlx"


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A master that is to be exported. original: the checkpoint that it was made from, whose weights are taken instead."""

    folder: Path
    checkpoint: Checkpoint
    original: Path | None


Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class ExportTarget(Generic[Settings]):
    """One kind of export.

    runtime: one of those above. library: library_name of a card, where that is not transformers. tags: of a card. read_options:
    what `prepare` takes; raises OptionError for what the target does not have. prepare: the checkpoint to be rewritten, and the
    transform that does it; raises ExportError for a model that the target has no form for. load_section: paragraphs and blocks
    of a card that say how the result is loaded, from Manifest.made_by and the model.
    """

    name: str
    runtime: str
    tags: tuple[str, ...]
    read_options: Callable[[ExportOptions], Settings]
    prepare: Callable[[ExportSource, Settings], tuple[Checkpoint, Transform]]
    load_section: Callable[[Mapping[str, Any], LoadableModel], list[str]]
    library: str | None = None
