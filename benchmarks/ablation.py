"""The ablation of benchmarks/quality.py: what each part of the method is worth on a model, all else being the same.

The rows are those of the table in arXiv:2603.29078 v1 (absmax, rotation alone, levels alone, both), the least-squares
norm, activation-aware scales, and INT4 made from the master or straight from the original; besides, a trellis master of
each size, and one of polar, which has a single size. Each row is a master or an export, made by the same calls as
anywhere else, in a folder that is removed after it was measured.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import comparison_codecs

import pqweights
from pqweights.errors import ExportError, MissingDependencyError
from pqweights.formats import get_codec
from pqweights.planning.recipe import Recipe
from pqweights.results.inspect import inspect
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.packages import package
from pqweights.runtime.protocol import Estimate, Scores, TextWindows, compare, perplexity_change
from pqweights.runtime.texts import Ids

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from weight_errors import relative_mse

ABSMAX = "absmax"
ROTATED = "+ Hadamard only"
LEVELS = "+ Lloyd-Max only"
BOTH = "+ both"
LEAST_SQUARES = "+ least-squares norm"
AWQ = "+ AWQ"
TRELLIS = "trellis of the same size"
CALIBRATION_TOKENS = 16384


class Configuration(NamedTuple):
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
        """The rate at a width, not above the largest that the codec has."""
        return min(bits + self.overhead, get_codec(self.codec).rates[-1]) if self.overhead else bits


MASTERS = (
    Configuration(ABSMAX, "absmax"),
    Configuration(ROTATED, "hadamard-absmax"),
    Configuration(LEVELS, "lloyd-max"),
    Configuration(BOTH, "hadamard-lloyd-max-l2"),
    Configuration(LEAST_SQUARES, "hadamard-lloyd-max"),
    Configuration(TRELLIS, "hadamard-trellis", overhead=16 / 128),
    Configuration(AWQ, "hadamard-lloyd-max", scaled=True),
)
# How INT4 in groups of 128 is rounded: --qparams, and its name in a row.
RULES = {"minmax": "torchao's min-max", "best": "least squares"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration.

    name: the configuration.
    bits: the width of the master; None for the original, and for INT4 made straight from it.
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
    share: float | None = None


class Made(NamedTuple):
    """A folder to be measured: the name of its row, the width of the master, and where it is."""

    name: str
    bits: float | None
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is measured, and on what.

    source: the folder of the original.
    original: the original, opened.
    recipe: which tensors are quantized; its codec and width are replaced.
    widths: the widths of the masters, in bits.
    ids, windows: what is evaluated on.
    calibration: a text for AWQ; None to leave it out.
    work: where folders are made, one master and one export at a time.
    threads: how many threads quantize, calibrate and export.
    absent: receives why INT4 could not be measured.
    """

    source: Path
    original: Model
    recipe: Recipe
    widths: Sequence[float]
    ids: Ids
    windows: TextWindows
    calibration: str | None
    work: Path
    threads: int
    absent: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Every configuration at every width, in float32 on the CPU; the original is the first."""
        comparison_codecs.add()
        rows = [self._row(made) for made in self._folders()]
        losses = rows[0].scores.reference_losses
        assert losses is not None
        original = Row(name="original", bits=None, bits_per_weight=None, relative_mse=None, scores=Scores(losses))
        return [original, *with_shares(rows)]

    def _row(self, made: Made) -> Row:
        print(made.name if made.bits is None else f"{made.bits:g} bits: {made.name}", flush=True)
        return Row(
            name=made.name,
            bits=made.bits,
            bits_per_weight=inspect(made.folder).totals.bits_per_weight,
            relative_mse=relative_mse(self.source, made.folder).master.relative_mse,
            scores=compare(open_model(made.folder), self.original, ids=self.ids, windows=self.windows),
        )

    @property
    def _master(self) -> Path:
        return self.work / "master"

    def _folders(self) -> Iterator[Made]:
        """Yield each folder, which exists until the next one is asked for."""
        integers = self._has_torchao()
        for bits in self.widths:
            for configuration in MASTERS:
                if configuration.scaled and self.calibration is None:
                    continue
                self._quantize(configuration, bits)
                yield Made(configuration.name, bits, self._master)
                if configuration.name == LEAST_SQUARES and integers:
                    yield from self._integers(bits, None)
                    if bits == self.widths[-1]:
                        yield from self._integers(None, self.source)
        shutil.rmtree(self._master)

    def _has_torchao(self) -> bool:
        try:
            package("torchao", "torchao", "INT4")
        except MissingDependencyError as error:
            self.absent["INT4"] = str(error)
            return False
        return True

    def _quantize(self, configuration: Configuration, bits: float) -> None:
        """Make a master, with scales that are searched if it has any."""
        recipe = replace(self.recipe, codec=configuration.codec, bits=configuration.rate(bits))
        text = self.work / "calibration.txt"
        text.write_text(self.calibration or "", encoding="utf-8")
        scaled: dict[str, Any] = {"awq": text, "calibration_tokens": CALIBRATION_TOKENS} if configuration.scaled else {}
        pqweights.quantize(self.source, self._master, recipe, threads=self.threads, overwrite=True, **scaled)

    def _integers(self, bits: float | None, original: Path | None) -> Iterator[Made]:
        """Yield torchao INT4 by each rule: of the master, or of the original if it is given."""
        for rule, name in RULES.items():
            exported, out = original or self._master, self.work / "int4"
            options: dict[str, Any] = {"packing": "plain", "group_size": 128, "qparams": rule}
            try:
                pqweights.export(exported, out, "torchao", **options, threads=self.threads, overwrite=True)
            except ExportError as error:
                self.absent["INT4"] = str(error)
                continue
            row = f"+ INT4 on top, {name}" if original is None else f"INT4 from the original, {name}"
            yield Made(row, bits, self.work / "int4")


def with_shares(rows: Sequence[Row]) -> list[Row]:
    """Each row with its share of the gain at its width."""
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
    """Whether a change is a gain above twice its standard error."""
    return change.standard_error is not None and change.value > 2 * change.standard_error
