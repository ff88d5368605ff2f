"""What the commands say of a plan or a result as a whole: totals, what was kept and left out, and the errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pqweights.common.units import counted, first_names, size_text

from . import tables
from .output import warn
from .printable import printable

if TYPE_CHECKING:
    from pathlib import Path

    from pqweights.checkpoint.storage import Storage
    from pqweights.convert.manifest import Manifest
    from pqweights.convert.plan import Plan
    from pqweights.convert.records import TensorRecord
    from pqweights.convert.report import RewriteReport
    from pqweights.planning.layout import ShardPlan, TensorPlan, Totals
    from pqweights.targets.memory import PossibleExport

    Pairs = Sequence[tuple[TensorPlan, TensorRecord]]

# On a terminal, more tensors than this are summarized unless the user asks for all of them.
MOST_LISTED = 200
BYTES_COLUMN = 6
WORST_SHOWN = 5


def totals_lines(totals: Totals) -> list[str]:
    """Return lines with the sizes, and what bits_and_coverage returns."""
    sizes = f"weights: {size_text(totals.source_bytes)} -> {size_text(totals.output_bytes)}{_ratio(totals)}"
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
    """Return a line for each reason why tensors are kept, and for each why others are quantized."""
    quantized = [tensor for tensor in tensors if tensor.action == "quantize"]
    return [*kept_lines(tensors), *(f"quantized: {group}" for group in lines_by_reason(quantized))]


def kept_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a line for each reason why tensors are kept as they are."""
    kept = [tensor for tensor in tensors if tensor.action == "keep"]
    return [f"kept: {group}" for group in lines_by_reason(kept)]


# Parts of a model that serve it from beside, by their role.
APART = {"mtp": "layers that predict further tokens", "vision": "towers for images and sound"}


def apart_lines(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a line for each such part: how large it is, whether it is quantized, and how to change that."""
    lines = []
    for role, what in APART.items():
        of = [tensor for tensor in tensors if tensor.role == role]
        quantized = any(tensor.action in ("quantize", "integer") for tensor in of)
        how = "quantized" if quantized else f"as in the source; a recipe's rule with `role: {role}` quantizes them"
        if of:
            size = size_text(sum(tensor.bytes for tensor in of))
            lines.append(f"{what}: {counted(len(of), 'tensor')}, {size}, {how}")
    return lines


def lines_by_reason(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return a line for each reason: how many tensors have it, how many weights they hold, and the first names."""
    groups: dict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.reason].append(tensor)
    return [
        f"{counted(len(group), 'tensor')} ({counted(sum(t.weights for t in group), 'weight')}), {reason}: "
        f"{first_names([t.name for t in group])}"
        for reason, group in groups.items()
    ]


def warn_of_files_beside(source: str) -> None:
    """Say which files of the model are not read if the source is a single file, but for GGUF, which needs others."""
    from pathlib import Path

    from pqweights.checkpoint.gguf.file import is_gguf
    from pqweights.checkpoint.source import files_at, others_of_model
    from pqweights.storage.addresses import parse_location

    path = parse_location(source)
    beside = others_of_model(*files_at(path)) if isinstance(path, Path) and path.is_file() and not is_gguf(path) else ()
    if isinstance(path, Path) and beside:
        warn(
            f"{path.name}: only this file is read; its folder also holds {listed(beside)} of the same model: give "
            f"{path.parent} to include them"
        )


def warn_of_broken_files(folder: Path | Storage, manifest: Manifest) -> None:
    """Warn if files that the manifest of a folder lists are missing, or weight files have another size."""
    from pathlib import Path

    from pqweights.convert.listed_files import file_problems

    problems = file_problems(folder if isinstance(folder, Path) else folder.files(), manifest)
    if problems:
        warn(f"{folder}: {problems[0]} ({counted(len(problems), 'problem')}); pqweights verify lists them all")


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names in a row; of many, the first, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {counted(more, 'more file')}" if more > 0 else "")


