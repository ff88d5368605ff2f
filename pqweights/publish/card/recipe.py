"""The section of a card that says by which recipe the weights were quantized, and what it was calibrated on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.codecs import CODECS
from pqweights.common.markdown import code, number, words
from pqweights.planning.recipe import load_recipe, recipe_names
from pqweights.planning.target import SizeTarget
from pqweights.publish.card.values import as_number, as_text
from pqweights.rewrite.manifest import Manifest

# What widths were chosen by for a target, by the kind of the sensitivities.
SENSITIVITIES = {
    "heuristic": "a rule of thumb for sensitivities",
    "random tokens": "sensitivities measured on random tokens",
    "text": "sensitivities measured on a text",
}
# How the conditions of a rule are named.
CONDITIONS = {
    "name": "name",
    "role": "role",
    "min_weights": "weights at least",
    "max_weights": "weights at most",
    "dims": "dimensions",
}


def recipe(manifest: Manifest) -> list[str]:
    """Return the recipe of the master, its rules in order, and the calibration; nothing if the manifest holds none."""
    is_master = manifest.kind == "master"
    source = manifest.made_by if is_master else manifest.identity.master
    stated = source.get("recipe")
    if not isinstance(stated, dict):
        return []
    prefix = "" if is_master else "The master's recipe is "
    lines = [prefix + _recipe_line(source)]
    fit = source.get("fit")
    width = "a width chosen for each group" if isinstance(fit, dict) else f"{words(as_text(stated.get('bits')))} bits"
    default = f"Default: {code(as_text(stated.get('codec')))}, {width}{_effort(stated)}."
    rules = stated.get("rules")
    rules = [rule for rule in rules if isinstance(rule, dict)] if isinstance(rules, list) else []
    if rules:
        lines.append(f"{default} The first rule that matches a tensor applies:")
        lines.append("\n".join(f"{place}. {_rule(rule)}" for place, rule in enumerate(rules, start=1)))
    else:
        lines.append(f"{default} There are no rules.")
    if isinstance(fit, dict):
        lines.append(_fit(fit, stated, "The widths" if is_master else "The master's widths"))
    fold = source.get("fold") or manifest.made_by.get("fold")
    folded = [] if not isinstance(fold, dict) else [_fold(fold)]
    data = isinstance(fold, dict) and "calibration" in fold and not isinstance(source.get("awq"), dict)
    return [*lines, *folded, *([] if data else [_calibration(source.get("awq"), manifest)])]


def _effort(stated: Mapping[str, Any]) -> str:
    """Return the effort of a recipe, or the default of its codec; empty for a codec that has no choice."""
    if "effort" in stated:
        return f", effort {words(as_text(stated['effort']))}"
    codec = CODECS.get(as_text(stated.get("codec")))
    return f", effort {codec.efforts[0]}" if codec is not None and codec.efforts else ""


def title(made_by: Mapping[str, Any]) -> str:
    """Return the recipe of a master as its card's title names it; empty if the manifest holds none."""
    stated = made_by.get("recipe")
    if not isinstance(stated, dict):
        return ""
    name, changed = as_text(stated.get("name")), _changed(stated)
    if "fit" in made_by:
        return f"{name}, fitted to a size"
    codec = f" with {as_text(stated.get('codec'))}" if "codec" in changed else ""
    return f"{name}{codec} at {as_text(stated.get('bits'))} bits" if changed & {"codec", "bits"} else name


def _recipe_line(made_by: Mapping[str, Any]) -> str:
    """Return the name of a recipe with its description, or with what was asked for in place of its bit width."""
    stated = made_by["recipe"]
    name, changed = code(as_text(stated.get("name"))), _changed(stated)
    codec, bits = code(as_text(stated.get("codec"))), words(as_text(stated.get("bits")))
    if "fit" in made_by:
        return f"{name}, with {f'{codec} and ' if 'codec' in changed else ''}bit widths chosen to meet a target."
    said = {
        "codec": f"{codec} in place of its own codec",
        "bits": f"{bits} bits in place of its own bit width",
        "rules": "rules that options put before its own",
    }
    if changed:
        return f"{name}, with {' and '.join(text for key, text in said.items() if key in changed)}."
    return f"{name}: {words(as_text(stated.get('description')))}".rstrip(": ")


