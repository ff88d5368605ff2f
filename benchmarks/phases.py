"""Where the time of quantize and of a BF16 export goes: wall and CPU seconds of each phase, summed over the threads.

    python benchmarks/phases.py --size 4GB --largest 1GB

Each command runs once in a process of its own, in which the functions below are wrapped. The rest of the CPU seconds is
start-up, scheduling, and Python between them. Wall seconds above CPU seconds are waiting: for the disk, for a turn to
write to a file, or for a core.
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

from harness import PQWEIGHTS, Document, argument_parser, machine, make_source, now, publish, read_all, table

# phase -> module, class (or none), functions
PHASES = {
    "read the source": ("pqweights.checkpoint.storage", "LocalStorage", ("read_into",)),
    "encode": ("pqweights.kernels.cpu", None, ("encode",)),
    "decode": ("pqweights.kernels.cpu", None, ("decode",)),
    "write to the page cache": ("pqweights.checkpoint.writer", "ShardWriter", ("write",)),
    "flush to the disk": ("pqweights.checkpoint.writer", "ShardWriter", ("flush", "finish")),
    "sha256 and sums, encoded": ("pqweights.rewrite.encode_job", "EncodeJob", ("collect",)),
    "sha256, copied or decoded": ("pqweights.rewrite.jobs", "CopyJob", ("collect",)),
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
    found = {phase: [0, 0.0, 0.0] for phase in PHASES}
    lock = threading.Lock()

    def adder(phase: str) -> Callable[[float, float], None]:
        def add(wall: float, cpu: float) -> None:
            with lock:
                found[phase] = [a + b for a, b in zip(found[phase], (1, wall, cpu), strict=True)]

        return add

    start = time.perf_counter()
    for phase, (module, owner, names) in PHASES.items():
        loaded = importlib.import_module(module)
        for name in names:
            wrap(getattr(loaded, owner) if owner else loaded, name, adder(phase))
    from pqweights_cli.main import app

    app(arguments, standalone_mode=False)
    seconds, times = time.perf_counter() - start, os.times()
    return {"seconds": seconds, "cpu_seconds": times.user + times.system, "phases": found}


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    rows = []
    for row in document["rows"]:
        label = f"{row['command']}: {row['seconds']:.2f} s"
        for phase, (calls, wall, cpu) in row["phases"].items():
            if calls:
                rows.append([label, phase, calls, f"{wall:.2f}", f"{cpu:.2f}"])
        rest = row["cpu_seconds"] - sum(cpu for _, _, cpu in row["phases"].values())
        rows.append([label, "the rest", None, None, f"{rest:.2f}"])
    settings = document["settings"]
    note = (
        f"{settings['size']} checkpoint, largest tensor {settings['largest']}, 5 bits; seconds summed over the threads."
    )
    return {"phases": f"{note}\n\n{table(['command', 'phase', 'calls', 'wall', 'CPU'], rows)}"}


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(profiled(sys.argv[2:])), file=sys.stderr)
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made; by default a temporary folder")
    parser.add_argument("--size", default="4GB")
    parser.add_argument("--largest", default="1GB")
    options = parser.parse_args()
    start, rows = now(), []
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source, master, out = (str(Path(work) / name) for name in ("source", "master", "out"))
        make_source(Path(source), options.size, options.largest)
        subprocess.run([*PQWEIGHTS, "quantize", source, master], check=True, capture_output=True)  # also compiles
        commands = {
            "quantize": ["quantize", source, out],
            "export": ["export", master, out, "--target", "bf16"],
        }
        for name, arguments in commands.items():
            read_all(Path(arguments[1]))
            subprocess.run(["rm", "-rf", out], check=True)
            subprocess.run(["sync"], check=True)
            done = subprocess.run(
                [sys.executable, __file__, "--inside", *arguments], check=True, capture_output=True, text=True
            )
            rows.append({"command": name, **json.loads(done.stderr.splitlines()[-1])})
    settings = {"size": options.size, "largest": options.largest}
    document = {"machine": machine(start), "settings": settings, "rows": rows}
    publish("phases", document, sections(document), options.out)


if __name__ == "__main__":
    main()
