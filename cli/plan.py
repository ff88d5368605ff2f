"""The command `pqweights plan`, which `quantize --dry-run` also runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pqweights.common.options import (
    BY_MODEL,
    DEFAULT_MAX_SHARD_SIZE,
    DEFAULT_SAMPLE_TOKENS,
    Options,
    options_in,
)
from pqweights.common.units import counted, first_names, size_text

from . import memory, options, output, report, tables
from .printable import printable
from .report import (
    already_quantized_lines,
    apart_lines,
    export_lines,
    is_summarized,
    left_out_lines,
    reason_lines,
    summary_table,
    totals_lines,
    warn_if_nothing_is_quantized,
)

if TYPE_CHECKING:
    from pqweights.convert.needs import ResourceNeeds
    from pqweights.planning.calibration import PlannedCalibration
    from pqweights.planning.expected import Measured
    from pqweights.planning.fit import Fit
    from pqweights.planning.layout import TensorPlan
    from pqweights.results.plan_report import PlanReport
    from pqweights.storage import Store

COLUMNS = ["shape", "dtype", "action", "codec", "#bits", "#bytes"]
# With fewer bits the loss rises faster than in proportion to the error, which the prediction does not know.
FEWEST_LINEAR_BITS = 3


def command(
    ctx: typer.Context,
    source: options.Source,
    recipe: options.Recipe = None,
    codec: options.Codec = None,
    bits: options.Bits = None,
    effort: options.Effort = None,
    keep: options.Keep = None,
    set_format: options.SetFormat = None,
    target_size: options.TargetSize = None,
    target_bpw: options.TargetBpw = None,
    max_kl: options.MaxKl = None,
    adapter: options.Adapter = None,
    leave_out: options.LeaveOut = None,
    awq: options.Awq = None,
    calibrate: options.Calibrate = None,
    calibration_tokens: options.CalibrationTokens = DEFAULT_SAMPLE_TOKENS,
    rate: options.Rate = BY_MODEL,
    allow_pickle: options.AllowPickle = False,
    include_files: options.IncludeFiles = None,
    lossless: options.Lossless = False,
    max_shard_size: options.MaxShardSize = DEFAULT_MAX_SHARD_SIZE,
    memory: options.Memory = None,
    context: options.Context = None,
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    summary: options.Summary = None,
    html: options.Html = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what quantize would do with each tensor: action, codec, bits, bytes and reason.

    This reads only headers and, in a local checkpoint, one row of up to 256 weights to see whether they were decoded
    from few bits; but --calibrate with a target, and --lossless, read all weights. With --memory, it shows instead
    which targets and formats fit into that memory, those with the most bits first, with the commands that make them.
    """
    with output.errors(quiet=quiet):
        report.warn_of_files_beside(source)
        show_plan(options.given(ctx), summary=summary, html=html, json=json)


def show_plan(
    given: Mapping[str, Any],
    *,
    out: Store | None = None,
    summary: bool | None = None,
    html: Path | None = None,
    json: bool = False,
) -> None:
    """Make a plan and print it.

    given: what `plan` or `quantize` was given
    out: where the result is to be written, if that is known
    summary: whether to summarize the tensors; None to choose by their number
    html: where to write a page
    json: whether to print JSON
    """
    from pqweights.api import planned

    asked = options_in(Options, given)
    with output.progress("measuring", unit="steps") as progress:
        progress.status("reading the weights" if asked.lossless else "reading the headers")
        made = planned(given["source"], asked, out, progress=progress)
    warn_if_nothing_is_quantized(made.plan.totals)
    for warning in (*made.plan.remarks, *(() if made.memory is None else made.memory.warnings)):
        output.warn(warning)
    if html is not None:
        from pqweights.results.page import plan_page

        output.write_page(html, plan_page(given["source"].rstrip("/").rpartition("/")[2], made))
    if json:
        output.print_json_pieces(piece.decode() for piece in made.to_pieces())
        return
    if made.memory is not None:
        memory.show(made.memory, given)
        return
    output.show(*_plan_lines(made, summary), *(["", *fit_lines(made.fit)] if made.fit else []))


def _plan_lines(report: PlanReport, summary: bool | None) -> list[str]:
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
        *_expected_lines(report.expected),
        f"needs: {_room(needs)}, at most {size_text(needs.peak_memory_bytes)} of memory",
        *_calibration_lines(report.calibration),
        *_fused_experts_lines(plan.tensors),
        *apart_lines(plan.tensors),
        *already_quantized_lines(plan),
        *left_out_lines(plan),
        *_grid_lines(report.grids),
        *export_lines(report.exports),
        *_hub_lines(report.hub, "in the output folder" if needs.scratch_bytes is None else "of disk space"),
    ]


def _expected_lines(measured: Sequence[Measured]) -> list[str]:
    """Return what about so many bits cost on the nearest models that were measured."""
    if not measured:
        return []
    costs = ", ".join(
        f"{row.divergence:g} with {row.codec}{' --calibrate self' if row.is_calibrated else ''} ({row.model})"
        for row in measured
    )
    return [f"this many bits cost, in nats per token, on the nearest model in size that was measured: {costs}"]


