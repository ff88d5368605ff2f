"""Kill -9 quantize at random moments, start it again, and compare every output byte with an undisturbed run.

    python benchmarks/kills.py                  20 runs, each killed once and continued to the end
    python benchmarks/kills.py --in-a-row       one run, killed 20 times before it may finish

Moments are random but seeded. A restart may read all source bytes but those of the tensors that the journal called
finished, plus one output shard's worth; the table shows what it did read (`source_bytes_read` of --json). With
--in-a-row that holds for the last start, and a moment counts from the first tensor that its start finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PQWEIGHTS = [sys.executable, "-c", "from pqweights_cli.main import main; main()"]
SYNTHETIC = [sys.executable, str(Path(__file__).with_name("synthetic.py"))]
JOURNAL = ".pqweights/journal.jsonl"


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nobody kills gives and costs. start_seconds: until the journal stands."""

    seconds: float
    start_seconds: float
    digests: dict[str, str]
    bytes_read: int
    tensor_bytes: dict[str, int]
    shard_bytes: int


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file, hidden ones too."""
    result = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as stream:
                result[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return result


def finished_tensors(out: Path) -> set[str]:
    """What the journal of a killed run calls finished."""
    journal = out / JOURNAL
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    return {json.loads(line)["name"] for line in lines}


def start(command: list[str], out: Path, report: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """The command on its way; nobody reads a pipe of one that is about to be killed, so it gets none."""
    return subprocess.Popen([*command[:-1], str(out), *command[-1].split()], stdout=report, text=True)


def wait_for_journal(process: subprocess.Popen[str], out: Path, more_than_bytes: int = 0) -> None:
    """Until the journal stands and is larger than that, or the process ended."""
    while process.poll() is None and journal_bytes(out) <= more_than_bytes:
        time.sleep(0.002)


def journal_bytes(out: Path) -> int:
    """0 where there is none."""
    try:
        return (out / JOURNAL).stat().st_size
    except FileNotFoundError:
        return 0


def run_to_the_end(command: list[str], out: Path) -> dict:
    """The --json report."""
    process = start(command, out, subprocess.PIPE)
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"error: quantize exited with {process.returncode}")
    return json.loads(text)


def undisturbed_run(command: list[str], out: Path) -> Undisturbed:
    begin = time.monotonic()
    process = start(command, out, subprocess.PIPE)
    wait_for_journal(process, out)
    start_seconds = time.monotonic() - begin
    report = json.loads(process.communicate()[0])
    seconds = time.monotonic() - begin
    tensor_bytes = {}
    for tensor in report["tensors"]:
        count = 2  # everything in the synthetic checkpoint is BF16
        for size in tensor["shape"]:
            count *= size
        tensor_bytes[tensor["name"]] = count
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    per_shard: dict[str, int] = {}
    for name, count in tensor_bytes.items():
        file = weight_map.get(name) or weight_map[name + "_codes"]
        per_shard[file] = per_shard.get(file, 0) + count
    return Undisturbed(
        seconds, start_seconds, digests(out), report["source_bytes_read"], tensor_bytes, max(per_shard.values())
    )


def row(whole: Undisturbed, moment: float, finished: set[str], report: dict, out: Path) -> dict:
    """What a kill cost, and whether the result is the same. Bytes redone: read after it beyond what was missing."""
    missing = whole.bytes_read - sum(whole.tensor_bytes[name] for name in finished)
    read = report["source_bytes_read"]
    return {
        "moment_seconds": moment,
        "finished_tensors": len(finished),
        "resumed_tensors": report["resumed_tensors"],
        "already_done": report["already_done"],
        "source_bytes_read": read,
        "missing_bytes": missing,
        "bytes_redone": 0 if report["already_done"] else max(0, read - missing),
        "within_bound": report["already_done"] or read <= missing + whole.shard_bytes,
        "identical": digests(out) == whole.digests,
    }


def killed_once(command: list[str], folder: Path, whole: Undisturbed, kills: int, chance: random.Random) -> list[dict]:
    rows = []
    for number in range(kills):
        out = folder / f"killed-{number}"
        while True:
            moment = chance.uniform(0, whole.seconds)
            process = start(command, out)
            time.sleep(moment)
            too_late = process.poll() is not None  # it was faster than the undisturbed run: draw again
            process.kill()
            process.wait()
            if not too_late:
                break
            shutil.rmtree(out)
        finished = finished_tensors(out)
        rows.append(row(whole, moment, finished, run_to_the_end(command, out), out))
        shutil.rmtree(out)
    return rows


def killed_in_a_row(
    command: list[str], folder: Path, whole: Undisturbed, kills: int, chance: random.Random
) -> list[dict]:
    """The work between two kills is so little that the run is seldom done before the last of them."""
    out, rows = folder / "killed", []
    share = (whole.seconds - whole.start_seconds) / kills / 2
    first_line = 0
    for _ in range(kills):
        before = journal_bytes(out)
        process = start(command, out)
        if not before:
            wait_for_journal(process, out)
            first_line = journal_bytes(out)
        wait_for_journal(process, out, max(before, first_line))
        moment = chance.uniform(0, share)
        time.sleep(moment)
        process.kill()
        process.wait()
        rows.append({"moment_seconds": moment, "finished_tensors": len(finished_tensors(out))})
        if (out / "pqweights.json").exists():
            break
    finished = finished_tensors(out)
    rows[-1] = row(whole, rows[-1]["moment_seconds"], finished, run_to_the_end(command, out), out)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where everything is written; by default a temporary folder")
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--largest", default="128MB")
    parser.add_argument("--max-shard-size", default="50MB", help="of the output; a sixteenth of the result or so")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--in-a-row", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder = Path(work)
        source = folder / "source"
        made = [str(source), "--total", options.size, "--largest", options.largest, "--shard", "300MB"]
        subprocess.run([*SYNTHETIC, *made], check=True, stdout=sys.stderr)
        command = [*PQWEIGHTS, "quantize", str(source), f"--json --max-shard-size {options.max_shard_size}"]
        run_to_the_end(command, folder / "warm-up")  # compiles, and brings the source into the page cache
        shutil.rmtree(folder / "warm-up")
        whole = undisturbed_run(command, folder / "undisturbed")
        kill = killed_in_a_row if options.in_a_row else killed_once
        rows = kill(command, folder, whole, options.kills, random.Random(options.seed))
    if options.json:
        print(
            json.dumps(
                {
                    "seconds": whole.seconds,
                    "start_seconds": whole.start_seconds,
                    "source_bytes_read": whole.bytes_read,
                    "largest_shard_source_bytes": whole.shard_bytes,
                    "tensors": len(whole.tensor_bytes),
                    "kills": rows,
                },
                indent=2,
            )
        )
    else:
        print(
            f"undisturbed: {whole.seconds:.2f} s ({whole.start_seconds:.2f} s until work starts), {len(whole.tensor_bytes)} "
            f"tensors, {whole.bytes_read} source bytes read, at most {whole.shard_bytes} of them for one output shard"
        )
        print("    moment  finished     read after  missing before      redone  in bound  identical")
        for entry in rows:
            line = f"{entry['moment_seconds']:8.2f} s  {entry['finished_tensors']:8}"
            if "identical" in entry:
                line += (
                    f"  {entry['source_bytes_read']:13}  {entry['missing_bytes']:14}  {entry['bytes_redone']:10}"
                    f"  {'yes' if entry['within_bound'] else 'NO':>8}  {'yes' if entry['identical'] else 'NO':>9}"
                )
            print(line + ("  (had finished)" if entry.get("already_done") else ""))
    if not all(entry.get("identical", True) and entry.get("within_bound", True) for entry in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
