"""What the commands say of a plan or a result as a whole: totals, what was kept, what was left out; and its JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output import first_names, size, warn

if TYPE_CHECKING:
    from pathlib import Path

    from pqweights.checkpoint.storage import Storage
    from pqweights.planning.fit import Fit
    from pqweights.planning.plan import Plan, TensorPlan
    from pqweights.planning.totals import PossibleExport, Totals
    from pqweights.rewrite.manifest import Manifest
    from pqweights.rewrite.task import RewriteReport


def totals_lines(totals: Totals) -> list[str]:
    """Return lines with the sizes, and what bits_and_coverage returns."""
    sizes = f"weights: {size(totals.source_bytes)} -> {size(totals.output_bytes)}{_ratio(totals)}"
    return [sizes, *bits_and_coverage(totals)]


def bits_and_coverage(totals: Totals) -> list[str]:
    """Return lines with the bits per weight and per parameter, and how many weights are quantized, if any."""
    bits = f"bits, all overhead counted: {bits_text(totals)}"
    if not totals.quantized_tensors:
        return [bits]
    return [
        bits,
        f"coverage: {totals.coverage:.4%} of {totals.weights} weights quantized, "
        f"{totals.quantized_tensors} of {totals.tensors} tensors",
    ]


def _ratio(totals: Totals) -> str:
    before, after = totals.source_bytes, totals.output_bytes
    if not before or not after:
        return ""
    return f" ({before / after:.2f}x smaller)" if before > after else f" ({after / before:.2f}x the size)"


def warn_if_nothing_is_quantized(totals: Totals) -> None:
    """Say that a plan or a result keeps all tensors as they are, if it does."""
    if not totals.quantized_tensors:
        warn("nothing is quantized: every tensor is kept as it is (pqweights plan says why)")


def bits_text(totals: Totals) -> str:
    """Return the bits of the quantized weights, and of all parameters of the checkpoint."""
    per_weight, per_parameter = totals.bits_per_weight, totals.bits_per_parameter
    quantized = "no weight is quantized" if per_weight is None else f"{per_weight:.4f} per quantized weight"
    return quantized if per_parameter is None else f"{quantized}, {per_parameter:.4f} per parameter"


def export_lines(exports: Sequence[PossibleExport]) -> list[str]:
    """Return what a master can be exported to, what it cannot, and what is not known."""
    possible = [
        f"{export.target} ({export.reason})" if export.reason else export.target
        for export in exports
        if export.possible
    ]
    return [
        *([f"can be exported to: {', '.join(possible)}"] if possible else []),
        *(f"cannot be exported to {e.target}: {e.reason}" for e in exports if e.possible is False),
        *(f"not known whether it can be exported to {e.target}: {e.reason}" for e in exports if e.possible is None),
    ]


def reason_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a line for each reason why tensors are kept, and for each rule by which others are quantized."""
    quantized = [tensor for tensor in tensors if tensor.action == "quantize" and not _is_default(tensor)]
    return [*kept_lines(tensors), *(f"quantized: {group}" for group in lines_by_reason(quantized))]


def _is_default(tensor: TensorPlan) -> bool:
    """Whether a tensor is quantized because of its role and not by a rule."""
    return tensor.reason.startswith(f"default for role {tensor.role}")


def kept_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a line for each reason why tensors are kept as they are."""
    kept = [tensor for tensor in tensors if tensor.action == "keep"]
    return [f"kept: {group}" for group in lines_by_reason(kept)]


def lines_by_reason(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a line for each reason: how many tensors have it, how many weights they hold, and the first names."""
    from pqweights.common.units import counted

    groups: dict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.reason].append(tensor)
    return [
        f"{counted(len(group), 'tensor')} ({counted(sum(t.weights for t in group), 'weight')}), {reason}: "
        f"{first_names([t.name for t in group])}"
        for reason, group in groups.items()
    ]


def warn_of_files_beside(source: str) -> None:
    """Say which files of the model are not read if the source is a single file."""
    from pathlib import Path

    from pqweights.checkpoint.source import files_beside
    from pqweights.storage.remote.addresses import local_path

    path = Path(local_path(source))
    beside = files_beside(path) if path.is_file() else ()
    if beside:
        warn(
            f"{path.name}: only this file is read; its folder also holds {listed(beside)} of the same model: give "
            f"{path.parent} to take them"
        )


def warn_of_broken_files(folder: Path | Storage, manifest: Manifest) -> None:
    """Warn if files that the manifest of a folder lists are missing, or weight files have another size."""
    from pqweights.common.units import counted
    from pqweights.rewrite.listed_files import file_problems

    problems = file_problems(folder, manifest)
    if problems:
        warn(f"{folder}: {problems[0]} ({counted(len(problems), 'problem')}); pqweights verify lists them all")


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names in a row; of many, the first, and how many more there are."""
    from pqweights.common.units import counted

    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {counted(more, 'more file')}" if more > 0 else "")


def left_out_lines(plan: Plan) -> list[str]:
    """Return a line for each reason why files are not carried over, and one for each reason why tensors are not.

    Not listed are the records of pqweights itself, and files beside a single file, which were named before the run.
    """
    from pqweights.checkpoint.companions import NOT_GIVEN, OWN_RECORDS
    from pqweights.common.units import counted

    files: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.left_out.items():
        if reason != NOT_GIVEN and name not in OWN_RECORDS:
            files[reason].append(name)

    groups: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.left_out_tensors.items():
        groups[reason].append(name)
    return [
        *(f"left out: {listed(names)}: {reason}" for reason, names in files.items()),
        *(
            f"left out: {counted(len(names), 'tensor')}: {reason}: {first_names(names)}"
            for reason, names in groups.items()
        ),
    ]


def fit_of(report: RewriteReport) -> Fit | None:
    """Return how the bit widths were chosen for a target; None if there was no target."""
    from pqweights.quantizing import Quantize

    return report.transform.fit if isinstance(report.transform, Quantize) else None
