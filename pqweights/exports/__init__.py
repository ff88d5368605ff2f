"""What a master can be turned into. Each target is one file and one line; every one runs through rewrite.py."""

from __future__ import annotations

from pathlib import Path

from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError
from pqweights.exports.bf16 import Bf16Export
from pqweights.plan import DEFAULT_MAX_SHARD_BYTES
from pqweights.rewrite import Report, make_plan, rewrite
from pqweights.stream import Progress

EXPORTS = {
    "bf16": Bf16Export,
}


def export(
    master: Path,
    out: Path,
    target: str,
    *,
    dtype: str = "bf16",
    threads: int,
    device: str = "cpu",
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: Progress = lambda done, total, name: None,
) -> Report:
    """Write a master as `target` (a key of EXPORTS) into the folder `out`; continues an interrupted run of the same call.

    Raises SourceError (also for a folder that is no master), MasterError, OutputError,
    DeviceError.
    """
    checkpoint = open_local(master)
    if not checkpoint.is_master:
        raise SourceError(
            f"{master}: expected a pqweights master (config.json with quant_method pqweights), found none"
        )
    transform = EXPORTS[target](dtype)
    plan = make_plan(checkpoint, transform, max_shard_bytes)
    return rewrite(
        checkpoint, master, transform, plan, out, threads=threads, device=device, overwrite=overwrite, progress=progress
    )
