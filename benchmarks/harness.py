"""What the benchmarks share: describing the machine, timing a command, Markdown tables, and JSON documents.

This module imports the standard library only, on purpose: Linux carries the memory of the process that starts a command
over into the command's own ru_maxrss, so a script that measures peaks must stay small.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import mmap
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PQWEIGHTS = [sys.executable, "-m", "pqweights_cli"]
SYNTHETIC = [sys.executable, str(Path(__file__).with_name("synthetic.py"))]

# With it, every command would compile the modules that it imports anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

Document = dict[str, Any]  # what one benchmark writes: machine, settings, rows
Cell = str | int | float | None


@dataclass(frozen=True)
class Run:
    """One run of one command.

    seconds: wall time until the `sync` after the command returned.
    exit_seconds: wall time until the command returned.
    user_seconds, system_seconds: CPU time over all threads.
    peak_bytes: peak resident memory of the process.
    written_bytes: size of the files that it wrote.
    """

    seconds: float
    exit_seconds: float
    user_seconds: float
    system_seconds: float
    peak_bytes: int
    written_bytes: int = 0


def run_command(
    command: Sequence[str], inputs: Sequence[Path] = (), out: Path | None = None, *, cold: bool = False
) -> Run:
    """Run a command, `sync`, and delete what it wrote.

    inputs: what is read into the page cache before
    cold: empty the page cache instead, which only root may do
    """
    if cold:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("1")
    else:
        for folder in inputs:
            read_all(folder)
    subprocess.run(["sync"], check=True)
    with tempfile.TemporaryFile() as messages:  # progress, shown only if the command fails
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=messages)
        _, status, usage = os.wait4(process.pid, 0)
        exit_seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            messages.seek(0)
            said = messages.read().decode(errors="replace")
            raise SystemExit(f"error: {' '.join(command)} exited with {process.returncode}\n{said}")
    subprocess.run(["sync"], check=True)
    seconds = time.monotonic() - start
    written_bytes = 0
    if out is not None:
        written_bytes = folder_bytes(out)
        shutil.rmtree(out)
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Run(seconds, exit_seconds, usage.ru_utime, usage.ru_stime, peak_bytes, written_bytes)


def memory() -> dict[str, int]:
    """The memory of this process in bytes, as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    return {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"(Rss\w+|Vm\w+):\s+(\d+) kB", text)}


