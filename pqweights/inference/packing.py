"""Whether a model fits into memory, and whether a master runs packed or decoded."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.models import has_trait, text_config
from pqweights.checkpoint.models.traits import Trait
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.codecs import CODECS
from pqweights.codecs.lloyd_max import HadamardLloydMax
from pqweights.common.units import size_text as shown
from pqweights.errors import GenerationError
from pqweights.exports.target import MLX
from pqweights.inference.runtimes.folders import LLAMA_CPP, MASTER, Folder, size
from pqweights.inference.runtimes.models import AUTO
from pqweights.inference.runtimes.packages import package
from pqweights.kernels import BLOCK_SIZE

# Models that multiply with the columns of their weights, which have to be decoded for it.
ALONG_COLUMNS = (Trait.TRANSPOSED, Trait.TURNED_EXPERTS)
MOSTLY = 0.9
BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model needs, and what there is; all in bytes, and of the weights alone.

    decoded: with ordinary weights.
    packed: as it is stored.
    multiplied: whether nearly all weights can be multiplied as they are stored; None for what is not a master.
    free: what this process can still take; None if the system does not say.
    """

    decoded: int
    packed: int
    multiplied: bool | None
    free: int | None

    def fits(self, needed: int) -> bool:
        """Whether there is that much memory, as far as is known."""
        return self.free is None or needed <= self.free


def choose_packed(asked: bool | None, needs: Needs) -> tuple[bool, str | None]:
    """Decide whether the weights of a model stay packed, and return a line about it if the user could wonder.

    Scalar codes in whole blocks are multiplied as they are, which is faster than BF16. Other codes are decoded for each
    token, so they stay packed only where the decoded model does not fit into memory.
    """
    if asked is not None or needs.multiplied is None:
        return bool(asked), None
    if needs.multiplied or needs.fits(needs.decoded):
        return needs.multiplied, None
    return True, (
        f"the decoded model needs about {shown(needs.decoded)} of memory, and {shown(needs.free or 0)} are free: the "
        "weights stay packed, which is slower"
    )


def read_needs(folder: Folder, dtype: str) -> Needs:
    """Read what a model needs from its headers, and what is free now.

    dtype: one of DTYPES, or auto

    Raises SourceError, MasterError.
    """
    stored = size(folder.path)
    decoded = stored.bytes
    if folder.runtime not in (MLX, LLAMA_CPP) and stored.parameters is not None:
        decoded = stored.parameters * BYTES_PER_WEIGHT[_own_dtype(folder.config) if dtype == AUTO else dtype]
    multiplied = _multiplied(folder) if folder.runtime == MASTER else None
    return Needs(decoded=decoded, packed=stored.bytes, multiplied=multiplied, free=free_bytes())


def _multiplied(folder: Folder) -> bool:
    """Whether nearly all weights of a master are multiplied without being decoded for each token."""
    if any(has_trait(folder.config.get("model_type"), trait) for trait in ALONG_COLUMNS):
        return False
    sizes = {True: 0, False: 0}
    for tensor in open_local(folder.path).tensors:
        if isinstance(tensor, EncodedTensor) and len(tensor.shape) > 1:
            is_scalar = isinstance(CODECS.get(tensor.coder.codec), HadamardLloydMax)
            sizes[is_scalar and not tensor.shape[-1] % BLOCK_SIZE] += math.prod(tensor.shape)
    return sizes[True] >= MOSTLY * sum(sizes.values())


def check_fits(folder: Folder, needs: Needs, *, packed: bool) -> None:
    """Raise GenerationError, with what to do, if a model does not fit into memory."""
    needed = needs.packed if packed else needs.decoded
    if needs.fits(needed):
        return
    if packed or folder.runtime in (MLX, LLAMA_CPP):
        remedy = "quantize it with fewer bits, or use a machine with more memory"
    elif folder.runtime == MASTER:
        remedy = "let them stay packed: `packed`"
    else:
        remedy = f"quantize it and run the master with `packed`: pqweights quantize {folder.path} MASTER"
    raise GenerationError(
        f"{folder.path}: its weights need about {shown(needed)} of memory, and {shown(needs.free or 0)} are free; "
        f"{remedy}"
    )


def _own_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a configuration states, or float32."""
    stated = (settings.get(key) for settings in (config, text_config(config)) for key in ("dtype", "torch_dtype"))
    return next((name for name in map(str, stated) if name in BYTES_PER_WEIGHT), "float32")


PROCESS, GROUPS = Path("proc"), Path("sys/fs/cgroup")


def peak_bytes(device: str) -> int:
    """Return the peak memory of this process so far; on cuda, what torch allocated on the GPU at most."""
    if device == "cuda":
        return int(package("torch", "transformers").cuda.max_memory_allocated())
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux, ru_maxrss starts at the memory of the process that started this one.
    peak = _kilobytes(Path("/proc/self/status"), "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process can still take: of the machine, and of its control groups.

    root: where proc and sys are mounted

    Returns None on systems that do not say.
    """
    machine = _kilobytes(root / PROCESS / "meminfo", "MemAvailable")
    limits = [*_left_in_groups(root), *([] if machine is None else [machine])]
    return max(0, min(limits)) if limits else None


def _left_in_groups(root: Path) -> list[int]:
    """Return what is left of the limit of each control group (version 2) that this process is in."""
    result = []
    for line in (_read(root / PROCESS / "self/cgroup") or "").splitlines():
        _, _, path = line.partition("::")
        # In a container, the path may be one of the host, which is not mounted there: its own group is then the root.
        group = Path(path.strip("/"))
        for folder in (root / GROUPS / ancestor for ancestor in (group, *group.parents)):
            most, used = _read(folder / "memory.max"), _read(folder / "memory.current")
            if most is None or used is None or not (most.strip().isdigit() and used.strip().isdigit()):
                continue  # "max" is no limit
            rows = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
            reclaimable = sum(int(row[1]) for row in rows if row[:1] == ["inactive_file"])
            result.append(int(most) - int(used) + reclaimable)
    return result


def _kilobytes(file: Path, name: str) -> int | None:
    """Return the bytes of a line such as "MemAvailable:  123 kB"; None if there is none."""
    rows = (line.split() for line in (_read(file) or "").splitlines())
    return next((int(row[1]) * 1024 for row in rows if len(row) > 1 and row[0] == f"{name}:"), None)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
