"""The section of a card on the weights: errors by role, exceptions, and what was kept, decoded or left out."""

from __future__ import annotations

from collections.abc import Sequence

from pqweights.codecs.protocol import RESCUE_FACTOR
from pqweights.common.markdown import code, listed, number, table, words
from pqweights.common.units import counted
from pqweights.planning.plan import DECODE, INTEGER, KEEP, TensorPlan
from pqweights.planning.roles import ROLES
from pqweights.publish.card.values import as_number, grouped
from pqweights.rewrite.manifest import Manifest
from pqweights.rewrite.records import TensorRecord, is_rescued, mean_error
from pqweights.rewrite.results.inspect import Inspection

Pair = tuple[TensorPlan, TensorRecord]
ACTIONS = {KEEP: "kept", DECODE: "decoded"}
EXCEEDING_SHOWN = 10
# More bit widths than this are summarized by the first and the last.
MOST_WIDTHS = 8


def weights(inspection: Inspection) -> list[str]:
    """Return the section: errors by role, exceptions, tensors that are not quantized, and tensors that are left out."""
    manifest = inspection.manifest
    pairs: list[Pair] = list(zip(manifest.tensors, manifest.records, strict=True))
    quantized = [pair for pair in pairs if pair[0].bits is not None]
    lines = _by_role(quantized, manifest)
    if manifest.kind != "master":
        lines += _error_of_master(manifest)
    lines += _exceptions(quantized, manifest)
    plain = [tensor for tensor, _ in pairs if tensor.bits is None]
    if plain:
        lines += ["Not quantized:" if quantized else "Stored:", _plain(plain)]
    for reason, items in grouped(manifest.identity.left_out.items(), lambda item: item[1]).items():
        names = listed([name for name, _ in items])
        of = "source" if manifest.kind == "master" else "master"
        lines.append(f"Left out: {counted(len(items), 'tensor')} of the {of} ({words(reason)}): {names}")
    return lines


def _by_role(pairs: Sequence[Pair], manifest: Manifest) -> list[str]:
    """Return a table with a row for each role, and what its errors mean."""
    if not pairs:
        return []
    integers = any(tensor.action == INTEGER for tensor, _ in pairs)
    titles = ["role", "tensors", "weights", "codec", "bits", "bits per weight", "relative MSE"]
    titles += ["against the original"] if integers else []
    titles += ["worst tensor", "its relative MSE"]
    groups = grouped(pairs, lambda pair: pair[0].role)
    order = sorted(groups, key=lambda role: (list(ROLES).index(role) if role in ROLES else len(ROLES), role))
    rows = [_role_row(code(role), groups[role], integers) for role in order]
    if len(rows) > 1:
        rows.append(_role_row("all", pairs, integers))
    read = "original" if "original_fingerprint" in manifest.made_by else "master" if integers else "source"
    meaning = (
        f"Relative MSE is the sum of squared errors against the {read}, divided by the sum of its squared weights, "
        "measured while the tensor was written. For several tensors, both sums run over all of them."
    )
    if integers and read == "master":
        meaning += (
            " The error against the original is computed from it and from the master's own error, where that is known."
        )
    return [table(titles, rows, [1, 2, 5, 6, *([7, 9] if integers else [8])]), meaning]


def _role_row(title: str, pairs: Sequence[Pair], integers: bool) -> list[str]:
    tensors, records = [tensor for tensor, _ in pairs], [record for _, record in pairs]
    count = sum(tensor.weights for tensor in tensors)
    worst, record = max(pairs, key=lambda pair: pair[1].relative_mse or 0.0)
    return [
        title,
        str(len(pairs)),
        str(count),
        ", ".join(code(codec) for codec in sorted({tensor.codec or "" for tensor in tensors})),
        _widths(sorted({tensor.bits or 0 for tensor in tensors})),
        f"{8 * sum(tensor.bytes for tensor in tensors) / count:.4f}" if count else "-",
        number(mean_error(records, "relative_mse")),
        *([number(mean_error(records, "total_mse"))] if integers else []),
        code(worst.name),
        number(record.relative_mse),
    ]


def _widths(bits: Sequence[float]) -> str:
    """Return bit widths, of which a fit may have chosen dozens. bits: ascending"""
    if len(bits) > MOST_WIDTHS:
        return f"{bits[0]:g} to {bits[-1]:g}"
    return ", ".join(f"{width:g}" for width in bits)


def _error_of_master(manifest: Manifest) -> list[str]:
    """Return what is known of the master that an export was made from."""
    bits, error = (as_number(manifest.identity.master.get(key)) for key in ("bits_per_weight", "relative_mse"))
    if isinstance(manifest.identity.master.get("awq"), dict):
        error = None  # it is the error of the scaled weights
    known = [
        *([] if bits is None else [f"{bits:.4f} bits per weight"]),
        *([] if error is None else [f"a relative MSE of {number(error)} against the original"]),
    ]
    lines = [f"The master itself has {' and '.join(known)}."] if known else []
    if "original_fingerprint" in manifest.made_by:
        lines.append("The integers were made from the weights of the original, not from those of the master.")
    return lines


def _exceptions(pairs: Sequence[Pair], manifest: Manifest) -> list[str]:
    """Return which tensors were rescued, and which exceed the error that their codec promises."""
    lines = []
    rescued = [tensor.name for tensor, record in pairs if is_rescued(tensor, record)]
    if rescued:
        lines.append(
            f"Rescued: {counted(len(rescued), 'tensor')} with an error above {RESCUE_FACTOR} times what the codec "
            f"promises for Gaussian weights, encoded in the codec's second way instead: {listed(rescued)}"
        )
    exceeding = manifest.exceeding
    if exceeding:
        lines.append(
            f"**{counted(len(exceeding), 'tensor')} with an error above {RESCUE_FACTOR} times what the codec "
            f"promises**, in every way that it can encode them: {listed(exceeding, EXCEEDING_SHOWN)}"
        )
    if any(tensor.is_scaled for tensor, _ in pairs):
        lines.append("For weights whose input channels were scaled, the errors are those of the scaled weights.")
    return lines


def _plain(tensors: Sequence[TensorPlan]) -> str:
    """Return a table with a row for each role and reason."""
    rows = []
    for (role, reason), group in sorted(grouped(tensors, lambda tensor: (tensor.role, tensor.reason)).items()):
        rows.append(
            [
                code(role),
                str(len(group)),
                str(sum(tensor.weights for tensor in group)),
                ", ".join(sorted({spec.dtype for tensor in group for spec in tensor.stored})),
                words(ACTIONS.get(group[0].action, "")),
                words(reason),
            ]
        )
    return table(["role", "tensors", "weights", "stored as", "action", "reason"], rows, [1, 2])