def already_quantized_lines(plan: Plan, exact: Collection[str] = ()) -> list[str]:
    """Return a line for each format in which the source has weights already, of those that are quantized again.

    exact: see Plan.already_quantized
    """
    original = f"the original, {plan.original}" if plan.original else "the original in 16 bits, if there is one"
    return [
        f"{counted(of['tensors'], 'weight')} already quantized to {of['bits']} bits by {of['format']}: a second "
        f"rounding adds to its loss, and the squared errors of both add up; give {printable(original)}"
        f"{', or keep the codes with --lossless' if plan.kind == 'master' and of['format'] != 'GGUF' else ''}"
        for of in plan.already_quantized(exact)
    ]


def left_out_lines(plan: Plan) -> list[str]:
    """Return a line for each reason why files are not carried over, and one for each reason why tensors are not.

    Not listed are the records of pqweights itself, and files beside a single file, which were named before the run.
    """
    from pqweights.checkpoint.companions import NOT_GIVEN, OWN_RECORDS

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


def action_text(tensor: TensorPlan) -> str:
    """Return what was done with a tensor, in the words of the summary of an export."""
    return "plain" if tensor.action == "decode" else tensor.action


def is_summarized(summary: bool | None, tensors: int) -> bool:
    """Whether to print a summary. summary: what the user asked for; None to choose by the number of tensors."""
    return summary if summary is not None else tables.terminal_width() is not None and tensors > MOST_LISTED


def summary_table(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord] | None = None) -> list[str]:
    """Return a table with a line for each role, action, codec and rate, those with most bytes first.

    records: what was measured of each tensor; None for a plan
    """
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        groups[tensor.role, action_text(tensor), tensor.codec or "", str(tensor.rate or "")].append(number)
    rows = [
        [
            *group,
            *_figures([tensors[number] for number in numbers]),
            *([] if records is None else [_error([records[number] for number in numbers])]),
        ]
        for group, numbers in groups.items()
    ]
    columns = ["role", "action", "codec", "#bits", "#tensors"]
    columns += ["#weights", "#bytes", "#bits/weight"]
    columns += [] if records is None else ["#relative MSE"]
    ordered = sorted(rows, key=lambda row: -int(row[BYTES_COLUMN]))
    return tables.table(columns, ordered, drop=["action", "codec"])


def _figures(tensors: Sequence[TensorPlan]) -> list[str]:
    """Return the number of tensors, their weights, bytes, and bits per weight."""
    weights, byte_count = sum(tensor.weights for tensor in tensors), sum(tensor.bytes for tensor in tensors)
    return [str(len(tensors)), str(weights), str(byte_count), f"{8 * byte_count / weights:.4f}" if weights else ""]


def _error(records: Sequence[TensorRecord]) -> str:
    """Return the relative MSE over all tensors of a line; an empty text if none was measured."""
    from pqweights.convert.records import mean_error

    error = mean_error(records, "relative_mse")
    return "" if error is None else f"{error:.6f}"


def quality_lines(pairs: Pairs) -> list[str]:
    """Return the total error of quantized weights, the worst ones, and those that were rescued.

    pairs: the tensors of a result, each with what was measured of it; those without an error do not count.
    """
    from pqweights.convert.records import is_rescued, mean_error

    measured = [(tensor, record) for tensor, record in pairs if record.energy is not None]
    if not measured:
        is_lossless = any(tensor.codec == "native" for tensor, _ in pairs)
        return ["lossless: weights are the numbers of the source, bit for bit"] if is_lossless else []
    return [
        f"relative MSE of the quantized weights: {mean_error([record for _, record in pairs], 'relative_mse'):.6f}",
        *_worst_lines(measured),
        *_worst_calibrated_lines(measured),
        *(_rescued_line(*pair) for pair in measured if is_rescued(*pair)),
    ]


