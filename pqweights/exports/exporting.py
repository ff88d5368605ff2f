"""Exporting: a master, or the original in its place, into a folder that a runtime loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pqweights.checkpoint.source import Checkpoint, open_local, proven
from pqweights.checkpoint.storage import Origin, Storage
from pqweights.errors import OptionError, SourceError
from pqweights.exports import get_target, target_name
from pqweights.exports.recipe import with_recipe
from pqweights.exports.target import GPTQ, PLAIN, ExportSource, is_compensated
from pqweights.planning.decisions import without
from pqweights.planning.inputs import KnownInputs
from pqweights.planning.options import ExportOptions
from pqweights.planning.plan import DEFAULT_MAX_SHARD_BYTES, total
from pqweights.rewrite.driver import make_plan, rewrite
from pqweights.rewrite.listed_files import open_result
from pqweights.rewrite.manifest import Manifest, find_manifest
from pqweights.rewrite.records import total_relative_mse
from pqweights.rewrite.task import RewriteReport, RewriteTask, RunOptions
from pqweights.rewrite.transform import EXPORT
from pqweights.storage import Store, open_store
from pqweights.storage.addresses import Address


@dataclass(frozen=True)
class MasterFolder:
    """Where a master lies.

    folder: the folder of the master, on this machine or anywhere
    origin: the repository from which the folder was fetched, if it was
    original: the checkpoint from which the master was made; a target of integers then rounds its weights instead of the
        decoded ones
    """

    folder: Path | Storage
    origin: Origin | None = None
    original: Path | Address | None = None

    @cached_property
    def opened(self) -> tuple[Checkpoint, Manifest | None]:
        """The opened master, and its manifest, if it has one.

        Raises SourceError for what is not a master, MasterError for a damaged one.
        """
        if isinstance(self.folder, Path) and not self.folder.is_dir():
            return _checked(self.folder, open_local(self.folder)), None
        storage = Storage(self.folder, origin=self.origin) if isinstance(self.folder, Path) else self.folder
        manifest = find_manifest(storage)
        if manifest is not None and manifest.kind == EXPORT:
            target = target_name(manifest.made_by.get("target"))
            raise SourceError(
                f"{self.folder}: expected a pqweights master, found an export ({target}): an export is made from the "
                "master, not from another export; give the folder of the master"
            )
        return _checked(self.folder, open_result(storage, manifest)), manifest


def _checked(folder: Path | Storage, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that is a master. Raises SourceError for another one."""
    if not checkpoint.is_master:
        raise SourceError(
            f"{folder}: expected a pqweights master (config.json with quant_method pqweights), found none"
        )
    return checkpoint


def export(
    master: MasterFolder,
    out: str | Path | Store,
    target: str,
    *,
    options: ExportOptions = ExportOptions(),
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    run: RunOptions = RunOptions(),
    inputs: KnownInputs | None = None,
    leave_out: Sequence[str] = (),
) -> RewriteReport:
    """Write a master into `out` as a target loads it, continuing an interrupted run of the same call.

    out: a folder or an address in object storage, new, empty, or written by an earlier run
    target: a key of EXPORTS, or of ALIASES
    leave_out: patterns of names of tensors that the result does not get
    inputs: what is known of the inputs of its weights, or of those of the original in their place
    Raises SourceError (also for a folder that is not a master), MasterError, ExportError, OptionError, OutputError,
    StorageError or MissingDependencyError.
    """
    to = get_target(target)
    if options.recipe is not None and "recipe" not in to.options:
        raise OptionError(f"`recipe`: the target {to.name} does not take this option")
    options = with_recipe(options)
    settings = to.settings(options)
    store = open_store(out)
    for where in (_location(master.folder), master.original):
        if where is not None:
            store.check_apart(where)
    checkpoint, manifest = master.opened
    checkpoint = proven(checkpoint, run.progress)
    if leave_out:
        checkpoint = without(checkpoint, leave_out)
    source = ExportSource(
        folder=master.folder,
        checkpoint=checkpoint,
        manifest=manifest,
        original=master.original,
        inputs=inputs,
        rounding=GPTQ if is_compensated(options) else PLAIN,
    )
    checkpoint, transform = to.prepare(source, settings)
    task = RewriteTask(
        checkpoint=checkpoint,
        source=_location(master.folder),
        transform=transform,
        plan=make_plan(checkpoint, transform, max_shard_bytes),
        out=store,
        model={} if manifest is None else manifest.identity.model,
        master={} if manifest is None else _about_master(manifest),
    )
    return rewrite(task, run)


def _location(folder: Path | Storage) -> Path | Address | None:
    """Return where a folder is, which may be that of the result; None if it cannot be."""
    return folder if isinstance(folder, Path) else folder.address


def _about_master(manifest: Manifest) -> dict[str, Any]:
    """Return what the manifest of an export states about its master."""
    about: dict[str, Any] = {
        key: manifest.made_by[key] for key in ("recipe", "calibrated", "awq", "fit") if key in manifest.made_by
    }
    about["bits_per_weight"] = total(manifest.tensors, source_bytes=0, output_bytes=0).bits_per_weight
    about["relative_mse"] = total_relative_mse(manifest.records)
    return about