def silence_torchao() -> None:
    """Without torchao's remarks on what is not installed, which it makes when transformers is imported."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def folder_bytes(folder: Path) -> int:
    """The size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def usable_cores() -> int:
    """The number of cores that this process may use; macOS has no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


DISK_BLOCK = 1 << 22


def disk_rates(folder: Path | None, total: int = 2_000_000_000) -> dict[str, float] | None:
    """Bytes per second that the disk of a folder writes and reads with direct access, a request at a time.

    None if the file system has no direct access.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    memory = mmap.mmap(-1, DISK_BLOCK)
    memory[:] = os.urandom(DISK_BLOCK)  # a host might not store zeros
    with tempfile.TemporaryDirectory(dir=folder) as work:
        path = os.path.join(work, "file")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, total)
            start = time.monotonic()
            for offset in range(0, total // DISK_BLOCK * DISK_BLOCK, DISK_BLOCK):
                os.pwrite(descriptor, memory, offset)
            os.fsync(descriptor)
            written = time.monotonic()
            for offset in range(0, total // DISK_BLOCK * DISK_BLOCK, DISK_BLOCK):
                os.preadv(descriptor, [memory], offset)
            return {"write": total / (written - start), "read": total / (time.monotonic() - written)}
        finally:
            os.close(descriptor)


def read_all(folder: Path) -> None:
    """Read every file of a folder once."""
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as stream:
            while stream.read(1 << 22):
                pass


def make_source(folder: Path, total: str, largest: str, *arguments: str) -> int:
    """Make a synthetic checkpoint and return the size of its tensors in bytes."""
    command = [*SYNTHETIC, str(folder), "--total", total, "--largest", largest, "--json", *arguments]
    made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return int(made["bytes"])


def median_of(runs: Sequence[Run], field: str) -> float:
    """The median of one of the fields of Run."""
    return statistics.median(getattr(run, field) for run in runs)


def version(package: str) -> str | None:
    """The version of an installed distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Moment:
    """A point in time.

    other_cpu_seconds: CPU time that the machine has spent since it started, outside of this process and its children.
    """

    seconds: float
    other_cpu_seconds: float | None


def now() -> Moment:
    """The present moment. CPU time is the sum of the first eight fields of /proc/stat, less idle and I/O wait."""
    seconds = time.monotonic()
    if not Path("/proc/stat").exists():
        return Moment(seconds, None)
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    everything = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return Moment(seconds, everything - sum(os.times()[:4]))


def machine(start: Moment) -> dict[str, Any]:
    """The CPU, the versions, and how busy other processes have kept the machine since `start`; no host name."""
    end, others = now(), None
    if start.other_cpu_seconds is not None and end.other_cpu_seconds is not None:
        others = (end.other_cpu_seconds - start.other_cpu_seconds) / (end.seconds - start.seconds)
    model, flags = platform.processor() or platform.machine(), ""
    if Path("/proc/cpuinfo").exists():
        lines = dict(
            line.replace("\t", "").split(":", 1)
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if ":" in line
        )
        model, flags = lines.get("model name", model).strip(), lines.get("flags", "")
    return {
        "cpu": model,
        "vectors": next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), None),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "cores_busy_elsewhere": others,
        "versions": {name: version(name) for name in ("pqweights", "numpy", "torch")},
    }


def processor(machine: Document) -> str:
    """What a machine computes with."""
    return f"{machine['cpu']}{'' if machine['vectors'] is None else ' with ' + machine['vectors']}"


def machine_line(document: Document) -> str:
    """The machine that a document was measured on, in one or two sentences."""
    it = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in it["versions"].items() if version)
    others = it["cores_busy_elsewhere"]
    busy = "" if others is None else f" Other processes and the kernel kept {max(0.0, others):.2f} cores busy."
    return (
        f"{processor(it)}, {it['cores']} cores, {it['memory_bytes'] / 1e9:.0f} GB of memory, {it['system']}; "
        f"Python {it['python']}, {versions}.{busy}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table; None is shown as a dash."""
    lines = [
        list(header),
        ["---"] * len(header),
        *(["-" if cell is None else str(cell) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gigabytes(count: int) -> str:
    """A size in GB (10**9 bytes) or MB."""
    return f"{count / 1e9:.3g} GB" if count >= 10**9 else f"{count / 1e6:.3g} MB"


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with --out, which every benchmark has."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the JSON document; by default, only print the tables")
    return parser


MEASURED_WITH, STALE, RATES = "measured_with", "stale", "earlier_rates"


def measured_with(codecs: Iterable[str]) -> Document:
    """What a document, or a row of it, states of what was measured: the digest of the bytes of each codec or format.

    Documents that keep rows of earlier runs state it in each row. codecs: keys of digests.CODECS
    """
    from digests import digest  # after whatever is timed; see above

    return {MEASURED_WITH: {name: digest(name) for name in codecs}}


def statements(value: Any) -> Iterator[tuple[str, str]]:
    """The codecs of a document and its rows, each with the digest that it was measured with."""
    if isinstance(value, dict):
        yield from value.get(MEASURED_WITH, {}).items()
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from statements(part)


def keep_rates(
    document: Document, earlier: Document, part: str, field: str, key: Callable[[Document], Hashable]
) -> None:
    """Give the rows of a part the rates of an earlier document, and state with what these were measured.

    For machines that are not quiet: errors do not depend on what else they do. Rates of a codec that makes other bytes
    now are left out. Without an earlier document nothing changes.
    """
    from digests import digest  # after whatever is timed; see above

    if part not in earlier:
        return
    about = {name: earlier[name] for name in ("machine", "settings")}
    about = earlier.get(RATES) or about | {MEASURED_WITH: dict(statements(earlier[part]))}
    present = {name: stated for name, stated in about[MEASURED_WITH].items() if stated == digest(name)}
    known = {key(row): row[field] for row in earlier[part]}
    for row in document[part]:
        kept = known.get(key(row), row[field])
        row[field] = kept if row[MEASURED_WITH].keys() <= present.keys() else dict.fromkeys(kept)
    document[RATES] = about | {MEASURED_WITH: present}


def stale_lines(document: Document) -> list[str]:
    """What a page says of figures that were measured with other bytes than those that codecs make now.

    STALE of a document has the codecs by the sentence that says so.
    """
    stale: dict[str, list[str]] = document.get(STALE, {})
    return [f"**Measured with an earlier version** of {', '.join(names)}: {why}" for why, names in stale.items()]


def publish(
    name: str,
    document: Document,
    sections: dict[str, str],
    options: argparse.Namespace,
    codecs: Iterable[str] | None,
) -> None:
    """Print the tables, and write OUT/NAME.json if there is an OUT.

    codecs: what was measured, as of `measured_with`; None if the rows state it
    """
    print(machine_line(document), *sections.values(), sep="\n\n", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        document = document if codecs is None else document | measured_with(codecs)
        (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