def exceeding_lines(pairs: Pairs) -> list[str]:
    """Return a line for each weight whose error is above its codec's limit: a warning."""
    from pqweights.convert.records import exceeds, promise

    return [
        f"{tensor.name}: relative MSE {record.relative_mse:.6f} is above the limit of {promise(tensor):.6f}, however "
        "the codec encodes it; give the tensor more bits or keep it with a rule"
        for tensor, record in pairs
        if record.energy is not None and exceeds(tensor, record)
    ]


def _worst_lines(pairs: Pairs) -> list[str]:
    """Return the weights whose errors are the largest, relative to the largest one that needs no rescue."""
    from pqweights.convert.records import promise

    pairs = [pair for pair in pairs if promise(pair[0]) is not None]
    shares = [(record.relative_mse or 0) / (promise(tensor) or 1) for tensor, record in pairs]
    worst = sorted(range(len(pairs)), key=shares.__getitem__, reverse=True)[:WORST_SHOWN]
    return [
        f"  worst: {tensor.name} at {tensor.bits} bits: {record.relative_mse:.6f} ({share:.0%} of its codec's limit)"
        for (tensor, record), share in ((pairs[number], shares[number]) for number in worst)
    ]


def _worst_calibrated_lines(pairs: Pairs) -> list[str]:
    """Return the calibrated weights that lose the largest share of what their outputs are to the loss."""
    calibrated = [(record.weighed_mse, tensor) for tensor, record in pairs if record.weighed_mse is not None]
    worst = sorted(calibrated, key=lambda pair: pair[0], reverse=True)[:WORST_SHOWN]
    return [f"  worst calibrated: {t.name} at {t.bits:.3f} bits: {e:.6f} of its outputs, weighed" for e, t in worst]


def _rescued_line(tensor: TensorPlan, record: TensorRecord) -> str:
    state = ", ".join(f"{key} {value}" for key, value in (record.state or {}).items() if value)
    return f"rescued: {tensor.name}: {state}, relative MSE {record.relative_mse:.6f}"


def type_lines(made_by: Mapping[str, Any], pairs: Pairs, shards: Sequence[ShardPlan]) -> list[str]:
    """Return a line for each type of a result with a file of each: its size and its error; then how all were rounded.

    Nothing for another result.
    """
    from pqweights.convert.records import figures_by_type

    types = [
        f"{of.type}: {size_text(of.bytes)}, {of.bits:.2f} bits per parameter"
        + ("" if of.relative_mse is None else f", relative MSE {of.relative_mse:.6f}")
        for of in figures_by_type(made_by, pairs, shards)
    ]
    return [*types, *_rounding_lines(pairs)] if types else []


def integer_form_lines(pairs: Pairs) -> list[str]:
    """Return how many weights an integer export holds in which form, why others are plain, and the errors.

    pairs: the tensors of the export, each with what was measured of it
    """
    tensors = [tensor for tensor, _ in pairs]
    forms: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.bits is not None:
            forms[f"{tensor.bits} bits, {tensor.codec}, {tensor.reason}"] += 1
    if not forms:
        return []
    plain = [tensor for tensor in tensors if tensor.bits is None and tensor.action == "decode"]
    return [
        *(f"  {form}: {counted(number, 'tensor')}" for form, number in forms.items()),
        *(f"plain: {group}" for group in lines_by_reason(plain)),
        *_identical_lines(pairs),
        *_rounding_lines(pairs),
        *_integer_error_lines([record for _, record in pairs]),
    ]


def _identical_lines(pairs: Pairs) -> list[str]:
    """Return how many weights have the very numbers of the original, if any have."""
    integers = [(tensor, record) for tensor, record in pairs if tensor.action == "integer"]
    same = [tensor for tensor, record in integers if record.rounding and "carried" in record.rounding]
    if not same:
        return []
    return [
        f"bit-identical values: {len(same)} of {counted(len(integers), 'tensor')} have exactly the values of "
        "the original (except for the signs of zeros), which was checked: "
        f"{first_names([tensor.name for tensor in same])}"
    ]


