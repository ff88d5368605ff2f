"""Wrappers of the library's functions that take flat keywords, and sort them into options dataclasses.

What imports torch is imported where it is called: runs that are killed start processes that need none of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.common.options import EvaluationOptions, Options
from pqweights.common.threads import Progress, no_progress
from pqweights.convert.convert import convert
from pqweights.convert.plan import Plan
from pqweights.convert.report import RewriteReport
from pqweights.convert.scales import AwqScales
from pqweights.planning.recipe import Recipe
from pqweights.storage import open_store
from pqweights.targets import exporting, master

if TYPE_CHECKING:
    from pqweights.planning.sensitivity import Sensitivity
    from pqweights.publish.card import Card
    from pqweights.runtime.report import EvaluationReport


def options_of(kind: Any, keywords: dict[str, Any]) -> Any:
    """Take the options of one kind out of the keywords."""
    return kind(**{field.name: keywords.pop(field.name) for field in fields(kind) if field.name in keywords})


def quantize_options(keywords: dict[str, Any]) -> Options:
    if "max_shard_bytes" in keywords:
        keywords["max_shard_size"] = keywords.pop("max_shard_bytes")
    options: Options = options_of(Options, keywords)
    return options


def quantize(source: str | Path, out: str | Path, recipe: Recipe, **keywords: Any) -> RewriteReport:
    learned, options = keywords.pop("learned", master.Learned()), keywords.pop("options", None)
    options, store = options or quantize_options(keywords), open_store(out)
    assert not keywords, keywords
    return convert(master.plan_quantize(source, recipe, options, learned, out=store), store, options)


def plan_quantize(source: str | Path, recipe: Recipe, **keywords: Any) -> Plan:
    learned = keywords.pop("learned", master.Learned())
    options = quantize_options(keywords)
    assert not keywords, keywords
    return master.plan_quantize(source, recipe, options, learned)


def export(source: Path, out: str | Path, target: str, options: Options = Options(), **keywords: Any) -> RewriteReport:
    store = open_store(out)
    if "max_shard_bytes" in keywords:
        keywords["max_shard_size"] = keywords.pop("max_shard_bytes")
    inputs = keywords.pop("inputs", None)
    options = replace(options, **keywords)
    opened = exporting.open_exported(source, options)
    planned = exporting.plan_export(source, opened, store, target, options=options, inputs=inputs)
    return convert(planned, store, options)


def make_card(
    folder: Path,
    repository: str | None = None,
    base_model: str | None = None,
    *,
    revision: str | None = None,
    **cards: str | None,
) -> Card:
    from pqweights.publish import card

    asked = card.PublishOptions(repository=repository, base_model=base_model, revision=revision)
    return card.make_card(folder, asked, **cards)


def write_card(folder: Path, repository: str | None = None) -> Card:
    from pqweights.publish import card

    return card.write_card(folder, card.PublishOptions(repository=repository))


def evaluate(models: Sequence[Path], text: str, name: str = "the text", **keywords: Any) -> EvaluationReport:
    from pqweights.runtime import evaluation

    return evaluation.evaluate(models, text, EvaluationOptions(text_name=name, **keywords))


def measure_sensitivity(
    source: Path,
    recipe: Recipe,
    text: Path,
    work: Path | None = None,
    tokens: int = 2048,
    progress: Progress = no_progress,
) -> Sensitivity:
    from pqweights.calibrate import sensitivity

    asked = Options(calibrate=text, calibration_tokens=tokens, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        return sensitivity.measured(source, work or Path(folder), recipe, asked, progress=progress)


def learned_scales(path: Path) -> master.Learned:
    """What a search found that left the scales of a file."""
    return master.Learned(awq=AwqScales.open([path], {}))
