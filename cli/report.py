"""The text and JSON of plans and results, shared by the commands that print them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .output import size, table

if TYPE_CHECKING:
    from pqweights.checkpoint.source import Checkpoint
    from pqweights.planning.fit import Fit
    from pqweights.planning.plan import Plan, TensorPlan
    from pqweights.rewrite.manifest import TensorRecord
    from pqweights.rewrite.task import RewriteReport

WORST_SHOWN = 5
FEWEST_LINEAR_BITS = 3
_NUMBERS = re.compile(r"\.\d+\.")


def plan_json(plan: Plan, needs: dict[str, int]) -> dict[str, Any]:
    """plan --json."""
    return {
        "totals": plan.totals() | needs,
        "tensors": [tensor.to_json() for tensor in plan.tensors],
        "shards": [{"file": shard.file, "bytes": shard.file_bytes} for shard in plan.shards],
        "copied_files": list(plan.companions),
        "left_out_files": plan.left_out,
    }


def traffic(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint on the Hub is, and what was sent and fetched so far; nothing for one that lies here."""
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
    """The same for people."""
    if not found:
        return []
    hub = found["hub"]
    return [
        f"besides, to fetch the source: {size(hub['source_bytes'])} in the Hub's cache, or with --low-disk "
        f"{size(hub['low_disk_bytes'])} in the output folder",
        f"{hub['repository']} at {hub['revision']}: {hub['requests']} requests, {size(hub['bytes'])} fetched for this plan",
    ]


def plan_text(plan: Plan, needs: dict[str, int]) -> str:
    """plan."""
    parts = [*_tensor_lines(plan.tensors), "", totals_text(plan.totals())]
    parts.append(
        f"output: {plan.output_bytes} bytes in {len(plan.shards)} safetensors file(s); "
        f"{len(plan.companions)} other file(s) copied"
    )
    parts.append(f"needs: {size(needs['peak_disk_bytes'])} of disk, about {size(needs['peak_memory_bytes'])} of memory")
    return "\n".join(parts + left_out_lines(plan))


def _tensor_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """A heading and a line per tensor. All but the name is laid out once for the thousands that have it in common."""
    columns = [("shape", False), ("dtype", False), ("action", False), ("codec", False), ("bits", True), ("bytes", True)]
    kinds = [(t.shape, t.dtype, t.action, t.codec, t.bits, t.stored[0].dtype, t.reason) for t in tensors]
    one_of = dict(zip(kinds, tensors, strict=True))
    heading, *lines = table(columns, [_cells(t) for t in one_of.values()]).split("\n")
    rest = {kind: f"  {line}  {kind[-1]}".rstrip() for kind, line in zip(one_of, lines, strict=True)}
    width = max([len("tensor"), *[len(t.name) for t in tensors]])
    return [
        f"{'tensor':{width}}  {heading}  reason",
        *[t.name.ljust(width) + rest[kind] for t, kind in zip(tensors, kinds, strict=True)],
    ]


def _cells(t: TensorPlan) -> list[str]:
    return [_shape(t), t.dtype, t.action, t.codec or "", str(t.bits or ""), str(t.bytes)]


def fit_of(report: RewriteReport) -> Fit | None:
    """How widths were chosen, where they were."""
    from pqweights.quantize import Quantize

    return report.transform.fit if isinstance(report.transform, Quantize) else None