def _rounding_lines(pairs: Pairs) -> list[str]:
    """Return which weights were rounded with compensation, what that gained, and why others were not."""
    roundings = [record.rounding for _, record in pairs if record.rounding and "carried" not in record.rounding]
    if not roundings:
        return []
    gains = [rounding["gain"] for rounding in roundings if rounding.get("compensated")]
    gain = (
        f"; the error of outputs on text held back falls by {sum(gains) / len(gains):.0%} on average" if gains else ""
    )
    reasons: dict[str, int] = defaultdict(int)
    for rounding in roundings:
        for reason, number in rounding["rounded_plainly"].items():
            reasons[reason] += number
    lines = []
    for key, kind in (("compensated", "compensated rounding"), ("weighed", "errors weighed by inputs")):
        if own := [rounding for rounding in roundings if key in rounding]:
            done, matrices = (sum(rounding[which] for rounding in own) for which in (key, "matrices"))
            lines.append(f"{kind}: {done} of {matrices} weight matrices{gain if key == 'compensated' else ''}")
    return [*lines, *(f"  rounded plainly: {number}: {reason}" for reason, number in reasons.items())]


def _integer_error_lines(records: Sequence[TensorRecord]) -> list[str]:
    from pqweights.convert.records import mean_error

    against = "relative MSE against the original"
    added, total, by_master = (mean_error(records, of) for of in ("relative_mse", "total_mse", "master_mse"))
    if total is not None and by_master is None:
        return [f"{against}: {total:.6f}"]
    if added is None:
        return []
    whole = "unknown" if total is None else f"{total:.6f}, computed from the error of the master"
    return [f"relative MSE against the master: {added:.6f}", f"{against}: {whole}"]


def divergence_lines(made_by: Mapping[str, Any]) -> list[str]:
    """Return what was measured of a result for which a divergence was given."""
    measured = made_by.get("sensitivity") or (made_by.get("fit") or {}).get("sensitivity")
    for about in (made_by.get("calibrated"), measured):
        if isinstance(about, dict) and isinstance(found := about.get("divergence"), float):
            return [f"divergence: {found:.5f} nats per token, measured on tokens that nothing was fitted to"]
    return []


def alpha_lines(alphas: Mapping[str, float]) -> list[str]:
    """Return how much each weight, or group of weights, matters. alphas: by name"""
    title = "alpha of each, in nats per token for a relative squared error of 1, by layer:"
    return [title, *tables.by_layer({name: f"{alpha:.4f}" for name, alpha in alphas.items()})]


def scale_lines(about: Mapping[str, Any]) -> list[str]:
    """Return what a search of scales found, which a manifest states."""
    weights = about["weights"]
    rows = [_scale_row(name, told) for name, told in weights.items()]
    return [
        *tables.table(["weight", "#tokens", "scaled", "exponents", "#gain", "#gain held back"], rows),
        f"AWQ: scales for {sum('gain' in told for told in weights.values())} of {len(weights)} weights, searched on "
        f"{about['tokens']} tokens and checked on another {about['held_back_tokens']}; gain: the share by which the "
        "error of the layer's output falls",
    ]


def scales_found(done: RewriteReport) -> list[str]:
    """Return the last line of what a search of scales found, if there was one."""
    awq = done.plan.made_by.get("awq")
    return scale_lines(awq)[-1:] if awq else []


def _scale_row(name: str, told: Mapping[str, Any]) -> list[str]:
    scaled = f"{told['scaled']} of {told['matrices']}" if "matrices" in told else "yes" if "gain" in told else "no"
    exponents = ", ".join(f"{exponent:g}" for exponent in told.get("exponents", ()))
    gains = [f"{told[key]:.1%}" if key in told else "" for key in ("gain", "held_back_gain")]
    return [name, str(told["tokens"]), scaled, exponents, *gains]
