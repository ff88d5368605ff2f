"""Which files of a checkpoint are needed when its tensors are read in order, and how many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pqweights.checkpoint.file_state import FileState
from pqweights.checkpoint.readers import LogicalTensor


@dataclass(frozen=True)
class FileUse:
    """When a file is needed while tensors are read in order.

    first, last: the places of the first and the last tensor that need the file
    together: how many files are needed at the first place, or both before and after it
    """

    first: int
    last: int
    together: int


def file_uses(tensors: Sequence[LogicalTensor], places: Sequence[int] | None = None) -> dict[str, FileUse]:
    """Return when each file is needed, by file, in the order in which they are needed.

    places: which of the tensors are read; by default all
    """
    spans: dict[str, tuple[int, int]] = {}
    for place in range(len(tensors)) if places is None else places:
        for part in tensors[place].parts:
            spans[part.file] = (spans.get(part.file, (place, place))[0], place)
    return {
        file: FileUse(first, last, sum(begin <= first <= end for begin, end in spans.values()))
        for file, (first, last) in spans.items()
    }


def most_fetched(uses: dict[str, FileUse], files: dict[str, FileState], at_once: int) -> int:
    """Return the most bytes of files that are held together, if each is deleted after its last use.

    at_once: how many files are held, because later ones are fetched ahead; more if more are needed together
    """
    most, order = 0, list(uses)
    for number, file in enumerate(order):
        held = [f for f in order[: number + 1] if uses[f].last >= uses[file].first]
        held += order[number + 1 : number + 1 + max(0, at_once - len(held))]
        most = max(most, sum(files[f].byte_count for f in held))
    return most
