"""Which targets a checkpoint can be exported to, decided by the targets themselves.

Only the configuration and the names and shapes of tensors are looked at, so that the answer is there before the first
weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.errors import ExportError, MissingDependencyError, SourceError
from pqweights.planning.decisions import with_weights
from pqweights.targets import EXPORTS, get_target
from pqweights.targets.architectures import UNEXAMINED, is_examined
from pqweights.targets.target import COMPRESSED_TENSORS, TORCHAO, ExportTarget

# A layer or an expert: what its name begins with, its number, and the name of a tensor in it.
_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.*)")


@dataclass(frozen=True, kw_only=True)
class PossibleExport:
    """What is known of the export of a checkpoint to one target, with the target's defaults.

    target: the name of the target
    possible: whether it can be made; None if that is not known
    reason: why not, or what is still to be found out; None if there is nothing
    """

    target: str
    possible: bool | None
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the target in plan --json."""
        return asdict(self)


def possible_exports(checkpoint: Checkpoint) -> tuple[PossibleExport, ...]:
    """Return for every target whether a checkpoint can be exported to it."""
    checkpoint = with_weights(checkpoint)
    return tuple(_possible(name, checkpoint) for name in EXPORTS)


def _possible(name: str, checkpoint: Checkpoint) -> PossibleExport:
    target = get_target(name)
    try:
        check(target, checkpoint, Options())
    except (ExportError, SourceError) as error:
        return PossibleExport(target=name, possible=False, reason=str(error))
    except MissingDependencyError as error:
        return PossibleExport(target=name, possible=None, reason=str(error))
    names = target.runtime in (TORCHAO, COMPRESSED_TENSORS) and not is_examined(checkpoint.config)
    return PossibleExport(target=name, possible=True, reason=UNEXAMINED if names else target.unchecked(checkpoint))


def check(target: ExportTarget, checkpoint: Checkpoint, options: Options) -> None:
    """Check whether a checkpoint can be exported. Raises ExportError or MissingDependencyError."""
    settings = target.settings(options)
    if target.check is not None:
        target.check(checkpoint)
    else:
        settings.assign(one_of_each(checkpoint), None)


def one_of_each(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the first of all layers, and within them of all experts, that are alike."""
    named = [(tensor.name, tensor) for tensor in checkpoint.tensors]
    return replace(checkpoint, tensors=tuple(_firsts(named, checkpoint.weights)))


def _firsts(named: Sequence[tuple[str, LogicalTensor]], weights: frozenset[str]) -> Iterator[LogicalTensor]:
    """Yield the tensors of the first of all blocks that are alike. named: each with its own name within a block"""
    blocks: dict[tuple[str, str], list[tuple[str, LogicalTensor]]] = {}
    for name, tensor in named:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            yield tensor
        else:
            blocks.setdefault((match[1], match[2]), []).append((match[3], tensor))
    firsts: dict[object, list[tuple[str, LogicalTensor]]] = {}
    for (prefix, _), block in blocks.items():
        content = (prefix, tuple([(name, of.shape, of.dtype, of.name in weights) for name, of in block]))
        firsts.setdefault(content, block)
    for block in firsts.values():
        yield from _firsts(block, weights)
