"""The figures of a card: errors by role and what was kept or left out, and the table of what eval measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pqweights.checkpoint.names import PICTURE_FILE
from pqweights.common.markdown import code, listed, number, table, words
from pqweights.common.units import counted, size_text
from pqweights.convert.manifest import Manifest
from pqweights.convert.records import TensorRecord, is_rescued, mean_error
from pqweights.formats.master import RESCUE_FACTOR
from pqweights.formats.native import Native
from pqweights.planning.context_memory import DEFAULT_CONTEXT
from pqweights.planning.layout import DECODE, INTEGER, KEEP, TensorPlan
from pqweights.planning.roles import ROLES
from pqweights.results.evaluation_record import EvaluationRecord, Figure
from pqweights.results.offers import Offer
from pqweights.results.parts import parts
from pqweights.results.picture import kl_picture
from pqweights.runtime.report import beginning, masked_tokens

Item = TypeVar("Item")
Pair = tuple[TensorPlan, TensorRecord]
ACTIONS = {KEEP: "kept", DECODE: "decoded"}
EXCEEDING_SHOWN = 10
# More bit widths than this are summarized by the first and the last.
MOST_WIDTHS = 8
# Of the files of one type, so many are named in its row.
MOST_FILES = 2


def main_bits(manifest: Manifest) -> float | None:
    """Return the bit width that most of the quantized weights have, or None if none is quantized.

    That of calibrated weights is their mean, to a tenth.
    """
    by_rate = _grouped((tensor for tensor in manifest.tensors if tensor.bits is not None), lambda tensor: tensor.rate)
    counts = {rate: sum(tensor.weights for tensor in tensors) for rate, tensors in by_rate.items()}
    most = max(counts, key=lambda rate: (counts[rate], rate or 0), default=None)
    if most is None and counts:
        return round(8 * sum(tensor.bytes for tensor in by_rate[most]) / counts[most], 1)
    return most


def is_lossless(manifest: Manifest) -> bool:
    """Whether weights are the numbers of the source."""
    return any(tensor.codec == Native.codec for tensor in manifest.tensors)


def weights(manifest: Manifest) -> list[str]:
    """Return the section: errors by role, exceptions, tensors that are not quantized, and tensors that are left out."""
    quantized = [pair for pair in manifest.pairs if pair[0].bits is not None]
    lines = _by_role(quantized, manifest) if quantized and not parts(manifest) else []
    lines += _exceptions(quantized, manifest)
    plain = [tensor for tensor in manifest.tensors if tensor.bits is None]
    if plain:
        others = "Kept as they are:" if is_lossless(manifest) else "Not quantized:"
        lines += [others if quantized else "Stored:", _plain(plain)]
    of = "master" if manifest.is_of_master else "source"
    for reason, items in _grouped(manifest.left_out.items(), lambda item: item[1]).items():
        names = listed([name for name, _ in items])
        lines.append(f"Left out: {counted(len(items), 'tensor')} of the {of} ({words(reason)}): {names}")
    return lines


def choice(offered: Sequence[Offer]) -> list[str]:
    """Return the section that helps to choose: a table of all files or formats, and a picture; nothing for one alone.

    The picture is PICTURE_FILE, which lies beside the card.
    """
    if len(offered) < 2:
        return []
    measured = [offer.record for offer in offered if offer.record is not None]
    has_kl = any(record.kl is not None for record in measured)
    titles = ["type", "file", "size", "bits per parameter", "relative MSE"]
    titles += ["KL (nats)", "top-1", "perplexity"] if has_kl else ["perplexity"] if measured else []
    rows = [_offer_row(offer, has_kl=has_kl, is_measured=bool(measured)) for offer in offered]
    right = [title not in ("type", "file") for title in (*titles, "memory")]
    meaning = (
        f"Memory: the smallest usual one that has room for the weights, {DEFAULT_CONTEXT} tokens of context as far as "
        "the shapes tell, and 1 GiB to compute in."
    )
    meaning += f" Of those that fit, take the one with the {'lowest KL' if has_kl else 'lowest error'}."
    if measured:
        meaning += f" Measured on {code(measured[0].text)}, {measured[0].scored_tokens} tokens scored; see Evaluation."
    lines = [table([*titles, "memory"], rows, [column for column, is_number in enumerate(right) if is_number]), meaning]
    if kl_picture(offered) is not None:
        lines.append(f"![KL divergence against size: the figures are those of the table]({PICTURE_FILE})")
    return lines


def _offer_row(offer: Offer, *, has_kl: bool, is_measured: bool) -> list[str]:
    record = offer.record
    row = [words(offer.kind), ", ".join(code(name) for name in offer.files[:MOST_FILES])]
    row[1] += f" and {len(offer.files) - MOST_FILES} more" if len(offer.files) > MOST_FILES else ""
    row += [size_text(offer.bytes), f"{offer.bits:.2f}", number(offer.relative_mse)]
    if has_kl:
        kl = None if record is None or record.kl is None else record.kl.mean
        row += [_estimate(kl, ".5f"), _estimate(None if record is None else record.top1_agreement, ".2%")]
    if is_measured:
        row.append(_estimate(None if record is None else record.perplexity, ".4f"))
    return [*row, "-" if offer.memory_gb is None else f"{offer.memory_gb} GB"]


def _grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _by_role(pairs: Sequence[Pair], manifest: Manifest) -> list[str]:
    """Return a table with a row for each role, and what its errors mean."""
    integers = any(tensor.action == INTEGER for tensor, _ in pairs)
    titles = ["role", "tensors", "weights", "codec", "bits", "bits per weight", "relative MSE"]
    titles += ["against the original"] if integers else []
    titles += ["worst tensor", "its relative MSE"]
    groups = _grouped(pairs, lambda pair: pair[0].role)
    order = sorted(groups, key=lambda role: (list(ROLES).index(role) if role in ROLES else len(ROLES), role))
    rows = [_role_row(code(role), groups[role], integers) for role in order]
    if len(rows) > 1:
        rows.append(_role_row("all", pairs, integers))
    if is_lossless(manifest):  # neither has a weight a width, nor is there an error
        shown = [[*row[:4], row[5]] for row in (titles, *rows)]
        return [table(shown[0], shown[1:], [1, 2, 4]), "Reading a weight gives the numbers of the source, bit for bit."]
    read = "master" if manifest.is_of_master else "source"
    meaning = (
        f"Relative MSE is the sum of squared errors against the {read}, divided by the sum of its squared weights, "
        "measured while the tensor was written. For several tensors, both sums run over all of them."
    )
    if read == "master":
        meaning += (
            " The error against the original is computed from it and from the master's own error, where that is known."
        )
    return [table(titles, rows, [1, 2, 5, 6, *([7, 9] if integers else [8])]), meaning]


def _role_row(title: str, pairs: Sequence[Pair], integers: bool) -> list[str]:
    tensors, records = [tensor for tensor, _ in pairs], [record for _, record in pairs]
    count = sum(tensor.weights for tensor in tensors)
    worst, record = max(pairs, key=lambda pair: pair[1].relative_mse or 0.0)
    widths = [f"{bits:g}" for bits in sorted({tensor.bits or 0 for tensor in tensors})]
    return [
        title,
        str(len(pairs)),
        str(count),
        ", ".join(code(codec) for codec in sorted({tensor.codec or "" for tensor in tensors})),
        ", ".join(widths) if len(widths) <= MOST_WIDTHS else f"{widths[0]} to {widths[-1]}",
        f"{8 * sum(tensor.bytes for tensor in tensors) / count:.4f}" if count else "-",
        number(mean_error(records, "relative_mse")),
        *([number(mean_error(records, "total_mse"))] if integers else []),
        code(worst.name),
        number(record.relative_mse),
    ]


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
    for (role, reason), group in sorted(_grouped(tensors, lambda tensor: (tensor.role, tensor.reason)).items()):
        count, dtypes = sum(tensor.weights for tensor in group), {spec.dtype for t in group for spec in t.stored}
        action = words(ACTIONS.get(group[0].action, ""))
        rows.append([code(role), str(len(group)), str(count), ", ".join(sorted(dtypes)), action, words(reason)])
    return table(["role", "tensors", "weights", "stored as", "action", "reason"], rows, [1, 2])


def evaluation(records: Sequence[EvaluationRecord], manifest: Manifest) -> list[str]:
    """Return what eval measured, and the protocol of each row; nothing without records."""
    if not records:
        return []
    original = None if manifest.is_of_master else manifest.source_fingerprint
    compared = any(record.reference is not None for record in records)
    has_parts = any(record.part is not None for record in records)
    titles = ["no.", *(["type"] if has_parts else []), "text", "perplexity"]
    right = [0, *range(len(titles) - 1, len(titles) + 4 * compared)]
    titles += ["change", "KL mean (nats)", "KL 99%", "top-1 agreement"] if compared else []
    rows = [
        [str(row), *([words(record.part or "")] if has_parts else []), *_cells(record, compared)]
        for row, record in enumerate(records, start=1)
    ]
    meaning = "The figure after ± is the standard error over windows."
    if compared:
        meaning += (
            " The change is that of the perplexity, paired by window. KL is KL(reference, model) of the next token; "
            "top-1 agreement is the share of tokens for which both rank the same token first."
        )
    protocols = [f"{row}. {_protocol(record, original)}" for row, record in enumerate(records, start=1)]
    return [table(titles, rows, right), meaning, "\n".join(protocols)]


def _cells(record: EvaluationRecord, compared: bool) -> list[str]:
    cells = [code(record.text), _estimate(record.perplexity, ".4f")]
    if not compared:
        return cells
    return [
        *cells,
        _estimate(record.perplexity_change, "+.4f"),
        "-" if record.kl is None else _estimate(record.kl.mean, ".5f"),
        "-" if record.kl is None else _finite(record.kl.percentile_99, ".4f"),
        _estimate(record.top1_agreement, ".2%"),
    ]


def _protocol(record: EvaluationRecord, original: Any) -> str:
    """Return how a row was measured. original: the fingerprint of the checkpoint that was quantized"""
    tokenizer = "" if record.tokenizer is None else f" by the tokenizer of {code(record.tokenizer)}"
    parts = [
        f"{code(record.text)} (sha256 {code(record.text_sha256)}), {record.tokens} tokens{tokenizer}",
        f"{counted(record.windows, 'window')} of {record.window}, stride {record.stride}{beginning(record)}, "
        f"{masked_tokens(record)}, {record.scored_tokens} tokens scored",
        f"{words(record.dtype)}" + ("" if record.device is None else f" on {words(record.device)}"),
        f"computed by {words(record.runtime)}" + (", weights packed in memory" if record.packed else ""),
    ]
    if record.reference is not None:
        fingerprint = record.reference_fingerprint
        shown = "" if fingerprint is None else f" (fingerprint {code(fingerprint)})"
        if fingerprint is not None and fingerprint == original:
            shown = ", which has the fingerprint of the checkpoint that was quantized"
        how = ", by distributions that were saved of it" if record.reference_saved else ""
        parts.append(f"reference {code(record.reference)}{shown}{how}")
    return "; ".join(parts) + "."


def _estimate(figure: Figure | None, form: str) -> str:
    if figure is None:
        return "-"
    error = figure.standard_error
    return _finite(figure.value, form) + ("" if error is None else f" ± {error:{form.lstrip('+')}}")


def _finite(value: float | None, form: str) -> str:
    return "not finite" if value is None else f"{value:{form}}"