def _calibration_lines(calibration: PlannedCalibration | None) -> list[str]:
    """Return what a calibration would change, if there is one."""
    from pqweights.planning.calibration import SCALES, SENSITIVITIES

    if calibration is None:
        return []
    disk = f"{size_text(calibration.disk_bytes)} of that disk space, and beside that memory one layer of the model in "
    if calibration.finds == SENSITIVITIES:
        return []
    if calibration.finds == SCALES:
        return [
            f"AWQ: scales are searched for {counted(calibration.weights, 'weight')}; they take at most "
            f"{calibration.weight_bytes} bytes, which are counted here",
            f"the search needs {disk}float32 with its inputs",
        ]
    size = "as many as --max-kl needs, not the recipe's bits shown here"
    if calibration.weight_bytes:
        size = f"about {calibration.weight_bytes} bytes together, distributed by how much each matters"
    return [
        f"calibrated: {counted(calibration.weights, 'weight')} of {size}",
        f"the calibration needs {disk}float32 with its moments",
    ]


def _grid_lines(grids: Mapping[str, int]) -> list[str]:
    """Return on the grids of which formats the weights lie, if any do."""
    if not grids:
        return []
    on = ", ".join(f"{count} on that of {name}" for name, count in grids.items() if name != "none")
    return [
        f"on a grid, judging by one row of each: of {counted(sum(grids.values()), 'weight')} {on}: exports in these "
        "formats keep their exact values"
    ]


def _fused_experts_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return what exports make of experts that are fused into one tensor, if there are any."""
    fused = [t for t in tensors if t.role == "expert" and t.action == "quantize" and len(t.shape) > 2]
    if not fused:
        return []
    weights = sum(tensor.weights for tensor in fused)
    return [
        f"fused experts: {counted(len(fused), 'tensor')} of {weights} weights: torchao stores them in BF16 "
        f"({size_text(2 * weights)}), and so does vllm unless it supports single experts of this model (for gpt-oss, "
        "stacks with --format mxfp4-gpt-oss); gguf and mlx round them"
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


def _hub_lines(hub: Mapping[str, Any], where: str) -> list[str]:
    """Return which commit was planned, and what fetching the source needs.

    where: what --low-disk keeps files in
    """
    if not hub:
        return []
    return [
        f"fetching the source needs, in addition, {size_text(hub['source_bytes'])} in the Hub's cache, or with "
        f"--low-disk {size_text(hub['low_disk_bytes'])} {where}",
        f"planned from {hub['repository']} at {hub['revision']}",
    ]


def fit_lines(fit: Fit) -> list[str]:
    """Return the chosen bit widths, the size that they give, and how much the loss is predicted to rise."""
    target = fit.goal.output_bytes
    used = f" ({fit.output_bytes / target:.2%})" if target else ""
    widths = {group.name: "kept" if group.bits is None else str(group.bits) for group in fit.groups}
    alphas = {group.name: group.alpha for group in fit.groups}
    return [
        "bits of each group of weights, by layer:",
        *tables.by_layer(widths),
        *(() if fit.sensitivity is None else report.alpha_lines(alphas)),
        f"target: {fit.goal}; result: {fit.output_bytes} bytes{used}; smallest possible: {fit.smallest_bytes} bytes",
        f"bits, all overhead counted: {fit.bits_per_weight:.4f} per weight that the recipe quantizes{_left(fit)}, "
        f"{fit.bits_per_parameter:.4f} per parameter",
        f"predicted rise of the loss: {fit.rise:.5f} ({_unit(fit)})",
        *_warnings(fit),
    ]


def _left(fit: Fit) -> str:
    """Return that the mean is also over weights that the target leaves as they are, if there are any."""
    left = sum(group.parameters for group in fit.groups if group.bits is None)
    return f" ({left} of them kept for the target)" if left else ""


def _unit(fit: Fit) -> str:
    """Return the unit of the predicted rise and what it is predicted from."""
    if fit.sensitivity is None:
        return "by the rule of thumb, which only compares sizes of one model"
    method = fit.sensitivity.method
    return f"nats per token, measured on {method.get('tokens')} tokens, {method.get('kind')}"


def _warnings(fit: Fit) -> list[str]:
    """Return why the prediction is less certain for some groups."""
    lines = []
    if fit.unknown:
        lines.append(
            "not measured, so fitted by the rule of thumb: "
            f"{counted(len(fit.unknown), 'group')}: {first_names(fit.unknown)}"
        )
    few = [group.name for group in fit.groups if group.bits is not None and group.bits < FEWEST_LINEAR_BITS]
    if few:
        lines.append(
            f"below {FEWEST_LINEAR_BITS} bits, where the loss rises more than predicted: "
            f"{counted(len(few), 'group')}: {first_names(few)}"
        )
    return lines
