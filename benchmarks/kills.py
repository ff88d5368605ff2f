"""Kill quantize with SIGKILL at random moments, start it again, and compare every byte with an undisturbed run.

    python benchmarks/kills.py                  20 runs, each killed once and continued to the end
    python benchmarks/kills.py --in-a-row       one run, killed 20 times before it may finish

Moments are random but seeded. A restart may read the source bytes of the tensors that the journal did not list as
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

from harness import PQWEIGHTS, SYNTHETIC

JOURNAL = ".pqweights/journal.jsonl"


@dataclass(frozen=True)
class Undisturbed:
    """A run that is not killed.

    start_seconds: until the journal is there.
    digests: sha256 of every file of the result.
    bytes_read: source bytes that were read.
    tensor_bytes: bytes of each tensor in the source.
    shard_bytes: source bytes of the largest output shard.
    """

    seconds: float
    start_seconds: float
    digests: dict[str, str]
    bytes_read: int
    tensor_bytes: dict[str, int]
    shard_bytes: int


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file, hidden ones included."""
    result = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as stream:
                result[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return result


def finished_tensors(out: Path) -> set[str]:
    """The tensors that the journal of a killed run lists as finished."""
    journal = out / JOURNAL
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    return {json.loads(line)["name"] for line in lines}


def start(command: list[str], out: Path, report: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start the command. Its output goes nowhere by default: nobody would read the pipe of a killed process."""
    return subprocess.Popen([*command, str(out)], stdout=report, text=True)


def wait_for_journal(process: subprocess.Popen[str], out: Path, more_than_bytes: int = 0) -> None:
    """Wait until the journal is larger than that, or the process has ended."""
    while process.poll() is None and journal_bytes(out) <= more_than_bytes:
        time.sleep(0.002)


def journal_bytes(out: Path) -> int:
    """The size of the journal; 0 if there is none."""
    try:
        return (out / JOURNAL).stat().st_size
    except FileNotFoundError:
        return 0


def run_to_the_end(command: list[str], out: Path) -> dict:
    """Run the command and return its --json report."""
    process = start(command, out, subprocess.PIPE)
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"error: quantize exited with {process.returncode}")
    return json.loads(text)


def undisturbed_run(command: list[str], out: Path) -> Undisturbed:
    """Run the command to the end, and measure."""
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


def row(whole: Undisturbed, out: Path, *, moment: float, finished: set[str], report: dict) -> dict:
    """What a kill cost, and whether the result is the same.

    Bytes redone are those that were read after the kill beyond what was missing.
    """
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


@dataclass(frozen=True, kw_only=True)
class Kills:
    """How often the command is killed, and where it writes."""

    command: list[str]
    folder: Path
    count: int
    chance: random.Random


def killed_once(kills: Kills, whole: Undisturbed) -> list[dict]:
    """Separate runs, each killed once and continued to the end."""
    rows = []
    for number in range(kills.count):
        out = kills.folder / f"killed-{number}"
        while True:
            moment = kills.chance.uniform(0, whole.seconds)
            process = start(kills.command, out)
            time.sleep(moment)
            too_late = process.poll() is not None  # it was faster than the undisturbed run: draw again
            process.kill()
            process.wait()
            if not too_late:
                break
            shutil.rmtree(out)
        finished = finished_tensors(out)
        rows.append(row(whole, out, moment=moment, finished=finished, report=run_to_the_end(kills.command, out)))
        shutil.rmtree(out)
    return rows


def killed_in_a_row(kills: Kills, whole: Undisturbed) -> list[dict]:
    """One run, killed again and again; the time between two kills is too short to finish before the last of them."""
    command, out, rows = kills.command, kills.folder / "killed", []
    share = (whole.seconds - whole.start_seconds) / kills.count / 2
    first_line = 0
    for _ in range(kills.count):
        before = journal_bytes(out)
        process = start(command, out)
        if not before:
            wait_for_journal(process, out)
            first_line = journal_bytes(out)
        wait_for_journal(process, out, max(before, first_line))
        moment = kills.chance.uniform(0, share)
        time.sleep(moment)
        process.kill()
        process.wait()
        rows.append({"moment_seconds": moment, "finished_tensors": len(finished_tensors(out))})
        if (out / "pqweights.json").exists():
            break
    finished = finished_tensors(out)
    report = run_to_the_end(command, out)
    rows[-1] = row(whole, out, moment=rows[-1]["moment_seconds"], finished=finished, report=report)
    return rows


def as_json(whole: Undisturbed, rows: list[dict]) -> str:
    """The document of --json."""
    document = {
        "seconds": whole.seconds,
        "start_seconds": whole.start_seconds,
        "source_bytes_read": whole.bytes_read,
        "largest_shard_source_bytes": whole.shard_bytes,
        "tensors": len(whole.tensor_bytes),
        "kills": rows,
    }
    return json.dumps(document, indent=2)


def as_text(whole: Undisturbed, rows: list[dict]) -> str:
    """The table."""
    lines = [
        f"undisturbed: {whole.seconds:.2f} s ({whole.start_seconds:.2f} s until work starts), "
        f"{len(whole.tensor_bytes)} tensors, {whole.bytes_read} source bytes read, at most {whole.shard_bytes} of them "
        "for one output shard",
        "    moment  finished     read after  missing before      redone  in bound  identical",
    ]
    for entry in rows:
        line = f"{entry['moment_seconds']:8.2f} s  {entry['finished_tensors']:8}"
        if "identical" in entry:
            line += (
                f"  {entry['source_bytes_read']:13}  {entry['missing_bytes']:14}  {entry['bytes_redone']:10}"
                f"  {'yes' if entry['within_bound'] else 'NO':>8}  {'yes' if entry['identical'] else 'NO':>9}"
            )
        lines.append(line + ("  (had finished)" if entry.get("already_done") else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where everything is written; by default a temporary folder")
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--largest", default="128MB", help="size of the largest tensor")
    parser.add_argument("--max-shard-size", default="50MB", help="size of an output shard")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--in-a-row", action="store_true", help="kill one run again and again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder = Path(work)
        source = folder / "source"
        made = [str(source), "--total", options.size, "--largest", options.largest, "--shard", "300MB"]
        subprocess.run([*SYNTHETIC, *made], check=True, stdout=sys.stderr)
        command = [*PQWEIGHTS, "quantize", str(source), "--json", "--max-shard-size", options.max_shard_size]
        run_to_the_end(command, folder / "warm-up")  # compiles, and brings the source into the page cache
        shutil.rmtree(folder / "warm-up")
        whole = undisturbed_run(command, folder / "undisturbed")
        kills = Kills(command=command, folder=folder, count=options.kills, chance=random.Random(options.seed))
        rows = (killed_in_a_row if options.in_a_row else killed_once)(kills, whole)
    print(as_json(whole, rows) if options.json else as_text(whole, rows))
    if not all(entry.get("identical", True) and entry.get("within_bound", True) for entry in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
