"""What the commands say of a plan: a line for each tensor, sizes, resources, and traffic with the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import tables
from .output import size
from .report import left_out_lines, reason_lines, totals_text
from .report_summary import is_summarized, summary_table

if TYPE_CHECKING:
    from pqweights.checkpoint.source import Checkpoint
    from pqweights.planning.plan import Plan, TensorPlan


COLUMNS = [("shape", False), ("dtype", False), ("action", False), ("codec", False), ("bits", True), ("bytes", True)]


def plan_json(plan: Plan, needs: dict[str, int]) -> dict[str, Any]:
    """Return the document of plan --json."""
    return {
        "totals": plan.totals() | needs,
        "tensors": [tensor.to_json() for tensor in plan.tensors],
        "shards": [{"file": shard.file, "bytes": shard.file_bytes} for shard in plan.shards],
        "copied_files": list(plan.companions),
        "left_out_files": plan.left_out,
    }


def plan_text(plan: Plan, needs: dict[str, int], summary: bool | None) -> str:
    """Return the text of plan.

    needs: disk space and memory, in bytes, as driver.resource_needs returns them
    summary: whether to summarize the tensors; None to choose by their number
    """
    from pqweights.units import counted

    disk, memory = size(needs["peak_disk_bytes"]), size(needs["peak_memory_bytes"])
    return "\n".join(
        [
            *_tensor_lines(plan.tensors, summary),
            "",
            totals_text(plan.totals()),
            f"output: {plan.output_bytes} bytes in {counted(len(plan.shards), 'safetensors file')}; "
            f"{counted(len(plan.companions), 'other file')} copied",
            f"needs: {disk} of disk space, at most {memory} of memory",
            *left_out_lines(plan),
        ]
    )


def _tensor_lines(tensors: Sequence[TensorPlan], summary: bool | None) -> list[str]:
    """Return a summary, or a heading and a line for each tensor; the reasons stand below if there is no room beside."""
    width = tables.terminal_width()
    if is_summarized(summary, len(tensors)):
        note = [] if summary else [f"--no-summary lists all {len(tensors)} tensors"]
        return [summary_table(tensors), *note, "", *reason_lines(tensors)]
    lines = _wide_lines(tensors)
    if width is None or max(len(line) for line in lines) <= width:
        return lines
    rows = [[tensor.name, *_cells(tensor)] for tensor in tensors]
    drop = ["codec"] if len({tensor.codec for tensor in tensors if tensor.codec}) <= 1 else []
    shown = tables.table([("tensor", False), *COLUMNS], rows, drop=[*drop, "action", "dtype"])
    return [shown, "", *reason_lines(tensors)]


def _wide_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a heading and a line for each tensor.

    Thousands of tensors differ in their names alone, so the rest of a line is laid out once for all of them.
    """
    kinds = [(t.shape, t.dtype, t.action, t.codec, t.bits, t.stored[0].dtype, t.reason) for t in tensors]
    one_of = dict(zip(kinds, tensors, strict=True))
    heading, *lines = tables.aligned(COLUMNS, [_cells(t) for t in one_of.values()]).split("\n")
    rest = {kind: f"  {line}  {kind[-1]}".rstrip() for kind, line in zip(one_of, lines, strict=True)}
    width = max([len("tensor"), *[len(t.name) for t in tensors]])
    return [
        f"{'tensor':{width}}  {heading}  reason",
        *[t.name.ljust(width) + rest[kind] for t, kind in zip(tensors, kinds, strict=True)],
    ]


def _cells(tensor: TensorPlan) -> list[str]:
    shape = "x".join(str(length) for length in tensor.shape) or "scalar"
    return [shape, tensor.dtype, tensor.action, tensor.codec or "", str(tensor.bits or ""), str(tensor.bytes)]


def traffic(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what was requested and fetched for the plan of a checkpoint on the Hub; nothing for a local one."""
    from pqweights.checkpoint.file_uses import file_uses, most_fetched
    from pqweights.hub.storage import LOW_DISK_FILES, HubStorage

    storage = checkpoint.storage
    if not isinstance(storage, HubStorage):
        return {}
    of = {"repository": storage.origin.id, "revision": storage.origin.revision}
    at_once = most_fetched(file_uses(checkpoint.tensors), storage.files(), LOW_DISK_FILES)
    disk = {"source_bytes": checkpoint.weight_file_bytes, "low_disk_bytes": at_once}
    return {"hub": of | {"requests": storage.hub.requests, "bytes": storage.hub.bytes} | disk}


def traffic_lines(found: dict[str, Any]) -> list[str]:
    """Return the traffic as lines of text."""
    from pqweights.units import counted

    if not found:
        return []
    hub = found["hub"]
    return [
        f"fetching the source needs, in addition, {size(hub['source_bytes'])} in the Hub's cache, or with --low-disk "
        f"{size(hub['low_disk_bytes'])} in the output folder",
        f"{hub['repository']} at {hub['revision']}: {counted(hub['requests'], 'request')}, {size(hub['bytes'])} "
        "fetched for this plan",
    ]