def _changed(stated: Mapping[str, Any]) -> set[str]:
    """Return which of bits, codec and rules are not those of the recipe that comes with pqweights, if it is one."""
    name = stated.get("name")
    own = load_recipe(name).to_json() if name in recipe_names() else {}
    if own.get("description") != stated.get("description"):
        return set()
    return {key for key in ("bits", "codec", "rules") if own.get(key) != stated.get(key)}


def _rule(rule: Mapping[str, Any]) -> str:
    conditions = [
        f"{name} {' or '.join(code(as_text(each)) for each in (value if isinstance(value, list) else [value]))}"
        for key, name in CONDITIONS.items()
        if (value := rule.get(key)) is not None
    ]
    effects = ["kept"] if rule.get("keep") is True else []
    effects += [code(as_text(rule["codec"]))] if "codec" in rule else []
    effects += [f"{words(as_text(rule['bits']))} bits"] if "bits" in rule else []
    reason = f" ({words(as_text(rule['reason']))})" if "reason" in rule else ""
    return f"{', '.join(conditions)}: {', '.join(effects)}{reason}"


def _fit(fit: Mapping[str, Any], recipe: Mapping[str, Any], subject: str) -> str:
    """Return how widths were chosen for a target. subject: the widths, as the sentence begins."""
    output_bytes, per_weight = as_number(recipe.get("target_size")), as_number(recipe.get("target_bpw"))
    target = "the target of the recipe"
    if output_bytes is not None:
        target = f"the target of {output_bytes:.0f} bytes"
    elif per_weight is not None and "bpw_of" not in recipe:  # a mean over other weights, in development versions
        target = f"the target of {SizeTarget(bits_per_weight=per_weight)}"
    by = fit.get("sensitivity")
    by = by if isinstance(by, dict) else {}
    kind, rise = as_text(by.get("kind")), as_number(fit.get("predicted_rise"))
    sensitivities = SENSITIVITIES.get(kind, f"sensitivities of the kind {code(kind)}")
    if by.get("sha256") is not None:
        sensitivities += f" (file with sha256 {code(as_text(by['sha256']))})"
    # The figure that a rule of thumb predicts has no meaning by itself.
    predicted = "" if rise is None or kind == "heuristic" else f", predicted as {number(rise)} nats per token"
    return (
        f"{subject} that no rule sets were chosen for each group of weights by {sensitivities}, to meet {target} with "
        f"the smallest rise of the loss{predicted} (Malinovskii et al., *HIGGS*, "
        "[arXiv:2411.17525](https://arxiv.org/abs/2411.17525))."
    )


def _fold(fold: Mapping[str, Any]) -> str:
    """Return what was done to neighbouring layers before anything was quantized."""
    kind = as_text(fold.get("kind"))
    how = "the residual stream was rotated" if kind == "rotate" else "factors were moved between neighbouring layers"
    data = ""
    if "calibration" in fold:
        file = code(as_text(fold["calibration"]))
        data = f", by the sizes of channels on a calibration text (file with sha256 {file})"
    return (
        f"Before quantization, {how}{data} ({code(f'--fold {words(kind)}')}). The model computes the same, but "
        "adapters that were trained for the original do not fit it."
    )


def _calibration(awq: Any, manifest: Manifest) -> str:
    is_master = manifest.kind == "master"
    if not isinstance(awq, dict):
        return "No calibration data was used." if is_master else "The master was made without calibration data."
    file = f"file with sha256 {code(as_text(awq.get('sha256')))}"
    if "original_fingerprint" in manifest.made_by:
        return f"The master has activation-aware scales ({file}), which this export does not use."
    count = sum(tensor.is_scaled for tensor in manifest.tensors) if is_master else awq.get("weights")
    subject = "The input channels" if is_master else "In the master, the input channels"
    return (
        f"{subject} of {words(as_text(count))} weights were scaled before quantization, by activation-aware scales "
        f"that were searched on a calibration text ({file})."
    )
