"""The summary of a plan or a result: a line for each role, codec and bit width in place of one for each tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import tables

if TYPE_CHECKING:
    from pqweights.planning.plan import TensorPlan
    from pqweights.rewrite.records import TensorRecord

# On a terminal, more tensors than this are summarized unless the user asks for all of them.
MOST_LISTED = 200
BYTES_COLUMN = 6


def action_text(tensor: TensorPlan) -> str:
    """Return what was done with a tensor, in the words of the summary of an export."""
    return "plain" if tensor.action == "decode" else tensor.action


def is_summarized(asked: bool | None, tensors: int) -> bool:
    """Whether to print a summary. asked: what the user asked for; None to choose by the number of tensors."""
    return asked if asked is not None else tables.terminal_width() is not None and tensors > MOST_LISTED


def summary_table(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord] | None = None) -> list[str]:
    """Return a table with a line for each role, action, codec and bit width, those with most bytes first.

    records: what was measured of each tensor; None for a plan
    """
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        groups[tensor.role, action_text(tensor), tensor.codec or "", str(tensor.bits or "")].append(number)
    rows = [
        [
            *kind,
            *_figures([tensors[number] for number in numbers]),
            *([] if records is None else [_error([records[number] for number in numbers])]),
        ]
        for kind, numbers in groups.items()
    ]
    columns = [("role", False), ("action", False), ("codec", False), ("bits", True), ("tensors", True)]
    columns += [("weights", True), ("bytes", True), ("bits/weight", True)]
    columns += [] if records is None else [("relative MSE", True)]
    # On a narrow terminal, what can be seen without them is left out.
    drop = ["action"] if {tensor.action for tensor in tensors} <= {"quantize", "keep"} else []
    drop += ["codec"] if len({tensor.codec for tensor in tensors if tensor.codec}) <= 1 else []
    ordered = sorted(rows, key=lambda row: -int(row[BYTES_COLUMN]))
    return tables.table(columns, ordered, drop=drop)


def _figures(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return the number of tensors, their weights, bytes, and bits per weight."""
    weights, byte_count = sum(tensor.weights for tensor in tensors), sum(tensor.bytes for tensor in tensors)
    return [str(len(tensors)), str(weights), str(byte_count), f"{8 * byte_count / weights:.4f}" if weights else ""]


def _error(records: Sequence[TensorRecord]) -> str:
    """Return the relative MSE over all tensors of a line; an empty text if none was measured."""
    from pqweights.rewrite.records import mean_error

    error = mean_error(records, "relative_mse")
    return "" if error is None else f"{error:.6f}"
