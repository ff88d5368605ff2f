"""Where the time of quantize and of a BF16 export goes: wall and CPU seconds of each phase, summed over the threads.

    python benchmarks/phases.py --size 4GB --largest 1GB

Each command runs in a process of its own, in which the functions below are wrapped, with one thread and with all. The
rest of the CPU seconds is start-up, scheduling, and Python between them. Wall seconds above CPU seconds are waiting:
for the disk, or for a core. Of the main thread there is one, whatever the number of threads: what it does is the serial
share. Start-up, which does not grow with the model, is what the same command takes for a checkpoint of a few megabytes;
the share is that of the rest. By Amdahl is the share that the times of one and of more threads imply.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import (
    PQWEIGHTS,
    Cell,
    Document,
    argument_parser,
    machine,
    make_source,
    now,
    publish,
    read_all,
    table,
    usable_cores,
)

SMALL = "8MB"  # the checkpoint that shows start-up
# phase -> module, class (or none), functions
PHASES = {
    "read the source": ("pqweights.checkpoint.file_reader", "OpenFile", ("read_into",)),
    "encode": ("pqweights.kernels.cpu", None, ("encode",)),
    "decode": ("pqweights.kernels.cpu", None, ("decode",)),
    "hash": ("pqweights.checkpoint.digests", "PieceHasher", ("add",)),
    "sums of errors": ("pqweights.convert.jobs", "EncodeJob", ("collect",)),
    "write to the disk": ("pqweights.checkpoint.shard_file", "ShardFile", ("_write_at", "finish")),
}


def wrap(owner: Any, name: str, add: Callable[[float, float], None]) -> None:
    """Replace a function by one that measures it."""
    function = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            add(time.perf_counter() - wall, time.thread_time() - cpu)

    setattr(owner, name, timed)


def profiled(arguments: list[str]) -> dict[str, Any]:
    """Run one command in this process; its seconds, and those of every phase."""
    totals = {phase: [0, 0.0, 0.0] for phase in PHASES}
    lock = threading.Lock()

    def adder(phase: str) -> Callable[[float, float], None]:
        def add(wall: float, cpu: float) -> None:
            with lock:
                totals[phase] = [a + b for a, b in zip(totals[phase], (1, wall, cpu), strict=True)]

        return add

    start = time.perf_counter()
    for phase, (module, owner, names) in PHASES.items():
        loaded = importlib.import_module(module)
        for name in names:
            wrap(getattr(loaded, owner) if owner else loaded, name, adder(phase))
    from pqweights_cli.main import app

    started = time.thread_time()
    app(arguments, standalone_mode=False)
    seconds, times = time.perf_counter() - start, os.times()
    main_thread = time.thread_time() - started
    return {
        "seconds": seconds,
        "cpu_seconds": times.user + times.system,
        "main_thread_cpu_seconds": main_thread,
        "phases": totals,
    }


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    settings = document["settings"]
    note = f"{settings['size']} checkpoint, largest tensor {settings['largest']}, 5 bits"
    phases = table(["command", "phase", "calls", "wall", "CPU"], _phase_lines(document["rows"]))
    return {
        "phases": f"{note}; seconds summed over the threads.\n\n{phases}",
        "amdahl": f"{note}; the run of median time of {settings['rounds']}.\n\n{_serial_table(document['rows'])}",
    }


def _phase_lines(rows: list[Document]) -> list[list[Cell]]:
    """The phases of each command with the most threads."""
    most, lines = max(row["threads"] for row in rows), []
    for row in (row for row in rows if row["threads"] == most):
        label = f"{row['command']}: {row['seconds']:.2f} s"
        for phase, (calls, wall, cpu) in row["phases"].items():
            if calls:
                lines.append([label, phase, calls, f"{wall:.2f}", f"{cpu:.2f}"])
        rest = row["cpu_seconds"] - sum(cpu for _, _, cpu in row["phases"].values())
        lines.append([label, "the rest", None, None, f"{rest:.2f}"])
    return lines


def _serial_table(rows: list[Document]) -> str:
    """The CPU seconds of the main thread, and how the time falls with the number of the others."""
    header = ["command", "threads", "seconds", "CPU", "start-up", "main thread", "serial share", "by Amdahl"]
    alone = {row["command"]: row["seconds"] for row in rows if row["threads"] == 1}
    lines = []
    for row in rows:
        threads, start, whole = row["threads"], row["start_up"], alone.get(row["command"])
        main, cpu = (row[key] - start[key] for key in ("main_thread_cpu_seconds", "cpu_seconds"))
        by_amdahl = None
        if threads > 1 and whole is not None:
            by_amdahl = f"{(threads * row['seconds'] / whole - 1) / (threads - 1):.0%}"
        shown = (row["seconds"], row["cpu_seconds"], start["cpu_seconds"], main)
        cells = [f"{seconds:.2f}" for seconds in shown]
        lines.append([row["command"], threads, *cells, f"{main / cpu:.1%}", by_amdahl])
    return table(header, lines)


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(profiled(sys.argv[2:])), file=sys.stderr)
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made; by default a temporary folder")
    parser.add_argument("--size", default="4GB")
    parser.add_argument("--largest", default="1GB")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, usable_cores()}))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    start = now()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        large = make_commands(Path(work) / "large", options.size, options.largest)
        small = make_commands(Path(work) / "small", SMALL, SMALL)
        runs: dict[tuple[str, int], list[Document]] = {}
        starts: dict[tuple[str, int], list[Document]] = {}
        for _ in range(options.rounds):
            for name in large:
                for threads in options.threads:
                    runs.setdefault((name, threads), []).append(run_profiled(large[name], threads))
                    starts.setdefault((name, threads), []).append(run_profiled(small[name], threads))
    rows = [
        {"command": name, "threads": threads, **median(runs[name, threads]), "start_up": median(starts[name, threads])}
        for name, threads in runs
    ]
    settings = {"size": options.size, "largest": options.largest, "rounds": options.rounds}
    document = {"machine": machine(start), "settings": settings, "rows": rows}
    publish("phases", document, sections(document), options, ("q5",))


def make_commands(work: Path, size: str, largest: str) -> dict[str, list[str]]:
    """Make a checkpoint and its master, and return the commands that are measured, into OUT in the same folder."""
    work.mkdir()
    source, master, out = (str(work / name) for name in ("source", "master", "out"))
    make_source(Path(source), size, largest)
    subprocess.run([*PQWEIGHTS, "quantize", source, master], check=True, capture_output=True)
    return {"quantize": ["quantize", source, out], "export": ["export", master, out, "--target", "bf16"]}


def median(runs: list[Document]) -> Document:
    """The run of median time."""
    return sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]


def run_profiled(arguments: list[str], threads: int) -> Document:
    """Run one command in a process of its own, the page cache warm and nothing else to be written."""
    _, source, out, *_ = arguments
    read_all(Path(source))
    subprocess.run(["rm", "-rf", out], check=True)
    subprocess.run(["sync"], check=True)
    command = [sys.executable, __file__, "--inside", *arguments, "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stderr.splitlines()[-1]))


if __name__ == "__main__":
    main()
