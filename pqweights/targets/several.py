"""Several formats of one target in one run: a folder of each, made together, so that the source is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pqweights.checkpoint.gguf.views import RenamedTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.convert.conversion import SmallFiles
from pqweights.errors import OptionError
from pqweights.formats.packing import PackedFormat
from pqweights.planning.options import ExportOptions
from pqweights.planning.plan import ShardPlan
from pqweights.planning.recipe import Recipe
from pqweights.targets.integers import Assignment, IntegerTarget


def one_by_one(options: ExportOptions) -> dict[str, ExportOptions]:
    """Return the options of each format that is asked for, by the folder that it gets, with a slash.

    Several formats or bit widths stand with commas between them; one has no folder of its own, "".

    Raises OptionError for a format that is there twice, and for several of both.
    """
    several = [name for name in ("format", "bits") if "," in str(getattr(options, name))]
    if not several:
        return {"": options}
    text = str(getattr(options, several[0]))
    values = [value.strip() for value in text.split(",")]
    if len(several) > 1 or len({*values}) < len(values):
        raise OptionError(f"`{several[0]}` {text}: expected different ones, and several of `format` or of `bits`")
    if several == ["bits"]:
        return {f"{value}bit/": replace(options, bits=int(value)) for value in values}
    return {f"{value}/": replace(options, format=value) for value in values}


@dataclass(frozen=True, kw_only=True)
class SeveralFormats:
    """Formats of one target, by folder; an IntegerTarget like each of them."""

    formats: Mapping[str, IntegerTarget]

    @property
    def recipe(self) -> Recipe:
        """Which formats the user asks for."""
        return next(iter(self.formats.values())).recipe

    @property
    def rounding(self) -> str:
        """How codes are chosen in all of them."""
        return next(iter(self.formats.values())).rounding

    def describe(self) -> dict[str, Any]:
        """Return what the manifest states of the target: its name, and the options of each format by folder."""
        stated = {folder.rstrip("/"): of.describe() for folder, of in self.formats.items()}
        (target,) = {of.pop("target") for of in stated.values()}
        return {"target": target, "results": stated}

    def assign(self, checkpoint: Checkpoint) -> Assignment:
        """Decide what becomes of a model in each format.

        Raises OptionError for formats that hold other tensors of it, and what `assign` of one raises.
        """
        parts = {folder: of.assign(checkpoint) for folder, of in self.formats.items()}
        first = next(iter(parts.values()))
        for folder, part in parts.items():
            if [tensor.name for tensor in part.tensors] != [tensor.name for tensor in first.tensors]:
                raise OptionError(
                    f"`format` {folder.rstrip('/')}: holds other tensors of this model than "
                    f"{next(iter(parts)).rstrip('/')}; export them one after the other"
                )
        return replace(
            first,
            tensors=tuple(RenamedTensor.of(at + t.name, t) for at, part in parts.items() for t in part.tensors),
            decisions={
                at + name: replace(how, unit_of=at + how.unit_of)
                if isinstance(how, PackedFormat) and how.unit_of
                else how
                for at, part in parts.items()
                for name, how in part.decisions.items()
            },
            config=None,
            left_out={name: why for part in parts.values() for name, why in part.left_out.items()},
            warnings=(),
            small_files=partial(_small_files, parts),
            parts=parts,
        )


def _small_files(parts: Mapping[str, Assignment], shards: Sequence[ShardPlan]) -> SmallFiles:
    """Return the small files of each format in its folder."""
    made = {folder: part.small_files(shards) for folder, part in parts.items() if part.small_files is not None}
    return {f"{folder}{name}": content for folder, of in made.items() for name, content in of.items()}
