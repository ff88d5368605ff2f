"""The ablation: what each part of the method is worth on a model, by perplexity, with everything else the same.

The rows are those of the table in arXiv:2603.29078 v1 (absmax, rotation alone, levels alone, both), the least-squares
norm, activation-aware scales, and INT4 made from the master or straight from the original; besides, a trellis master of
each size, and one of polar, which has a single size. Each row is a master or an export, made by the same calls as
anywhere else, in a folder that is removed after it was measured.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.codecs import get_codec
from pqweights.codecs.polar import RATE
from pqweights.errors import EvaluationError, ExportError, MissingDependencyError, OptionError, RecipeError
from pqweights.evaluate.evaluation import TextOptions, choose_windows
from pqweights.evaluate.protocol import Estimate, Scores, Windows, compare, perplexity_change
from pqweights.evaluate.report import to_json
from pqweights.evaluate.weight_errors import relative_mse
from pqweights.exporting import MasterFolder, export
from pqweights.exports.options import ExportOptions
from pqweights.measure.calibrate import WINDOW, CalibrationOptions, calibrate, fewest_tokens
from pqweights.notices import slow_step
from pqweights.planning.recipe import Recipe, Rule
from pqweights.quantizing import QuantizeOptions, quantize
from pqweights.results.inspect import inspect
from pqweights.rewrite.task import RunOptions
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.models import open_model
from pqweights.runtimes.packages import package
from pqweights.runtimes.texts import Ids, encode, load_tokenizer, tokenize

ABSMAX = "absmax"
ROTATED = "+ Hadamard only"
LEVELS = "+ Lloyd-Max only"
BOTH = "+ both"
LEAST_SQUARES = "+ least-squares norm"
AWQ = "+ AWQ"
TRELLIS = "trellis of the same size"
POLAR = "polar"


class _Configuration(NamedTuple):
    """A master that is measured at each width.

    name: the name of the row
    codec: the codec
    scaled: whether input channels are scaled
    overhead: what is added to the width to get the rate: that of a codec which counts its norms
    """

    name: str
    codec: str
    scaled: bool = False
    overhead: float = 0.0

    def rate(self, bits: float) -> float:
        """Return the rate at a width, not above the largest that the codec has."""
        return min(bits + self.overhead, get_codec(self.codec).rates[-1]) if self.overhead else bits


MASTERS = (
    _Configuration(ABSMAX, "absmax"),
    _Configuration(ROTATED, "hadamard-absmax"),
    _Configuration(LEVELS, "lloyd-max"),
    _Configuration(BOTH, "hadamard-lloyd-max-l2"),
    _Configuration(LEAST_SQUARES, "hadamard-lloyd-max"),
    _Configuration(TRELLIS, "hadamard-trellis", overhead=16 / 128),
    _Configuration(AWQ, "hadamard-lloyd-max", scaled=True),
)
# How INT4 in groups of 128 is rounded: --qparams, and its name in a row.
RULES = {"minmax": "torchao's min-max", "best": "least squares"}
# Without a text for calibration, one part in this many of the text's tokens is used for it.
CALIBRATION_SHARE = 3
MOST_CALIBRATION_TOKENS = 16384

Progress = Callable[[int, int, str], None]  # called with the rows done, the rows in all, and the row being made


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One configuration.

    name: the configuration.
    bits: the width of the master, or the rate of polar; None for the original, and for INT4 made straight from it.
    bits_per_weight: over the quantized weights; None for the original.
    relative_mse: against the original, over all weights that the master quantizes; None for the original.
    scores: its losses, and its divergence from the original.
    share: the share of the gain of rotation and levels over absmax that this row gains; None if that gain is not above
        twice its standard error.
    """

    name: str
    bits: float | None
    bits_per_weight: float | None
    relative_mse: float | None
    scores: Scores
    share: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the row in ablate --json."""
        divergence = self.scores.divergence
        return {
            "name": self.name,
            "bits": self.bits,
            "bits_per_weight": self.bits_per_weight,
            "relative_mse": self.relative_mse,
            "perplexity": to_json(self.scores.perplexity),
            "perplexity_change": to_json(self.scores.perplexity_change),
            "kl_mean": None if divergence is None else to_json(divergence.mean),
            "top1_agreement": None if divergence is None else to_json(divergence.top1),
            "share": self.share,
        }


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The result of an ablation.

    tokens: how many tokens of the text were evaluated on.
    windows: how they were cut.
    scored_tokens: how many tokens the windows score together.
    calibration_tokens: how many tokens AWQ was calibrated on.
    rows: the configurations; the original is the first.
    absent: what could not be measured, with the reason.
    """

    tokens: int
    windows: Windows
    scored_tokens: int
    calibration_tokens: int
    rows: tuple[AblationRow, ...]
    absent: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ablate --json."""
        return {
            "settings": {
                "tokens": self.tokens,
                **vars(self.windows),
                "bos": self.windows.bos is not None,
                "scored_tokens": self.scored_tokens,
                "calibration_tokens": self.calibration_tokens,
            },
            "rows": [row.to_json() for row in self.rows],
            "absent": list(self.absent),
        }


@dataclass(frozen=True, kw_only=True)
class AblationOptions:
    """What an ablation measures, and how.

    widths: the widths of the masters, in bits.
    reading: how the text is read.
    calibration: a text for AWQ; by default the last third of the tokens, which are not evaluated on then.
    awq, int4: whether the rows with activation-aware scales and with INT4 are measured.
    work: where folders are made, one master and one export at a time; by default the folder for temporary files.
    threads: how many threads quantize, calibrate and export.
    """

    widths: Sequence[float] = (5.0,)
    reading: TextOptions = TextOptions()
    calibration: str | None = None
    awq: bool = True
    int4: bool = True
    work: Path | None = None
    threads: int = 1


@dataclass(frozen=True)
class _Made:
    """A folder to be measured: the name of its row, the width of the master, and where it is."""

    name: str
    bits: float | None
    folder: Path


@dataclass(frozen=True, kw_only=True)
class _Text:
    """The tokens to evaluate on, the windows over them, the text to calibrate on if any, and how many tokens it has."""

    ids: Ids
    windows: Windows
    calibration: str | None
    calibration_tokens: int


def ablate(
    source: Path,
    text: str,
    *,
    recipe: Recipe,
    options: AblationOptions = AblationOptions(),
    progress: Progress = lambda done, total, what: None,
) -> Ablation:
    """Measure every configuration at every width on a text, in float32 on the CPU.

    recipe: which tensors are quantized; its codec and width are replaced. Raises what quantize, calibrate and evaluate
    raise.
    """
    if not options.widths:
        raise RecipeError("--bits: expected at least one width, found none")
    for bits in options.widths:
        _check_width(bits)
        replace(recipe, codec=MASTERS[0].codec).with_bits(bits)
    with slow_step("reading the text with transformers"):
        read = _read_text(source, text, options)
    starts = read.windows.starts(len(read.ids), max_tokens=options.reading.max_tokens)
    absent = _missing_packages() if options.int4 else []
    options = replace(options, int4=options.int4 and not absent)
    total = _row_count(options)
    progress(0, total, "original")
    with slow_step(f"loading {source}"):
        reference = open_model(source)
    rows: list[AblationRow] = []
    with tempfile.TemporaryDirectory(prefix="pqweights-ablate-", dir=options.work) as folder:
        maker = _Maker(source, Path(folder), recipe=recipe, text=read, options=options, absent=absent)
        for made in maker.folders():
            progress(len(rows) + 1, total, made.name if made.bits is None else f"{made.bits:g} bits: {made.name}")
            scores = compare(open_model(made.folder), reference, ids=read.ids, windows=read.windows)
            rows.append(_row(source, made, scores))
    return Ablation(
        tokens=len(read.ids),
        windows=read.windows,
        scored_tokens=sum(read.windows.scored(start) for start in starts),
        calibration_tokens=read.calibration_tokens,
        rows=(_original(rows[0]), *_with_shares(rows)),
        absent=tuple(dict.fromkeys(absent)),
    )


def _check_width(bits: float) -> None:
    """Raise OptionError for a width that one of the codecs lacks; that others have it does not help."""
    try:
        for configuration in MASTERS:
            get_codec(configuration.codec).coder(configuration.rate(bits))
    except RecipeError as error:
        raise OptionError(f"--bits: {error}") from None


def _read_text(source: Path, text: str, options: AblationOptions) -> _Text:
    """Tokenize the text, and take the part for calibration from it where none was given.

    Raises EvaluationError if a part is too short.
    """
    windows = choose_windows([read_folder(source)], options.reading)
    tokenizer = options.reading.tokenizer or source
    ids, bos = encode(tokenizer, text, options.reading.max_tokens, bos=options.reading.bos)
    windows, calibration = replace(windows, bos=bos), options.calibration
    if not options.awq:
        return _Text(ids=ids, windows=windows, calibration=None, calibration_tokens=0)
    if calibration is None:
        kept = len(ids) - len(ids) // CALIBRATION_SHARE
        calibration = str(load_tokenizer(tokenizer).decode(ids[kept:].tolist()))
        ids = ids[:kept]
    found, needed = len(tokenize(tokenizer, calibration, MOST_CALIBRATION_TOKENS)), fewest_tokens(_window(windows))
    if found < needed:
        raise EvaluationError(
            f"calibration for AWQ: expected at least {needed} tokens, found {found}; raise --max-tokens, give a "
            "longer text or another one for it (--calibration FILE), or pass --no-awq"
        )
    return _Text(ids=ids, windows=windows, calibration=calibration, calibration_tokens=found)


def _window(windows: Windows) -> int:
    """Return the window for calibration, in tokens."""
    return min(WINDOW, windows.size)


def _missing_packages() -> list[str]:
    """Return why INT4 cannot be measured, if a package is missing."""
    try:
        package("torchao", "torchao", "INT4")
    except MissingDependencyError as error:
        return [str(error)]
    return []


def _row_count(options: AblationOptions) -> int:
    """Return how many rows there will be, the original included."""
    masters, integers = len(MASTERS) - (not options.awq), len(RULES) if options.int4 else 0
    return 1 + len(options.widths) * (masters + integers) + integers + 1


class _Maker:
    """Makes the folders of all rows, one after the other.

    source: the original.
    work: where masters and exports are made.
    recipe: which tensors are quantized.
    text: the texts that are read.
    options: what is measured.
    absent: a list that receives the reasons for rows that cannot be made.
    """

    def __init__(
        self, source: Path, work: Path, *, recipe: Recipe, text: _Text, options: AblationOptions, absent: list[str]
    ) -> None:
        self._source, self._recipe, self._text, self._options, self._absent = source, recipe, text, options, absent
        self._master, self._int4, self._scales = work / "master", work / "int4", work / "scales.safetensors"
        self._run = RunOptions(threads=options.threads, overwrite=True)

    def folders(self) -> Iterator[_Made]:
        """Yield each folder, which exists until the next one is asked for."""
        for number, bits in enumerate(self._options.widths):
            is_last = number == len(self._options.widths) - 1
            for configuration in MASTERS:
                if configuration.scaled and self._text.calibration is None:
                    continue
                self._quantize(configuration, bits)
                yield _Made(configuration.name, bits, self._master)
                if configuration.name == LEAST_SQUARES and self._options.int4:
                    yield from self._integers(bits, None)
                    if is_last:
                        yield from self._integers(None, self._source)
        self._quantize_polar()
        yield _Made(POLAR, RATE, self._master)
        shutil.rmtree(self._master, ignore_errors=True)

    def _quantize(self, configuration: _Configuration, bits: float) -> None:
        """Make a master, and the scales for it if it has any."""
        recipe = replace(self._recipe, codec=configuration.codec).with_bits(configuration.rate(bits))
        if configuration.scaled:
            options = CalibrationOptions(
                max_tokens=MOST_CALIBRATION_TOKENS,
                window=_window(self._text.windows),
                tokenizer=self._options.reading.tokenizer,
                bos=self._options.reading.bos,
                threads=self._options.threads,
                overwrite=True,
            )
            calibrate(self._source, self._scales, self._text.calibration or "", recipe=recipe, options=options)
        scaled = QuantizeOptions(awq=self._scales if configuration.scaled else None)
        quantize(self._source, self._master, recipe, options=scaled, run=self._run)

    def _quantize_polar(self) -> None:
        """Make the master of polar; weights whose bits a rule gives keep the codec of the recipe, which has them."""
        recipe = self._recipe

        def kept(rules: Sequence[Rule]) -> tuple[Rule, ...]:
            return tuple(
                rule if rule.bits is None else replace(rule, codec=rule.codec or recipe.codec) for rule in rules
            )

        changed = replace(recipe, codec="polar", bits=RATE, rules=kept(recipe.rules), overrides=kept(recipe.overrides))
        quantize(self._source, self._master, changed, run=self._run)

    def _integers(self, bits: float | None, original: Path | None) -> Iterator[_Made]:
        """Yield torchao INT4 by each rule: of the master, or of the original if it is given."""
        for rule, name in RULES.items():
            options = ExportOptions(packing="plain", group_size=128, qparams=rule)
            try:
                master = MasterFolder(self._master, original=original)
                export(master, self._int4, "torchao-int4", options=options, run=self._run)
            except ExportError as error:
                self._absent.append(f"INT4: {error}")
                continue
            row = f"+ INT4 on top, {name}" if original is None else f"INT4 from the original, {name}"
            yield _Made(row, bits, self._int4)


def _row(source: Path, made: _Made, scores: Scores) -> AblationRow:
    return AblationRow(
        name=made.name,
        bits=made.bits,
        bits_per_weight=inspect(made.folder).totals.bits_per_weight,
        relative_mse=relative_mse(source, made.folder).master.relative_mse,
        scores=scores,
        share=None,
    )


def _original(row: AblationRow) -> AblationRow:
    """Return the row of the original, from one that was compared with it."""
    assert row.scores.reference_losses is not None
    scores = Scores(row.scores.reference_losses)
    return AblationRow(name="original", bits=None, bits_per_weight=None, relative_mse=None, scores=scores, share=None)


def _with_shares(rows: Sequence[AblationRow]) -> list[AblationRow]:
    """Return each row with its share of the gain at its width."""
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
    """Return whether a change is a gain above twice its standard error."""
    return change.standard_error is not None and change.value > 2 * change.standard_error
