"""Peak resident memory of quantize, export and verify beside an idle interpreter that imported pqweights, torch, numpy.

    python benchmarks/memory.py

Each command runs in a fresh process, whose ru_maxrss the kernel reports when it ends. A synthetic checkpoint of each
size is made first; the largest has one tensor of 1 GB. The last column divides by the same command's peak on the first
checkpoint: memory that does not grow with the model stays at 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# This process stays small on purpose and imports nothing of the project: Linux carries the memory of the process that
# started a command over into the command's own ru_maxrss.
PQWEIGHTS = [sys.executable, "-c", "from pqweights_cli.main import main; main()"]
IDLE = [sys.executable, "-c", "import pqweights, torch, numpy"]
SYNTHETIC = [sys.executable, str(Path(__file__).with_name("synthetic.py"))]


def peak_bytes(command: list[str]) -> int:
    """The largest resident memory of one process, from start to end."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: {command} exited with {process.returncode}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(folder: Path, total: str, largest: str, threads: list[str]) -> dict[str, int]:
    """Peaks of the three commands on one checkpoint."""
    source, master, exported = (folder / name for name in ("source", "master", "exported"))
    subprocess.run([*SYNTHETIC, str(source), "--total", total, "--largest", largest], check=True, stdout=sys.stderr)
    peaks = {
        "quantize": peak_bytes([*PQWEIGHTS, "quantize", str(source), str(master), *threads]),
        "verify": peak_bytes([*PQWEIGHTS, "verify", str(master), *threads]),
    }
    shutil.rmtree(source)
    peaks["export"] = peak_bytes([*PQWEIGHTS, "export", str(master), str(exported), "--target", "bf16", *threads])
    shutil.rmtree(folder)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made; by default a temporary folder")
    parser.add_argument("--sizes", nargs="+", default=["1GB", "4GB"])
    parser.add_argument("--largest", nargs="+", default=["256MB", "1GB"], help="largest tensor, one per size")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    threads = ["--threads", str(options.threads)] if options.threads else []
    idle = peak_bytes(IDLE)
    rows = []
    for size, largest in zip(options.sizes, options.largest, strict=True):
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            for command, peak in measure(Path(work) / "checkpoint", size, largest, threads).items():
                first = next((row["peak_bytes"] for row in rows if row["command"] == command), peak)
                rows.append(
                    {
                        "checkpoint": size,
                        "largest_tensor": largest,
                        "command": command,
                        "peak_bytes": peak,
                        "above_idle_bytes": peak - idle,
                        "ratio_to_first": peak / first,
                    }
                )
    if options.json:
        print(json.dumps({"idle_bytes": idle, "cores": len(os.sched_getaffinity(0)), "runs": rows}, indent=2))
        return
    print(f"idle (pqweights, torch, numpy imported): {idle / 1e6:.0f} MB; {len(os.sched_getaffinity(0))} cores")
    print(f"{'checkpoint':>10}  {'largest':>8}  {'command':<8}  {'peak MB':>8}  {'above idle':>10}  {'ratio':>6}")
    for row in rows:
        print(
            f"{row['checkpoint']:>10}  {row['largest_tensor']:>8}  {row['command']:<8}  {row['peak_bytes'] / 1e6:8.0f}  "
            f"{row['above_idle_bytes'] / 1e6:+10.0f}  {row['ratio_to_first']:6.2f}"
        )


if __name__ == "__main__":
    main()
