"""Which targets a checkpoint can be exported to once it is a master, decided by the targets themselves.

Only the configuration, the names and shapes of tensors and what is planned for each are looked at, so that the answer
is there before the first weight is quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pqweights.checkpoint.readers import LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import ExportError, MissingDependencyError, SourceError
from pqweights.exports import EXPORTS, get_target
from pqweights.exports.architectures import UNEXAMINED, is_examined
from pqweights.exports.target import COMPRESSED_TENSORS, TORCHAO, PlannedMaster
from pqweights.options import ExportOptions
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.rewrite.task import PossibleExport

# A layer or an expert: what its name begins with, its number, and the name of a tensor in it.
_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.*)")
# A tensor with the part of its name that is its own within a layer, and what is planned for it.
_Named = tuple[str, LogicalTensor, TensorPlan]


def possible_exports(checkpoint: Checkpoint, planned: Sequence[TensorPlan]) -> tuple[PossibleExport, ...]:
    """Return for every target whether the master of a plan can be exported to it. planned: of each tensor in order"""
    named = [(tensor.name, tensor, plan) for tensor, plan in zip(checkpoint.tensors, planned, strict=True)]
    layers = tuple(_as_in_master(tensor, plan) for tensor, plan in _one_of_each(named))
    master = PlannedMaster(source=checkpoint, layers=replace(checkpoint, tensors=layers))
    return tuple(_possible(name, master) for name in EXPORTS)


def _one_of_each(named: Sequence[_Named]) -> Iterator[tuple[LogicalTensor, TensorPlan]]:
    """Yield the tensors of the first of all layers, and within them of all experts, that are alike."""
    blocks: dict[tuple[str, str], list[_Named]] = {}
    for name, tensor, plan in named:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            yield tensor, plan
        else:
            blocks.setdefault((match[1], match[2]), []).append((match[3], tensor, plan))
    seen = set()
    for (prefix, _), block in blocks.items():
        content = (prefix, tuple((name, plan.shape, plan.dtype, plan.action) for name, _, plan in block))
        if content not in seen:
            seen.add(content)
            yield from _one_of_each(block)


def _as_in_master(tensor: LogicalTensor, plan: TensorPlan) -> LogicalTensor:
    """Return a tensor that can be told from one that stays plain if the master will hold codes for it."""
    if plan.action != QUANTIZE:
        return tensor
    fields = ("name", "shape", "dtype", "plain_dtype", "parts")
    return OriginalTensor(**{field: getattr(tensor, field) for field in fields}, original=tensor)


def _possible(name: str, master: PlannedMaster) -> PossibleExport:
    target = get_target(name)
    try:
        target.check(master, target.settings(ExportOptions()))
    except (ExportError, SourceError) as error:
        return PossibleExport(target=name, possible=False, reason=str(error))
    except MissingDependencyError as error:
        return PossibleExport(target=name, possible=None, reason=str(error))
    names = target.runtime in (TORCHAO, COMPRESSED_TENSORS) and not is_examined(master.source.config)
    return PossibleExport(target=name, possible=True, reason=UNEXAMINED if names else target.unchecked)