def fit_lines(fit: Fit) -> list[str]:
    """What was chosen for a target: bits of each kind of group by layer, and what is predicted of it."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for group in sorted(fit.groups, key=lambda g: [int(n) for n in re.findall(r"\d+", g.name)]):
        kinds[_NUMBERS.sub(".*.", group.name)].append("kept" if group.bits is None else str(group.bits))
    width = max(len(kind) for kind in kinds)
    method = {} if fit.sensitivity is None else fit.sensitivity.method
    by = f"sensitivities on {method.get('tokens')} tokens ({method.get('kind')})"
    target = fit.target.output_bytes
    used = f", {fit.output_bytes / target:.2%} of the target" if target else ""
    lines = ["bits of each group of weights, by layer:"]
    lines += [f"  {kind:{width}}  {' '.join(widths)}" for kind, widths in kinds.items()]
    lines.append(
        f"target: {fit.target}: {fit.output_bytes} bytes{used}, {fit.bits_per_weight:.4f} bits per weight; smallest possible: "
        f"{fit.smallest_bytes} bytes"
    )
    unit = "by the rule of thumb, good for comparing sizes" if fit.sensitivity is None else f"nats per token, by {by}"
    lines.append(f"predicted rise of the loss: {fit.rise:.5f} ({unit}), at most {fit.gap:.4%} above the least possible")
    if fit.unknown:
        lines.append(
            f"{len(fit.unknown)} group(s) are not in the sensitivity file and got the rule of thumb: {_first_names(fit.unknown)}"
        )
    few = [group.name for group in fit.groups if group.bits is not None and group.bits < FEWEST_LINEAR_BITS]
    if few:
        lines.append(
            f"{len(few)} group(s) have less than {FEWEST_LINEAR_BITS} bits, where the loss rises more than is predicted: "
            f"{_first_names(few)}"
        )
    return lines


def curve_lines(fit: Fit) -> list[str]:
    """What other sizes would give."""
    rows = [
        [
            size(point.output_bytes), f"{point.rise:.5f}",
            "<- the target" if point.output_bytes == fit.output_bytes else "",
        ]
        for point in fit.curve
    ]  # fmt: skip
    return ["what a size buys:", table([("safetensors files", True), ("predicted rise", True), ("", False)], rows)]


def left_out_lines(plan: Plan) -> list[str]:
    """One line per file that is not carried over, and one per reason for tensors."""
    lines = [f"left out: {name}: {reason}" for name, reason in plan.left_out.items()]
    groups: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.left_out_tensors.items():
        groups[reason].append(name)
    for reason, names in groups.items():
        lines.append(f"left out: {len(names)} tensor(s): {reason}: {_first_names(names)}")
    return lines


def totals_text(totals: dict[str, Any]) -> str:
    """Sizes, bits per weight and coverage in two lines."""
    ratio = totals["source_bytes"] / totals["output_bytes"] if totals["output_bytes"] else 0.0
    bits = totals["bits_per_weight"]
    described = "no tensor is quantized" if bits is None else f"{bits:.4f} bits per weight, all overhead counted"
    return (
        f"weights: {size(totals['source_bytes'])} -> {size(totals['output_bytes'])} ({ratio:.2f}x smaller), {described}\n"
        f"coverage: {totals['coverage']:.4%} of {totals['weights']} weights quantized, "
        f"{totals['quantized_tensors']} of {totals['tensors']} tensors"
    )


def kept_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Every reason for keeping tensors, with how many and which."""
    groups: dict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in tensors:
        if tensor.action == "keep":
            groups[tensor.reason].append(tensor)
    lines = []
    for reason, group in groups.items():
        names = _first_names([t.name for t in group])
        lines.append(f"kept: {len(group)} tensor(s), {sum(t.weights for t in group)} weights: {reason}: {names}")
    return lines


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def integer_lines(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord], measured: bool) -> list[str]:
    """What an integer export did: which weights it holds in which form, why others stay plain, and the errors.

    measured: the errors against the original are, because it was read; else they are computed from the master's.
    """
    from pqweights.planning.plan import totals
    from pqweights.rewrite.manifest import mean_error

    forms: dict[str, list[TensorPlan]] = defaultdict(list)
    plain: dict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in tensors:
        if tensor.bits is not None:
            forms[f"{tensor.bits} bits, {tensor.codec}, {tensor.reason}"].append(tensor)
        elif tensor.action == "decode":
            plain[tensor.reason].append(tensor)
    if not forms:
        return []
    summed = totals(tensors)
    lines = [
        f"{summed['bits_per_weight']:.4f} bits per weight (scales, offsets and padding counted) over "
        f"{summed['coverage']:.4%} of {summed['weights']} weights"
    ]
    lines += [f"  {form}: {len(group)} tensor(s)" for form, group in forms.items()]
    for reason, group in plain.items():
        lines.append(
            f"plain: {len(group)} tensor(s), {sum(t.weights for t in group)} weights: {reason}: "
            f"{_first_names([t.name for t in group])}"
        )
    added, total, by_master = (mean_error(records, of) for of in ("relative_mse", "total_mse", "master_mse"))
    if measured and total is not None and by_master is not None:
        lines.append(f"relative MSE against the original: {total:.6f}; from the master it would be {by_master:.6f}")
    elif added is not None:
        lines.append(f"relative MSE against the master: {added:.6f}")
        lines.append(
            "relative MSE against the original: not known from the master; --source measures it"
            if total is None
            else f"relative MSE against the original: {total:.6f}, computed from the master's own; --source measures it"
        )
    return lines


def quality_lines(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]) -> list[str]:
    """Total and worst errors; rescued tensors; those whose error exceeds the promise."""
    from pqweights.results.inspect import is_rescued, promise
    from pqweights.rewrite.manifest import exceeds, total_relative_mse

    pairs = [(t, r) for t, r in zip(tensors, records, strict=True) if r.relative_mse is not None]
    if not pairs:
        return []
    lines = [f"relative MSE of the quantized weights: {total_relative_mse(records):.6f}"]
    worst = sorted(pairs, key=lambda pair: (pair[1].relative_mse or 0) / (promise(pair[0]) or 1), reverse=True)
    for tensor, record in worst[:WORST_SHOWN]:
        share = (record.relative_mse or 0) / (promise(tensor) or 1)
        lines.append(
            f"  worst: {tensor.name} at {tensor.bits} bits: {record.relative_mse:.6f} ({share:.0%} of what passes)"
        )
    for tensor, record in pairs:
        if is_rescued(tensor, record):
            state = ", ".join(f"{key} {value}" for key, value in (record.state or {}).items() if value)
            lines.append(f"rescued: {tensor.name}: {state}, relative MSE {record.relative_mse:.6f}")
    for tensor, record in pairs:
        if exceeds(tensor, record):
            lines.append(
                f"WARNING: {tensor.name}: relative MSE {record.relative_mse:.6f} exceeds {promise(tensor):.6f}, also "
                "rescued; give it more bits or keep it with a rule"
            )
    return lines


def result_json(report: RewriteReport, out: str) -> dict[str, Any]:
    """quantize --json and export --json."""
    from pqweights.results.inspect import tensor_json
    from pqweights.rewrite.manifest import error_totals, exceeds

    pairs = list(zip(report.plan.tensors, report.records, strict=True))
    return {
        "output": out,
        "already_done": report.already_done,
        "resumed_tensors": report.resumed,
        "source_bytes_read": report.source_bytes_read,
        **({"fit": fit.to_json()} if (fit := fit_of(report)) else {}),
        "totals": report.plan.totals() | error_totals(report.plan.tensors, report.records),
        "exceeding": [t.name for t, r in pairs if exceeds(t, r)],
        "tensors": [tensor_json(t, r) for t, r in pairs],
        "copied_files": list(report.plan.companions),
        "left_out_files": report.plan.left_out,
        "left_out_tensors": report.plan.left_out_tensors,
    }


def _shape(tensor: TensorPlan) -> str:
    return "x".join(str(n) for n in tensor.shape) or "scalar"
