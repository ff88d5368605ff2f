"""The models in a folder with several: types of GGUF, each in its files, or formats, each in a folder."""

from __future__ import annotations

from pathlib import Path

from pqweights.checkpoint.gguf.file import gguf_models, is_gguf
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.storage import Storage
from pqweights.convert.manifest import Manifest, read_manifest, shards_of
from pqweights.convert.records import figures_by_type
from pqweights.targets.loading import files_of_type


def parts(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the files of each type or format of a result with several; nothing for another one."""
    shards = shards_of(manifest)
    names = [shard.file for shard in shards]
    kinds = [of.type for of in figures_by_type(manifest.made_by, manifest.pairs, shards)]
    return {kind: tuple(files_of_type(names, kind)) for kind in kinds}


def models_in(path: Path) -> list[Path]:
    """Return each model in a folder: the first file of each of GGUF, or the folder of each format; else the path.

    Those of the manifest come first; a repository has also those of earlier pushes. Raises MasterError for a damaged
    manifest.
    """
    listed: list[str] = []
    if (path / MANIFEST_FILE).is_file():
        manifest = read_manifest(path)
        if manifest.folders:
            return [path / kind for kind in parts(manifest)]
        listed = [files[0] for files in parts(manifest).values()]
    if not (path.is_dir() and is_gguf(path)):
        return [path]
    there = gguf_models(Storage(path, only=[entry.name for entry in path.iterdir() if entry.is_file()]))
    models = list(dict.fromkeys((*listed, *there)))
    return [path / name for name in models] if len(models) > 1 else [path]


def part_of(model: Path, manifest: Manifest) -> str | None:
    """Return which type or format of a result a file or a folder is; None if it has one alone."""
    return next((kind for kind, files in parts(manifest).items() if model.name in (kind, *files)), None)
