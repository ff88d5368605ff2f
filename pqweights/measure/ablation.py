"""The ablation: what each part of the method is worth on a model, by perplexity, with everything else the same.

The table of arXiv:2603.29078 v1 (absmax, rotation alone, levels alone, both), then what is ours (the least-squares norm),
activation-aware scales, and INT4 made from the master or straight from the original. Each row is a master, or an export of
one, made by the same calls as anywhere else, in a folder that is removed after it was measured.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.errors import EvaluationError, ExportError, MissingDependencyError, RecipeError
from pqweights.evaluate.evaluation import choose_windows
from pqweights.evaluate.protocol import Estimate, Scores, Windows, compare, perplexity_change
from pqweights.evaluate.report import to_json
from pqweights.evaluate.weight_errors import relative_mse
from pqweights.export import MasterFolder, export
from pqweights.exports.options import ExportOptions
from pqweights.measure.calibrate import WINDOW, calibrate, fewest_tokens
from pqweights.planning.recipe import Recipe
from pqweights.quantize import QuantizeOptions, quantize
from pqweights.results.inspect import inspect
from pqweights.rewrite.task import RunOptions
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.models import open_model
from pqweights.runtimes.packages import package
from pqweights.runtimes.texts import load_tokenizer, tokenize

ABSMAX, ROTATED, LEVELS, BOTH, LEAST_SQUARES, AWQ = (
    "absmax", "+ Hadamard only", "+ Lloyd-Max only", "+ both", "+ least-squares norm", "+ AWQ",
)  # fmt: skip
# What is measured at each width: name of the row, codec, whether input channels are scaled.
MASTERS = (
    (ABSMAX, "absmax", False),
    (ROTATED, "hadamard-absmax", False),
    (LEVELS, "lloyd-max", False),
    (BOTH, "hadamard-lloyd-max-l2", False),
    (LEAST_SQUARES, "hadamard-lloyd-max", False),
    (AWQ, "hadamard-lloyd-max", True),
)
# INT4 in groups of 128, by rule: as the row calls it.
RULES = {"minmax": "torchao's min-max", "best": "least squares"}
# The share of a text's tokens that are for calibration where no other text is given.
CALIBRATION_SHARE = 3
MOST_CALIBRATION_TOKENS = 16384

Progress = Callable[[int, int, str], None]  # rows done, rows in all, what is under way


@dataclass(frozen=True)
class AblationRow:
    """One configuration. bits: of the master; None for the original, and for INT4 made straight from it.

    relative_mse: against the original, over all weights that the master quantizes. share: how much of what rotation and
    levels together gain over absmax this row gains; None where that gain is not above twice its standard error.
    """

    name: str
    bits: float | None
    bits_per_weight: float | None
    relative_mse: float | None
    scores: Scores
    share: float | None

    def to_json(self) -> dict[str, Any]:
        """As in ablate --json."""
        change, found = self.scores.perplexity_change, self.scores.divergence
        return {
            "name": self.name, "bits": self.bits, "bits_per_weight": self.bits_per_weight,
            "relative_mse": self.relative_mse, "perplexity": to_json(self.scores.perplexity),
            "perplexity_change": to_json(change),
            "kl_mean": None if found is None else to_json(found.mean),
            "top1_agreement": None if found is None else to_json(found.top1), "share": self.share,
        }  # fmt: skip


@dataclass(frozen=True)
class Ablation:
    """All rows, the original first. absent: what could not be measured, with the reason."""

    tokens: int
    windows: Windows
    scored_tokens: int
    calibration_tokens: int
    rows: tuple[AblationRow, ...]
    absent: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """ablate --json."""
        return {
            "settings": {
                "tokens": self.tokens, **vars(self.windows), "scored_tokens": self.scored_tokens,
                "calibration_tokens": self.calibration_tokens,
            },
            "rows": [row.to_json() for row in self.rows],
            "absent": list(self.absent),
        }  # fmt: skip


@dataclass(frozen=True)
class _Made:
    """A folder to be measured."""

    name: str
    bits: float | None
    folder: Path


def ablate(
    source: Path,
    text: str,
    widths: Sequence[float],
    recipe: Recipe,
    *,
    calibration: str | None = None,
    awq: bool = True,
    int4: bool = True,
    window: int | None = None,
    stride: int | None = None,
    score_first: bool = False,
    max_tokens: int | None = None,
    tokenizer: Path | None = None,
    work: Path | None = None,
    threads: int,
    progress: Progress = lambda done, total, what: None,
) -> Ablation:
    """Measure every configuration at every width on a text, in float32 on the CPU.

    recipe: which tensors are quantized; its codec and width are replaced. calibration: text for AWQ; by default the last
    third of the tokens of `text`, which are not evaluated on then. work: where folders are made, one master and one export
    at a time; by default the folder for temporary files. Other parameters: see evaluate. Raises what quantize, calibrate
    and evaluate raise.
    """
    for bits in widths:
        recipe.with_bits(bits)
    if not widths:
        raise RecipeError("--bits: expected at least one width, found none")
    windows = choose_windows([read_folder(source)], window, stride, score_first)
    ids = tokenize(tokenizer or source, text, max_tokens)
    calibrated = 0
    if awq:
        if calibration is None:
            kept = len(ids) - len(ids) // CALIBRATION_SHARE
            rest, ids = ids[kept:], ids[:kept]
            calibration = str(load_tokenizer(tokenizer or source).decode(rest.tolist()))
        calibrated = len(tokenize(tokenizer or source, calibration, MOST_CALIBRATION_TOKENS))
        needed = fewest_tokens(min(WINDOW, windows.size))
        if calibrated < needed:
            raise EvaluationError(
                f"calibration for AWQ: expected at least {needed} tokens, found {calibrated}; give a longer text, one of its "
                "own (--calibration FILE), or --no-awq"
            )
    starts = windows.starts(len(ids))
    absent: list[str] = []
    if int4:
        try:
            package("torchao", "torchao", "INT4")
        except MissingDependencyError as error:
            absent.append(str(error))
            int4 = False
    total = 1 + len(widths) * (len(MASTERS) - (not awq) + (len(RULES) if int4 else 0)) + (len(RULES) if int4 else 0)
    progress(0, total, "original")
    reference = open_model(source)
    rows: list[AblationRow] = []
    with tempfile.TemporaryDirectory(prefix="pqweights-ablate-", dir=work) as folder:
        plan = _folders(
            source,
            Path(folder),
            widths,
            recipe,
            calibration if awq else None,
            min(WINDOW, windows.size),
            int4,
            tokenizer,
            threads,
            absent,
        )
        for made in plan:
            progress(len(rows) + 1, total, made.name if made.bits is None else f"{made.bits} bits: {made.name}")
            scores = compare(open_model(made.folder), reference, ids, windows)
            rows.append(
                AblationRow(
                    made.name, made.bits, inspect(made.folder).totals["bits_per_weight"],
                    relative_mse(source, made.folder).master.relative_mse, scores, None,
                )
            )  # fmt: skip
    assert rows[0].scores.reference_losses is not None
    original = AblationRow("original", None, None, None, Scores(rows[0].scores.reference_losses), None)
    return Ablation(
        len(ids), windows, sum(windows.scored(start) for start in starts), calibrated,
        (original, *_with_shares(rows)), tuple(dict.fromkeys(absent)),
    )  # fmt: skip


def _folders(
    source: Path, work: Path, widths: Sequence[float], recipe: Recipe, calibration: str | None, window: int, int4: bool,
    tokenizer: Path | None, threads: int, absent: list[str],
) -> Iterator[_Made]:  # fmt: skip
    """Each folder in turn, there until the next is asked for. absent: gets the reasons for rows that there are not."""
    for number, bits in enumerate(widths):
        master = work / "master"
        for name, codec, scaled in MASTERS:
            if scaled and calibration is None:
                continue
            chosen = replace(recipe, codec=codec).with_bits(bits)
            scales = work / "scales.safetensors"
            if scaled:
                calibrate(
                    source, scales, calibration or "", chosen, tokenizer=tokenizer, threads=threads, overwrite=True,
                    max_tokens=MOST_CALIBRATION_TOKENS, window=window,
                )  # fmt: skip
            options = QuantizeOptions(awq=scales if scaled else None)
            quantize(source, master, chosen, options=options, run=RunOptions(threads=threads, overwrite=True))
            yield _Made(name, bits, master)
            if name == LEAST_SQUARES and int4:
                straight = source if number == len(widths) - 1 else None
                yield from _integers(master, work / "int4", bits, straight, threads, absent)
    shutil.rmtree(work / "master", ignore_errors=True)


def _integers(
    master: Path, out: Path, bits: float, source: Path | None, threads: int, absent: list[str]
) -> Iterator[_Made]:
    """torchao INT4 of a master, by each rule; and straight from the source, where it is given."""
    for original in (None, source) if source is not None else (None,):
        for rule, called in RULES.items():
            try:
                options = ExportOptions(group_size=128, qparams=rule)
                export(
                    MasterFolder(master, original=original),
                    out,
                    "torchao-int4",
                    options=options,
                    run=RunOptions(threads=threads, overwrite=True),
                )
                yield _Made(
                    f"+ INT4 on top, {called}" if original is None else f"INT4 from the original, {called}",
                    bits if original is None else None, out,
                )  # fmt: skip
            except ExportError as error:
                absent.append(f"INT4: {error}")


def _with_shares(rows: Sequence[AblationRow]) -> list[AblationRow]:
    """Each row with its share of the gain, at its width."""
    by_name = {(row.bits, row.name): row for row in rows}
    result = []
    for row in rows:
        base, both = by_name.get((row.bits, ABSMAX)), by_name.get((row.bits, BOTH))
        if base is None or both is None or row.name == ABSMAX:
            result.append(row)
            continue
        gain = perplexity_change(base.scores.losses, both.scores.losses)
        own = base.scores.perplexity.value - row.scores.perplexity.value
        result.append(replace(row, share=own / gain.value if is_clear(gain) else None))
    return result


def is_clear(change: Estimate) -> bool:
    """Whether a change is above twice its standard error, and a gain."""
    return change.standard_error is not None and change.value > 2 * change.standard_error
