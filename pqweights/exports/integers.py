"""The terms in which an integer target says which weights become integers, how, and where each number goes.

integer_export.py carries out what the targets say.
docs/exports.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.exports.formats import Layout, Rule
from pqweights.planning.plan import Container, ShardPlan, TensorPlan
from pqweights.rewrite.transform import SmallFiles


class Importances(Protocol):
    """What is known of how large the inputs of weights are."""

    def of(self, tensor: LogicalTensor) -> list[tuple[npt.NDArray[np.float32], int] | None]:
        """Return for each matrix of a weight the mean square of each input, [K], and of how many tokens.

        None for a matrix of which the inputs are not known; an empty list for a tensor that is not rounded.
        """
        ...


@dataclass(frozen=True)
class Rounding:
    """How one weight becomes integers.

    label: what the plan calls its codec, if not by kind and group size
    reason: why it is rounded so, if not by the name of the rule
    """

    rule: Rule
    layout: Layout
    label: str | None = None
    reason: str | None = None

    @property
    def codec(self) -> str:
        """The name in the plan, such as symmetric-g128."""
        return f"{self.rule.kind}-g{self.rule.group_size}" if self.label is None else self.label


@dataclass(frozen=True)
class Stays:
    """The decision to store a weight plainly, although others of its kind become integers.

    dtype: the dtype that it gets whatever the others get
    """

    reason: str
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a target makes of a model, decided from headers and configuration.

    tensors: the tensors that the runtime holds
    decisions: what becomes of weights, by name; a tensor without a decision is stored plainly
    left_out: tensors of the master that the runtime does not hold, each with the reason
    metadata: the `__metadata__` of the safetensors files
    config: config.json; None if there is none
    plain_dtype: the `dtype` of plain_plan for tensors that are stored plainly
    warnings: what the user should know of the result before using it, a sentence each
    container: returns the format of the files, from the planned tensors and the size of files; None for safetensors
    small_files: returns files that are written beside the weights, by name; None if there are none
    companions: the files that are copied; None for all that the master has
    measured: tensors that are stored plainly, and whose inputs the small files tell of
    """

    tensors: tuple[LogicalTensor, ...]
    decisions: Mapping[str, Rounding | Stays]
    left_out: dict[str, str]
    metadata: dict[str, str]
    config: dict[str, Any] | None
    plain_dtype: str | None = "BF16"
    warnings: tuple[str, ...] = ()
    container: Callable[[Sequence[TensorPlan], int], Container] | None = None
    small_files: Callable[[Sequence[ShardPlan], Importances | None], SmallFiles] | None = None
    companions: tuple[str, ...] | None = None
    measured: tuple[LogicalTensor, ...] = ()


class IntegerTarget(Protocol):
    """A format of integers with its options."""

    @property
    def compares_master(self) -> bool:
        """Whether, with an original, the values of the master are rounded as well, to measure what the detour costs."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the target: its name and its options."""
        ...

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """Decide what becomes of a master, or of a master with the original's values.

        Raises ExportError if the target cannot store the model, MissingDependencyError if a package is missing.
        """
        ...
