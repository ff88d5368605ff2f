"""An export target for tests, which the library does not know: BF16 shards that carry a label in their metadata.

A target is one module with a constant TARGET, and one entry of `pqweights.exports.EXPORTS`; ENTRY is that entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import OptionError
from pqweights.exports import RegisteredTarget
from pqweights.exports.bf16 import Bf16Export
from pqweights.exports.loading import LoadableModel, by_transformers
from pqweights.exports.target import TRANSFORMERS, ExportSource, ExportTarget
from pqweights.options import ExportOptions
from pqweights.planning.plan import DEFAULT_METADATA, Safetensors
from pqweights.rewrite.transform import EXPORT, Account, Output, Transform

NAME = "test-labelled"
LABEL_KEY, DEFAULT_LABEL = "test_label", "none"
ENTRY = RegisteredTarget(__name__, "a target of the tests; --mode TEXT is written into every shard")


@dataclass(frozen=True)
class LabelledExport(Bf16Export):
    """The transform from a master to BF16 shards with a label."""

    label: str = DEFAULT_LABEL

    @property
    def account(self) -> Account:
        """The target with its label."""
        return Account(EXPORT, {"target": NAME, "mode": self.label})

    @property
    def output(self) -> Output:
        """Shards whose `__metadata__` holds the label."""
        metadata = {**DEFAULT_METADATA, LABEL_KEY: self.label}
        return replace(super().output, container=lambda tensors, most: Safetensors(metadata))


def read_options(options: ExportOptions) -> str:
    """Return the label.

    Raises OptionError for an empty one.
    """
    if options.mode == "":
        raise OptionError("--mode: expected a text, found an empty one")
    return options.mode or DEFAULT_LABEL


def _prepare(source: ExportSource, label: str) -> tuple[Checkpoint, Transform]:
    return source.checkpoint, LabelledExport(label=label)


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    return [f"Every shard has the label {made_by['mode']}.", *by_transformers(model)]


TARGET = ExportTarget(
    name=NAME,
    runtime=TRANSFORMERS,
    tags=("test-tag", "another-tag"),
    options=("mode",),
    read_options=read_options,
    prepare=_prepare,
    check=lambda master, label: None,
    load_section=_load_section,
    library="test-library",
)
