"""Wall time of quantize and of a BF16 export beside `cp -r` of the same checkpoint, on one disk, in one run.

    python benchmarks/copying.py --size 2GB

All of the source is read once beforehand, so that it comes from the page cache; every command is timed until a `sync`
after it returns. The three take turns, and the medians count. The export reads the master and writes as much as `cp`.
The rates are of the source's bytes. (Not called copy.py: scripts in this folder would import it instead of Python's.)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PQWEIGHTS = [sys.executable, "-c", "from pqweights_cli.main import main; main()"]
SYNTHETIC = [sys.executable, str(Path(__file__).with_name("synthetic.py"))]


def warm(folder: Path) -> int:
    """Read every file once; how many bytes there are."""
    total = 0
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as stream:
            while data := stream.read(1 << 22):
                total += len(data)
    return total


def timed(command: list[str], out: Path) -> float:
    """Seconds from the start of a command to the end of a sync; its output is removed."""
    subprocess.run(["sync"], check=True)
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["sync"], check=True)
    seconds = time.monotonic() - start
    shutil.rmtree(out)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where everything is written; by default a temporary folder")
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--largest", default="256MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source, master, out = (Path(work) / name for name in ("source", "master", "out"))
        made = [str(source), "--total", options.size, "--largest", options.largest]
        subprocess.run([*SYNTHETIC, *made], check=True, stdout=sys.stderr)
        subprocess.run([*PQWEIGHTS, "quantize", str(source), str(master)], check=True, stdout=subprocess.DEVNULL)
        commands = {
            "cp": ["cp", "-r", "--reflink=never", str(source), str(out)],
            "quantize": [*PQWEIGHTS, "quantize", str(source), str(out)],
            "export": [*PQWEIGHTS, "export", str(master), str(out), "--target", "bf16"],
        }
        source_bytes, _ = warm(source), warm(master)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                seconds[name].append(timed(command, out))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        {
            "command": name,
            "seconds": seconds[name],
            "median_seconds": median[name],
            "gigabytes_per_second": source_bytes / median[name] / 1e9,
            "ratio_to_cp": median[name] / median["cp"],
        }
        for name in commands
    ]
    cores = len(os.sched_getaffinity(0))
    if options.json:
        print(json.dumps({"source_bytes": source_bytes, "cores": cores, "runs": rows}, indent=2))
        return
    print(f"{source_bytes / 1e9:.2f} GB, {cores} cores, median of {options.rounds}, page cache warm, through sync")
    print(f"{'command':<8}  {'seconds':>8}  {'GB/s':>6}  {'of cp':>6}  all")
    for row in rows:
        print(
            f"{row['command']:<8}  {row['median_seconds']:8.2f}  {row['gigabytes_per_second']:6.2f}  "
            f"{row['ratio_to_cp']:6.2f}  {' '.join(f'{value:.2f}' for value in row['seconds'])}"
        )


if __name__ == "__main__":
    main()
