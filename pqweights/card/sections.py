"""The sections of a card that say what became of the weights, by which recipe and method, and what the bytes must be.

Every figure comes out of the manifest, or out of the records of `eval` that belong to it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.storage import Origin
from pqweights.codecs import CODECS
from pqweights.codecs.protocol import RESCUE_FACTOR
from pqweights.hub.ids import is_repository_id
from pqweights.markdown import code, listed, number, size, table, words
from pqweights.planning.plan import DECODE, INTEGER, KEEP, TensorPlan
from pqweights.planning.roles import ROLES
from pqweights.results.evaluation_record import EvaluationRecord, Figure
from pqweights.results.inspect import Inspection, is_rescued
from pqweights.rewrite.manifest import Manifest, TensorRecord, mean_error, shards_of

Pair = tuple[TensorPlan, TensorRecord]
HUB = "https://huggingface.co"


def opening(found: Inspection, base_model: str | None) -> list[str]:
    """What this is, of what, and how large."""
    manifest, totals = found.manifest, found.totals
    what = "A *master*: weights quantized once, of which exports for runtimes are made."
    if manifest.kind != "master":
        options = {k: v for k, v in manifest.made_by.items() if k in _OPTIONS and v is not None}
        shown = "".join(f", {key.replace('_', ' ')} {code(_text(value))}" for key, value in options.items())
        what = f"An export for the target {code(manifest.made_by['target'])}{shown}."
    lines = [f"{what} {_origin(manifest, base_model)}"]
    before, after = totals["source_bytes"], totals["output_bytes"]
    of = "the source's" if manifest.kind == "master" else "those of the master that it was made from"
    factor = before / after if after else 0.0
    compared = (
        f"{factor:.2f} times smaller" if factor >= 1 else f"{after / before:.2f} times larger" if before else "empty"
    )
    sizes = f"The weight files take {size(after)}, {of} {size(before)}: {compared}."
    bits = totals["bits_per_weight"]
    if bits is not None:
        over_all = (
            f"; {8 * after / totals['weights']:.4f} over all of them, headers of the files too"
            if totals["weights"]
            else ""
        )
        sizes = (
            f"**{bits:.4f} bits per weight**, with codes, norms, scales and padding counted, over the {totals['coverage']:.4%} of "
            f"{totals['weights']} weights that are quantized{over_all}. {sizes}"
        )
    return [*lines, sizes]


_OPTIONS = ("dtype", "packing", "mode", "bits", "group_size", "basis", "qparams")


def _origin(manifest: Manifest, base_model: str | None) -> str:
    model, revision = manifest.identity.model.get("id"), manifest.identity.model.get("revision")
    if isinstance(model, str) and is_repository_id(model, namespace=False):
        commit = "" if revision is None else f" at commit {code(revision)}"
        by_way = (
            "" if manifest.identity.origin is None or manifest.kind == "master" else _by_way(manifest.identity.origin)
        )
        return f"The base model is {_link(model)}{commit}.{by_way}"
    source = "checkpoint" if manifest.kind == "master" else "master"
    place = f"a local {source}" if manifest.identity.origin is None else f"the {source} {_at(manifest.identity.origin)}"
    made = f"Made from {place} (fingerprint {code(manifest.source_fingerprint)})."
    if base_model is None:
        return made
    return f"{made} The base model is {_link(base_model)}, as the author of this card states: the manifest names none."


def _by_way(master: Origin) -> str:
    return f" The master that it was made from is {_at(master)}."


def _at(origin: Origin) -> str:
    shown = _link(origin.id) if is_repository_id(origin.id) else code(origin.id)
    return f"{shown} at commit {code(origin.revision)}"


def _link(repository: str) -> str:
    return f"[{repository}]({HUB}/{repository})"


def recipe(manifest: Manifest) -> list[str]:
    """The recipe of the master, its rules in order, and what was calibrated; nothing where the manifest holds none."""
    source = manifest.made_by if manifest.kind == "master" else manifest.identity.master
    found = source.get("recipe")
    if not isinstance(found, dict):
        return []
    of = "" if manifest.kind == "master" else "The master's: "
    lines = [f"{of}{code(_text(found.get('name')))}: {words(_text(found.get('description')))}".rstrip(": ")]
    fit = source.get("fit")
    width = "the width chosen for each group" if isinstance(fit, dict) else f"{words(_text(found.get('bits')))} bits"
    default = f"Default: {code(_text(found.get('codec')))}, {width}."
    rules = found.get("rules")
    rules = [rule for rule in rules if isinstance(rule, dict)] if isinstance(rules, list) else []
    if rules:
        lines.append(f"{default} The first rule that matches a tensor decides:")
        lines.append("\n".join(f"{place}. {_rule(rule)}" for place, rule in enumerate(rules, start=1)))
    else:
        lines.append(f"{default} No rules.")
    if isinstance(fit, dict):
        lines.append(_fit(fit, found, "The widths" if manifest.kind == "master" else "The master's widths"))
    return [*lines, _calibration(source.get("awq"), manifest)]


def _fit(fit: Mapping[str, Any], recipe: Mapping[str, Any], whose: str) -> str:
    """How widths came from a target."""
    target, per_weight, rise = (
        _measure(value) for value in (recipe.get("target_size"), recipe.get("target_bpw"), fit.get("predicted_rise"))
    )
    kept = "the target of the recipe"
    if target is not None:
        kept = f"the target of {target:.0f} bytes"
    elif per_weight is not None:
        kept = f"the target of {per_weight:g} bits per weight"
    by = fit.get("sensitivity")
    by = by if isinstance(by, dict) else {}
    kind = _text(by.get("kind"))
    sensitivities = _SENSITIVITIES.get(kind, f"sensitivities of the kind {code(kind)}")
    if by.get("sha256") is not None:
        sensitivities += f" (file: sha256 {code(_text(by['sha256']))})"
    # By the rule of thumb the figure says nothing by itself.
    predicted = "" if rise is None or kind == "heuristic" else f": by {number(rise)} nats per token, as predicted"
    return (
        f"{whose} that no rule gives were chosen for each group of weights, by {sensitivities}, so that {kept} is kept and the loss "
        f"rises least{predicted} (Malinovskii et al., *HIGGS*, [arXiv:2411.17525](https://arxiv.org/abs/2411.17525))."
    )


_SENSITIVITIES = {
    "heuristic": "a rule of thumb for sensitivities", "random tokens": "sensitivities measured on random tokens",
    "text": "sensitivities measured on a text",
}  # fmt: skip


def _rule(rule: Mapping[str, Any]) -> str:
    conditions = [
        f"{said} {' or '.join(code(_text(each)) for each in (value if isinstance(value, list) else [value]))}"
        for key, said in _CONDITIONS.items()
        if (value := rule.get(key)) is not None
    ]
    does = [] if rule.get("keep") is not True else ["kept"]
    does += [code(_text(rule["codec"]))] if "codec" in rule else []
    does += [f"{words(_text(rule['bits']))} bits"] if "bits" in rule else []
    reason = f" ({words(_text(rule['reason']))})" if "reason" in rule else ""
    return f"{', '.join(conditions)}: {', '.join(does)}{reason}"


_CONDITIONS = {
    "name": "name", "role": "role", "min_weights": "weights at least", "max_weights": "weights at most", "dims": "dimensions",
}  # fmt: skip


def _calibration(awq: Any, manifest: Manifest) -> str:
    master = manifest.kind == "master"
    if not isinstance(awq, dict):
        return "No calibration data was used." if master else "The master's quantization used no calibration data."
    file = f"sha256 {code(_text(awq.get('sha256')))}"
    if "original_fingerprint" in manifest.made_by:
        return f"The master's activation-aware scales (file of scales: {file}) have no part in this export."
    count = sum(tensor.is_scaled for tensor in manifest.tensors) if master else awq.get("weights")
    whose = "Activation-aware" if master else "The master's activation-aware"
    return (
        f"{whose} scales: the input channels of {words(_text(count))} weights were scaled before they were quantized, "
        f"by what a calibration text showed (file of scales: {file})."
    )


def weights(found: Inspection) -> list[str]:
    """Errors by role, what was kept and why, and every tensor that is an exception."""
    manifest = found.manifest
    pairs: list[Pair] = list(zip(manifest.tensors, manifest.records, strict=True))
    quantized = [pair for pair in pairs if pair[0].bits is not None]
    lines = _by_role(quantized, manifest)
    if manifest.kind != "master":
        lines += _error_of_master(manifest)
    lines += _exceptions(quantized, manifest)
    kept = [tensor for tensor, _ in pairs if tensor.bits is None]
    if kept:
        lines += ["Not quantized:" if quantized else "Stored:", _plain(kept)]
    for reason, names in _grouped(manifest.identity.left_out.items(), lambda item: item[1]).items():
        shown = listed([name for name, _ in names])
        lines.append(f"Left out, {len(names)} tensor(s) of the master: {words(reason)}: {shown}")
    return lines


def _by_role(pairs: Sequence[Pair], manifest: Manifest) -> list[str]:
    if not pairs:
        return []
    integers = any(tensor.action == INTEGER for tensor, _ in pairs)
    titles = ["role", "tensors", "weights", "codec", "bits", "bits per weight", "relative MSE"]
    titles += ["against the original"] if integers else []
    titles += ["worst tensor", "its relative MSE"]
    groups = _grouped(pairs, lambda pair: pair[0].role)
    order = sorted(groups, key=lambda role: (list(ROLES).index(role) if role in ROLES else len(ROLES), role))
    rows = [_role_row(code(role), groups[role], integers) for role in order]
    if len(rows) > 1:
        rows.append(_role_row("all", pairs, integers))
    read = "original" if "original_fingerprint" in manifest.made_by else "master" if integers else "source"
    said = (
        "Relative MSE is the squared error over the sum of squares, measured while the tensor was written, against the weight "
        f"of the {read}. Of several tensors: all errors over all squares."
    )
    if integers and read == "master":
        said += " Against the original: computed from it and from the master's own error, as far as that is known."
    return [table(titles, rows, [1, 2, 5, 6, *([7, 9] if integers else [8])]), said]


def _role_row(title: str, pairs: Sequence[Pair], integers: bool) -> list[str]:
    tensors, records = [tensor for tensor, _ in pairs], [record for _, record in pairs]
    count = sum(tensor.weights for tensor in tensors)
    worst = max(pairs, key=lambda pair: pair[1].relative_mse or 0.0)
    return [
        title,
        str(len(pairs)),
        str(count),
        ", ".join(code(codec) for codec in sorted({tensor.codec or "" for tensor in tensors})),
        ", ".join(str(bits) for bits in sorted({tensor.bits or 0 for tensor in tensors})),
        f"{8 * sum(tensor.bytes for tensor in tensors) / count:.4f}" if count else "-",
        number(mean_error(records, "relative_mse")),
        *([number(mean_error(records, "total_mse"))] if integers else []),
        code(worst[0].name),
        number(worst[1].relative_mse),
    ]


def _error_of_master(manifest: Manifest) -> list[str]:
    bits, error = (_measure(manifest.identity.master.get(key)) for key in ("bits_per_weight", "relative_mse"))
    if isinstance(manifest.identity.master.get("awq"), dict):
        error = None  # of the scaled weights
    said = [
        *([] if bits is None else [f"{bits:.4f} bits per weight"]),
        *([] if error is None else [f"relative MSE {number(error)} against the original"]),
    ]
    lines = [f"The master itself: {', '.join(said)}."] if said else []
    if "original_fingerprint" in manifest.made_by:
        lines.append("The integers were made of the original's weights, not of the master's.")
    return lines


def _exceptions(pairs: Sequence[Pair], manifest: Manifest) -> list[str]:
    lines = []
    rescued = [tensor.name for tensor, record in pairs if is_rescued(tensor, record)]
    if rescued:
        lines.append(
            f"Rescued, {len(rescued)} tensor(s) (their error exceeded {RESCUE_FACTOR} times what the codec promises for Gaussian "
            f"weights, and their codec's second choice was taken): {listed(rescued)}"
        )
    exceeding = manifest.to_json()["exceeding"]
    if exceeding:
        lines.append(
            f"**{len(exceeding)} tensor(s) have an error above {RESCUE_FACTOR} times what the codec promises**, with every rotation: "
            + listed(exceeding, 10)
        )
    if any(tensor.is_scaled for tensor, _ in pairs):
        lines.append("Of weights whose input channels were scaled, the errors are those of the scaled weight.")
    return lines


def _plain(tensors: Sequence[TensorPlan]) -> str:
    """A row for each role and reason."""
    groups = _grouped(tensors, lambda tensor: (tensor.role, tensor.reason))
    rows = []
    for (role, reason), group in sorted(groups.items()):
        stored = sorted({spec.dtype for tensor in group for spec in tensor.stored})
        rows.append([
            code(role), str(len(group)), str(sum(tensor.weights for tensor in group)),
            ", ".join(stored), words(_ACTIONS.get(group[0].action, "")), words(reason),
        ])  # fmt: skip
    return table(["role", "tensors", "weights", "stored as", "", "reason"], rows, [1, 2])


_ACTIONS = {KEEP: "kept", DECODE: "decoded"}


def evaluation(records: Sequence[EvaluationRecord], manifest: Manifest) -> list[str]:
    """What eval measured, and how; nothing where it was not run."""
    original = (
        manifest.source_fingerprint if manifest.kind == "master" else manifest.made_by.get("original_fingerprint")
    )
    if not records:
        return []
    compared = any(record.reference is not None for record in records)
    titles = ["", "text", "perplexity"]
    titles += ["change", "KL mean (nats)", "KL 99%", "same likeliest token"] if compared else []
    rows = []
    for place, record in enumerate(records, start=1):
        cells = [str(place), code(record.text), _estimate(record.perplexity, ".4f")]
        if compared:
            kl = record.kl
            cells += [
                _estimate(record.perplexity_change, "+.4f"), "-" if kl is None else _estimate(kl.mean, ".5f"),
                "-" if kl is None else _finite(kl.percentile_99, ".4f"), _estimate(record.top1_agreement, ".2%"),
            ]  # fmt: skip
        rows.append(cells)
    protocols = [f"{place}. {_protocol(record, original)}" for place, record in enumerate(records, start=1)]
    said = "After ±: the standard error over windows."
    if compared:
        said += " Change: of the perplexity, paired; KL(reference, model) of the next token."
    return [table(titles, rows, range(2, len(titles))), said, "\n".join(protocols)]


def _protocol(record: EvaluationRecord, original: Any) -> str:
    masked = f"the first {record.masked} tokens of each masked" if record.masked else "none masked"
    if record.score_first and record.masked:
        masked = f"the first {record.masked} tokens of each but the first masked"
    parts = [
        f"{code(record.text)} (sha256 {code(record.text_sha256)}), {record.tokens} tokens"
        + ("" if record.tokenizer is None else f" by the tokenizer of {code(record.tokenizer)}"),
        f"{record.windows} window(s) of {record.window}, stride {record.stride}, {masked}, {record.scored_tokens} tokens scored",
        f"{words(record.dtype)}" + ("" if record.device is None else f" on {words(record.device)}"),
        f"computed by {words(record.runtime)}" + (", weights packed in memory" if record.packed else ""),
    ]
    if record.reference is not None:
        known = record.reference_fingerprint
        shown = "" if known is None else f" (fingerprint {code(known)})"
        if known is not None and known == original:
            shown = ", by its fingerprint the very checkpoint that was quantized"
        parts.append(f"reference {code(record.reference)}{shown}")
    return "; ".join(parts) + "."


def _estimate(figure: Figure | None, form: str) -> str:
    if figure is None:
        return "-"
    error = figure.standard_error
    return _finite(figure.value, form) + ("" if error is None else f" ± {error:{form.lstrip('+')}}")


def _finite(value: float | None, form: str) -> str:
    return "not finite" if value is None else f"{value:{form}}"


def method(manifest: Manifest) -> list[str]:
    """How it was done, and who thought of it."""
    source = manifest.made_by if manifest.kind == "master" else manifest.identity.master
    said = source.get("recipe")
    codecs = {tensor.codec for tensor in manifest.tensors if tensor.codec} if manifest.kind == "master" else set()
    if isinstance(said, dict) and manifest.kind != "master":
        codecs = {_text(said.get("codec"))}
    of = "" if manifest.kind == "master" else "Of the master: "
    described = {name: CODECS[name].description for name in sorted(codecs) if name in CODECS}
    text = [f"{of}{description}" for description in described.values() if description]
    others = sorted(codec for codec in codecs if codec and not described.get(codec))
    if others:
        text.append(f"{of}Codecs of pqweights' ablation: {', '.join(code(codec) for codec in others)}.")
    if any(tensor.action == INTEGER for tensor in manifest.tensors):
        rule = manifest.made_by.get("qparams")
        how = {"best": "with the scale and offset of each group that give the least squared error",
               "minmax": "with the scales and offsets of the runtime's own converter"}.get(_text(rule), "")  # fmt: skip
        text.append(f"Of this export: the weights are rounded to integers in groups, {how}.".replace(", .", "."))
    sources = [
        "Vicentino, *PolarQuant* for weights, [arXiv:2603.29078](https://arxiv.org/abs/2603.29078v1) v1 (its author has since "
        "called it HLWQ): the method."
    ]
    if isinstance(source.get("awq"), dict) and "original_fingerprint" not in manifest.made_by:
        sources.append(
            "Lin et al., *AWQ*, [arXiv:2306.00978](https://arxiv.org/abs/2306.00978): the scales of input channels."
        )
    if manifest.made_by.get("basis") == "rotated":
        sources.append("Ashkboos et al., *QuaRot*, [arXiv:2404.00456](https://arxiv.org/abs/2404.00456): integers in the rotated basis.")  # fmt: skip
    related = {"TurboQuant": "2504.19874", "HIGGS": "2411.17525", "QuIP#": "2402.04396", "QuaRot": "2404.00456"}
    shown = ", ".join(f"{name} ([arXiv:{paper}](https://arxiv.org/abs/{paper}))" for name, paper in related.items())
    sources.append(
        f"Related: {shown}. PolarQuant for KV caches ([arXiv:2502.02617](https://arxiv.org/abs/2502.02617)) shares the name, not "
        "the method."
    )
    return [*([" ".join(text)] if text else []), "\n".join(f"- {each}" for each in sources)]


def files(manifest: Manifest, manifest_sha256: str, has_records: bool) -> list[str]:
    """What the bytes must be, and where the source came from."""
    shards = shards_of(manifest)
    rows = [[code(shard.file), str(shard.file_bytes)] for shard in shards]
    of = "source" if manifest.kind == "master" else "master that it was made from"
    facts = [f"sha256 of {code(MANIFEST_FILE)}: {code(manifest_sha256)}"]
    if manifest.identity.origin is not None:
        facts.append(f"{of}: {code(manifest.identity.origin.id)} at commit {code(manifest.identity.origin.revision)}")
    facts.append(f"fingerprint of the {of}: {code(manifest.source_fingerprint)}")
    if "original_fingerprint" in manifest.made_by:
        facts.append(f"fingerprint of the original: {code(_text(manifest.made_by['original_fingerprint']))}")
    beside = (
        f" {code(EVALUATION_FILE)} has the figures of the evaluation, bound to that manifest." if has_records else ""
    )
    return [
        f"{code(MANIFEST_FILE)} has the sha256 of every stored tensor and of every other file; `pqweights verify` compares all of "
        f"them with what is on the disk.{beside}",
        "\n".join(f"- {fact}" for fact in facts),
        table(["file", "bytes"], rows, [1]),
    ]


def main_bits(manifest: Manifest) -> float | None:
    """The width of most of the quantized weights."""
    counts: dict[float, int] = defaultdict(int)
    for tensor in manifest.tensors:
        if tensor.bits is not None:
            counts[tensor.bits] += tensor.weights
    return max(counts, key=lambda bits: (counts[bits], bits)) if counts else None


def _measure(value: Any) -> float | None:
    """A number where a manifest does not promise one."""
    return float(value) if isinstance(value, float | int) and value is not True and abs(value) < 1e300 else None


def _text(value: Any) -> str:
    """What a manifest holds under a key whose type it does not promise."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _grouped(items: Any, key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups
