"""What the commands say of a fold: which vectors between layers it changes, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .output import first_names

if TYPE_CHECKING:
    from pqweights.rewrite.task import RewriteReport


def planned_fold_lines(fold: dict[str, Any] | None) -> list[str]:
    """Return what may be folded. fold: the key `fold` of plan --json, if there is one."""
    if fold is None:
        return []
    from pqweights.common.units import counted

    what = f"{counted(len(fold['vectors']), 'vector')} between layers, each if its channels differ enough"
    if fold["warnings"]:
        what = "nothing"
    may = f"fold {fold['kind']}: {what}"
    return [may, *_left_lines(fold), *fold["warnings"]]


def fold_lines(done: RewriteReport) -> list[str]:
    """Return what was folded; nothing for a result without a fold."""
    fold = done.transform.notes(done.records).document.get("fold")
    if fold is None:
        return []
    folded = {name for record in done.records for name in record.folded}
    count = f"{len(folded)} of {len(fold['vectors'])} vectors between layers; the others differ too little"
    all_of_them = f"all {len(folded)} vectors between layers"
    what = all_of_them if len(folded) == len(fold["vectors"]) else count
    return [f"folded ({fold['kind']}): {what}", *_left_lines(fold)]


def _left_lines(fold: dict[str, Any]) -> list[str]:
    """Return a line for each reason why a vector is left as it is."""
    left: dict[str, Sequence[str]] = fold["left"]
    return [f"  not folded: {len(names)}, {reason}: {first_names(names)}" for reason, names in left.items()]
