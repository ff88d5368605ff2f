"""Several formats of one target in one run: a folder of each, made together, so that the source is read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pqweights.checkpoint.gguf.views import RenamedTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.convert.plan import SmallFiles
from pqweights.errors import OptionError
from pqweights.formats.packing import PackedFormat
from pqweights.planning.layout import ShardPlan
from pqweights.targets.integers import Assignment
from pqweights.targets.target import ExportSettings


def one_by_one(options: Options) -> dict[str, Options]:
    """Return the options of each format that is asked for, by the folder that it gets, with a slash.

    Several formats or bit widths stand with commas between them; one has no folder of its own, "".

    Raises OptionError for a format that is there twice, and for several of both.
    """
    several = [name for name in ("format", "bits") if "," in str(getattr(options, name))]
    if not several:
        bits = options.bits
        return {"": replace(options, bits=int(bits)) if isinstance(bits, str) else options}
    text = str(getattr(options, several[0]))
    values = [value.strip() for value in text.split(",")]
    if len(several) > 1 or len({*values}) < len(values):
        raise OptionError(f"`{several[0]}` {text}: expected different formats, listed in either `format` or `bits`")
    if several == ["bits"]:
        return {f"{value}bit/": replace(options, bits=int(value)) for value in values}
    return {f"{value}/": replace(options, format=value) for value in values}


def together(formats: Mapping[str, ExportSettings]) -> ExportSettings:
    """Return formats of one target, by folder, as one. Raises OptionError for formats that do not go together."""
    first = next(iter(formats.values()))
    if len({of.rounding for of in formats.values()}) > 1:
        raise OptionError(
            "`calibrate`: needs formats with compensated rounding; export the others by themselves, without it"
        )
    if first.recipe.goal is not None and first.recipe.goal.divergence is not None:
        raise OptionError("`max_kl`: is measured of one result, found several formats; make them one after the other")
    stated = {
        folder.rstrip("/"): {key: value for key, value in of.stated.items() if key != "target"}
        for folder, of in formats.items()
    }
    return replace(
        first,
        stated={"target": first.stated["target"], "results": stated},
        assign=partial(_assign, {folder: of.assign for folder, of in formats.items()}),
    )


def _assign(
    formats: Mapping[str, Callable[[Checkpoint, str | None], Assignment]], checkpoint: Checkpoint, name: str | None
) -> Assignment:
    """Decide what becomes of a model in each format. Raises OptionError for formats that hold other tensors of it."""
    parts = {folder: assign(checkpoint, name) for folder, assign in formats.items()}
    first = next(iter(parts.values()))
    for folder, part in parts.items():
        if [tensor.name for tensor in part.tensors] != [tensor.name for tensor in first.tensors]:
            raise OptionError(
                f"`format` {folder.rstrip('/')}: has other tensors than "
                f"{next(iter(parts)).rstrip('/')}; export the two by themselves"
            )
    return replace(
        first,
        tensors=tuple(RenamedTensor.of(at + t.name, t) for at, part in parts.items() for t in part.tensors),
        decisions={
            at + name: replace(how, unit_of=at + how.unit_of) if isinstance(how, PackedFormat) and how.unit_of else how
            for at, part in parts.items()
            for name, how in part.decisions.items()
        },
        dtypes={at + name: dtype for at, part in parts.items() for name, dtype in part.dtypes.items()},
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
