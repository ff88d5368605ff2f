"""Exporting: any checkpoint into a folder that a runtime loads. Of a source weights are read, of a master decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.config import model_facts
from pqweights.checkpoint.source import Checkpoint, proven
from pqweights.checkpoint.storage import Storage
from pqweights.convert.conversion import MASTER, Conversion
from pqweights.convert.listed_files import open_result
from pqweights.convert.manifest import Manifest, find_manifest
from pqweights.convert.records import total_relative_mse
from pqweights.convert.task import RunOptions
from pqweights.errors import OptionError
from pqweights.planning.decisions import open_planned, with_weights
from pqweights.planning.inputs import KnownInputs
from pqweights.planning.options import ExportOptions, SourceOptions
from pqweights.planning.plan import total
from pqweights.storage import Store
from pqweights.storage.sources import place_apart
from pqweights.targets import get_target
from pqweights.targets.several import SeveralFormats, one_by_one
from pqweights.targets.target import ExportSource, ExportTarget

AS_IT_IS = SourceOptions()


def open_exported(source: str | Path, options: SourceOptions = AS_IT_IS) -> tuple[Checkpoint, Manifest | None]:
    """Open whatever is to be exported: a local model, one on the Hub or at an address, in safetensors or GGUF.

    Returns the checkpoint, with the weights that may be rounded, and the manifest of a master, if it has one. A master
    is read through its manifest, with every byte checked. Of any other checkpoint those weights may be rounded that
    `quantize` encodes by default.

    Raises SourceError, RecipeError, HubError, StorageError; MasterError for a damaged master.
    """
    manifest: Manifest | None = None

    def open_master(storage: Storage) -> Checkpoint | None:
        nonlocal manifest
        manifest = find_manifest(storage)
        if manifest is None or manifest.kind != MASTER:
            return None
        return open_result(storage, manifest)

    checkpoint = open_planned(source, options, open_master)
    return with_weights(checkpoint), manifest if checkpoint.is_master else None


def settings_of(target: ExportTarget[Any], options: ExportOptions) -> Any:
    """Return what the `plan` of a target takes, of one format or of several.

    Raises OptionError for an option or a value that the target does not have, RecipeError for what is wrong in a file.
    """
    options = target.with_recipe(options)
    if "type" in target.options:  # GGUF files of several types lie in one folder
        return target.read_options(options)
    each = {folder: target.read_options(of) for folder, of in one_by_one(options).items()}
    if "" in each:
        return each[""]
    if len({of.rounding for of in each.values()}) > 1:
        raise OptionError("`calibrate`: is for formats in which codes can be compensated; export the others without it")
    several = SeveralFormats(formats=each)
    if several.recipe.goal is not None and several.recipe.goal.divergence is not None:
        raise OptionError("`max_kl`: is measured of one result, found several formats; make them one after the other")
    return several


def readable(target: ExportTarget[Any], options: ExportOptions) -> ExportOptions:
    """Return the options of a result with the same numbers that can be read again, as torchao's tiles cannot."""
    is_tiled = "packing" in settings_of(target, options).describe()
    return replace(options, packing="plain") if is_tiled else options


def plan_export(
    source: str | Path,
    opened: tuple[Checkpoint, Manifest | None],
    out: Store,
    target: str,
    *,
    options: ExportOptions = ExportOptions(),
    run: RunOptions = RunOptions(),
    inputs: KnownInputs | None = None,
) -> Conversion:
    """Plan what a target loads, of a checkpoint or a master.

    source: where it lies
    opened: see open_exported
    target: a key of EXPORTS, or of ALIASES
    run: how to show progress of what is read before
    inputs: what is known of the inputs of its weights

    Raises SourceError, MasterError, ExportError, OptionError, OutputError, StorageError or MissingDependencyError.
    """
    to = get_target(target)
    settings = settings_of(to, options)
    checkpoint, manifest = with_weights(proven(opened[0], run.progress)), opened[1]
    place = place_apart(source, checkpoint, out)
    exported = ExportSource(
        where=str(place.resolve() if isinstance(place, Path) else source),
        checkpoint=checkpoint,
        manifest=manifest,
        inputs=inputs,
        max_shard_bytes=options.max_shard_size or to.max_shard_bytes,
    )
    return replace(
        to.plan(exported, settings),
        model=model_facts(checkpoint.storage) if manifest is None else manifest.model,
        master={} if manifest is None else _about_master(manifest),
    )


def _about_master(manifest: Manifest) -> dict[str, Any]:
    """Return what the manifest of an export states about its master."""
    about: dict[str, Any] = {
        key: manifest.made_by[key] for key in ("recipe", "calibrated", "awq", "fit") if key in manifest.made_by
    }
    about["bits_per_weight"] = total(manifest.tensors, source_bytes=0, output_bytes=0).bits_per_weight
    about["relative_mse"] = total_relative_mse(manifest.records)
    return about
