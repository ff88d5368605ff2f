"""What a master can be turned into. Each target is one file and one line; every one runs through rewrite.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import Origin
from pqweights.errors import ExportError, SourceError
from pqweights.exports.bf16 import Bf16Export
from pqweights.exports.build import integer_export
from pqweights.exports.mlx_q4 import MlxQ4
from pqweights.exports.options import ExportOptions
from pqweights.exports.torchao_int4 import TorchaoInt4
from pqweights.exports.vllm_int4 import VllmInt4
from pqweights.planning.plan import DEFAULT_MAX_SHARD_BYTES, totals
from pqweights.rewrite.driver import Lineage, Report, make_plan, rewrite
from pqweights.rewrite.manifest import read_manifest, total_relative_mse
from pqweights.rewrite.stream import Progress
from pqweights.rewrite.transform import Transform
from pqweights.rewrite.workspace import check_paths

EXPORTS: dict[str, type[Bf16Export] | type[TorchaoInt4] | type[MlxQ4] | type[VllmInt4]] = {
    "bf16": Bf16Export,
    "torchao-int4": TorchaoInt4,
    "mlx-q4": MlxQ4,
    "vllm-int4": VllmInt4,
}


def export(
    master: Path,
    out: Path,
    target: str,
    options: ExportOptions = ExportOptions(),  # noqa: B008  # frozen
    *,
    origin: Origin | None = None,
    original: Path | None = None,
    threads: int,
    device: str = "cpu",
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: Progress = lambda done, total, name: None,
) -> Report:
    """Write a master as `target` (a key of EXPORTS) into the folder `out`; continues an interrupted run of the same call.

    origin: of a master that was fetched. original: the checkpoint that the master was made from, whose weights an integer target then takes instead. Raises
    SourceError (also for a folder that is no master), MasterError, ExportError, OutputError, DeviceError,
    MissingDependencyError.
    """
    made = EXPORTS[target].make(options)
    for source in (master, *([original] if original else [])):
        check_paths(source, out)
    checkpoint = open_local(master, origin=origin)
    if not checkpoint.is_master:
        raise SourceError(
            f"{master}: expected a pqweights master (config.json with quant_method pqweights), found none"
        )
    transform: Transform
    if isinstance(made, Bf16Export):
        if original is not None:
            raise ExportError("--source: the original is what the bf16 target would give; it is for integer targets")
        transform = made
    else:
        checkpoint, transform = integer_export(master, checkpoint, made, original)
    plan = make_plan(checkpoint, transform, max_shard_bytes)
    return rewrite(
        checkpoint, master, transform, plan, out, lineage=_lineage(master), threads=threads, device=device,
        overwrite=overwrite, progress=progress,
    )  # fmt: skip


def _lineage(master: Path) -> Lineage:
    """By the master's manifest, where it has one.

    Raises MasterError for a damaged one.
    """
    if not (master / MANIFEST_FILE).is_file():
        return Lineage()
    manifest = read_manifest(master)
    about: dict[str, Any] = {key: manifest.made_by[key] for key in ("recipe", "awq", "fit") if key in manifest.made_by}
    about["bits_per_weight"] = totals(manifest.tensors)["bits_per_weight"]
    return Lineage(manifest.model, about | {"relative_mse": total_relative_mse(manifest.records)})
