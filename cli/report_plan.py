"""What the commands say of a plan: a line for each tensor, sizes, resources, and traffic with the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pqweights.common.units import counted, size_text

from . import tables
from .printable import printable
from .report import (
    export_lines,
    is_summarized,
    left_out_lines,
    planned_fold_lines,
    reason_lines,
    summary_table,
    totals_lines,
)

if TYPE_CHECKING:
    from pqweights.planning.plan import TensorPlan
    from pqweights.rewrite.results.plan_report import HubTraffic, PlanReport
    from pqweights.rewrite.task import ResourceNeeds


COLUMNS = ["shape", "dtype", "action", "codec", "#bits", "#bytes"]


def plan_lines(report: PlanReport, summary: bool | None) -> list[str]:
    """Return the lines of plan, without how a size was fitted.

    summary: whether to summarize the tensors; None to choose by their number
    """
    plan, needs = report.plan, report.needs
    return [
        *_tensor_lines(plan.tensors, summary),
        "",
        *totals_lines(plan.totals),
        f"output: {plan.output_bytes} bytes in {counted(len(plan.shards), 'safetensors file')}; "
        f"{counted(len(plan.companions), 'other file')} copied",
        f"needs: {_room(needs)}, at most {size_text(needs.peak_memory_bytes)} of memory",
        *_fused_experts_lines(plan.tensors),
        *planned_fold_lines(None if report.fold is None else report.fold.to_json()),
        *left_out_lines(plan),
        *export_lines(report.exports),
        *_hub_lines(report.hub, "in the output folder" if needs.scratch_bytes is None else "of disk space"),
    ]


def _fused_experts_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return what exports make of experts that are fused into one tensor, if there are any."""
    fused = [t for t in tensors if t.role == "expert" and t.action == "quantize" and len(t.shape) > 2]
    if not fused:
        return []
    weights = sum(tensor.weights for tensor in fused)
    return [
        f"fused experts: {counted(len(fused), 'tensor')} of {weights} weights: vllm and torchao-int4 store them "
        f"in BF16 ({size_text(2 * weights)}); gguf and mlx round them"
    ]


def _room(needs: ResourceNeeds) -> str:
    if needs.scratch_bytes is None:
        return f"{size_text(needs.peak_disk_bytes)} of disk space"
    here = f"{size_text(needs.scratch_bytes)} of disk space on this machine (with --ray, for each task)"
    return f"{size_text(needs.peak_disk_bytes)} in object storage, {here}"


def _tensor_lines(tensors: Sequence[TensorPlan], summary: bool | None) -> list[str]:
    """Return a summary, or a heading and a line for each tensor; the reasons stand below if there is no room beside."""
    width = tables.terminal_width()
    if is_summarized(summary, len(tensors)):
        note = [] if summary else [f"--no-summary lists all {len(tensors)} tensors"]
        return [*summary_table(tensors), *note, "", *reason_lines(tensors)]
    lines = _wide_lines(tensors)
    if width is None or max(len(line) for line in lines) <= width:
        return lines
    rows = [[tensor.name, *_cells(tensor)] for tensor in tensors]
    shown = tables.table(["tensor", *COLUMNS], rows, drop=["codec", "action", "dtype"])
    return [*shown, "", *reason_lines(tensors)]


def _wide_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a heading and a line for each tensor.

    Thousands of tensors differ in their names alone, so the rest of a line is laid out once for all of them.
    """
    kinds = [tensor.kind for tensor in tensors]
    one_of = dict(zip(kinds, tensors, strict=True))
    heading, *lines = tables.aligned(COLUMNS, [_cells(t) for t in one_of.values()])
    rest = {kind: f"  {line}  {one_of[kind].reason}".rstrip() for kind, line in zip(one_of, lines, strict=True)}
    names = [printable(tensor.name) for tensor in tensors]
    width = max([len("tensor"), *map(len, names)])
    return [
        f"{'tensor':{width}}  {heading}  reason",
        *[name.ljust(width) + rest[kind] for name, kind in zip(names, kinds, strict=True)],
    ]


def _cells(tensor: TensorPlan) -> list[str]:
    shape = "x".join(str(length) for length in tensor.shape) or "scalar"
    return [shape, tensor.dtype, tensor.action, tensor.codec or "", str(tensor.bits or ""), str(tensor.bytes)]


def _hub_lines(hub: HubTraffic | None, where: str) -> list[str]:
    """Return which commit was planned, and what fetching the source needs.

    where: what --low-disk keeps files in
    """
    if hub is None:
        return []
    return [
        f"fetching the source needs, in addition, {size_text(hub.source_bytes)} in the Hub's cache, or with --low-disk "
        f"{size_text(hub.low_disk_bytes)} {where}",
        f"planned from {hub.repository} at {hub.revision}",
    ]
