"""The memory of this process and of the machine."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from pqweights.inference.runtimes.packages import package

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
