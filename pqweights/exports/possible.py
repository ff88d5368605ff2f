"""Which targets a checkpoint can be exported to once it is a master, decided by the targets themselves.

Only the configuration, the names and shapes of tensors and what is planned for each are looked at, so that the answer
is there before the first weight is quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pqweights.checkpoint.readers import LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import ExportError, MissingDependencyError, SourceError
from pqweights.exports import EXPORTS, get_target
from pqweights.exports.architectures import UNEXAMINED, is_examined
from pqweights.exports.target import COMPRESSED_TENSORS, TORCHAO, PlannedMaster
from pqweights.planning.options import ExportOptions
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.rewrite.task import PossibleExport

# A layer or an expert: what its name begins with, its number, and the name of a tensor in it.
_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.*)")


class _Alike(NamedTuple):
    """A tensor for all that are alike.

    name: the part of its name that is its own within a layer
    tensor, plan: the first of them, and what is planned for it
    """

    name: str
    tensor: LogicalTensor
    plan: TensorPlan


def planned_master(checkpoint: Checkpoint, planned: Sequence[TensorPlan]) -> PlannedMaster:
    """Return the master of a plan. planned: of each tensor in order"""
    pairs = zip(checkpoint.tensors, planned, strict=True)
    alike = [*_one_of_each([_Alike(tensor.name, tensor, plan) for tensor, plan in pairs])]
    return PlannedMaster(
        source=checkpoint,
        planned=planned,
        layers=replace(checkpoint, tensors=as_in_master((of.tensor, of.plan) for of in alike)),
    )


def possible_exports(master: PlannedMaster) -> tuple[PossibleExport, ...]:
    """Return for every target whether a master can be exported to it."""
    return tuple(_possible(name, master) for name in EXPORTS)


def _one_of_each(named: Sequence[_Alike]) -> Iterator[_Alike]:
    """Yield the tensors of the first of all layers, and within them of all experts, that are alike."""
    blocks: dict[tuple[str, str], list[_Alike]] = {}
    for of in named:
        match = _NUMBERED.fullmatch(of.name)
        if match is None:
            yield of
        else:
            blocks.setdefault((match[1], match[2]), []).append(_Alike(match[3], *of[1:]))
    firsts: dict[object, list[_Alike]] = {}
    for (prefix, _), block in blocks.items():
        content = (prefix, tuple([(of.name, of.plan.shape, of.plan.dtype, of.plan.action) for of in block]))
        firsts.setdefault(content, block)
    for block in firsts.values():
        yield from _one_of_each(block)


def as_in_master(pairs: Iterable[tuple[LogicalTensor, TensorPlan]]) -> tuple[LogicalTensor, ...]:
    """Return tensors, of which those can be told from the others that a master will hold codes for.

    pairs: each tensor with what is planned for it
    """
    fields = ("name", "shape", "dtype", "plain_dtype", "parts")
    return tuple(
        OriginalTensor(**{field: getattr(tensor, field) for field in fields}, original=tensor)
        if plan.action == QUANTIZE
        else tensor
        for tensor, plan in pairs
    )


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
