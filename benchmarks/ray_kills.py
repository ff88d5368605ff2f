"""Kill workers, nodes and commands of `quantize --ray` with SIGKILL at random moments, and compare every byte.

    python benchmarks/ray_kills.py --count 20

A cluster on this machine has a head without cores, and two nodes of one core (tests/support/ray_cluster.py). Each run
meets one kill: of the process of a task, of a node with all of its processes, or of the command, which is then given
again. Kinds take turns; which one is hit, and when, is random but seeded. The result is compared with that of the plain
command on one machine. Bytes that the tasks which ended read less than those of an undisturbed run are those of tensors
that a lost task had finished.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness import PQWEIGHTS, Document, argument_parser, machine, make_source, now, publish, table
from kills import digests, wait_for_journal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

if TYPE_CHECKING:
    from ray_cluster import RayCluster

KINDS = ("worker", "node", "command")
NODES = 2
TASK = "call"  # what the title of a process says that runs one of our tasks


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What is run.

    command: with its output folder left out
    seconds: how long an undisturbed run takes from its journal on
    bytes_read: source bytes that it reads
    expected: sha256 of every file of the result
    """

    cluster: RayCluster
    command: list[str]
    seconds: float
    bytes_read: int
    expected: dict[str, str]


def started(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, and wait until its journal is there."""
    process = subprocess.Popen([*command, str(out)], stdout=subprocess.PIPE, start_new_session=True)
    wait_for_journal(process, out)  # type: ignore[arg-type]
    return process


def report_of(process: subprocess.Popen[bytes]) -> dict:
    """Wait for the end of a command, and return its --json report."""
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"error: the command exited with {process.returncode}")
    return json.loads(said)


def kill(runs: Runs, kind: str, chance: random.Random, process: subprocess.Popen[bytes]) -> bool:
    """Kill one of a kind; False if there is none, because the run has ended or has not begun its tasks."""
    from ray_cluster import kill_process

    cluster = runs.cluster
    if process.poll() is not None:
        return False
    if kind == "command":
        process.kill()
        process.communicate()
        return True
    if kind == "node":
        cluster.kill(chance.choice(cluster.nodes))
        return True
    workers = [pid for node in cluster.nodes for pid in node.workers(TASK)]
    for pid in chance.sample(workers, min(1, len(workers))):
        kill_process(pid)
    return bool(workers)


def one_run(runs: Runs, number: int, chance: random.Random, out: Path) -> dict:
    """One run with a kill; a moment at which there is nothing to kill is drawn again."""
    kind = KINDS[number % len(KINDS)]
    while True:
        runs.cluster.restore(NODES)
        begin = time.monotonic()
        process = started(runs.command, out)
        moment = chance.uniform(0, runs.seconds)
        time.sleep(moment)
        if kill(runs, kind, chance, process):
            break
        process.communicate()
        shutil.rmtree(out)
    if kind == "command":
        process = started(runs.command, out)
    report = report_of(process)
    seconds = time.monotonic() - begin
    identical = digests(out) == runs.expected
    shutil.rmtree(out)
    return {
        "kind": kind,
        "moment_seconds": moment,
        "seconds": seconds,
        "resumed_tensors": report["resumed_tensors"],
        "bytes_not_redone": None if kind == "command" else runs.bytes_read - report["source_bytes_read"],
        "identical": identical,
    }


def sections(document: Document) -> dict[str, str]:
    """The table of kinds, in Markdown."""
    lines: list[list[str | int | None]] = []
    for kind in KINDS:
        rows = [row for row in document["rows"] if row["kind"] == kind]
        extra = sorted(row["seconds"] - document["undisturbed_seconds"] for row in rows)
        kept = [row["bytes_not_redone"] for row in rows if row["bytes_not_redone"] is not None]
        lines.append(
            [
                kind,
                len(rows),
                f"{sum(row['identical'] for row in rows)} of {len(rows)}",
                f"{extra[len(extra) // 2]:+.1f}" if extra else None,
                f"{extra[-1]:+.1f}" if extra else None,
                f"{max(kept) / 1e6:.0f} MB" if kept else None,
            ]
        )
    header = ["killed", "runs", "same bytes", "seconds more, median", "most", "most that a lost task had done"]
    return {"ray-kills": table(header, lines)}


def measure(folder: Path, count: int, size: str, recipe: str, seed: int) -> Document:
    """Kill that many runs."""
    from ray_cluster import running_cluster

    source, out, rows = folder / "source", folder / "out", []
    source_bytes = make_source(source, size, "16MB")
    options = ["--recipe", recipe, "--max-shard-size", f"{source_bytes // 60}"]
    quantize = [*PQWEIGHTS, "quantize", str(source)]
    plain = folder / "plain"
    subprocess.run([*quantize, str(plain), *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    chance = random.Random(seed)
    with running_cluster(NODES) as cluster:
        command = [*quantize, *options, "--threads", "1", "--json", "--ray", cluster.address]
        begin = time.monotonic()
        process = started(command, out)
        seconds = -time.monotonic()
        report = report_of(process)
        seconds += time.monotonic()
        undisturbed = time.monotonic() - begin
        expected = digests(plain)
        if digests(out) != expected:
            raise SystemExit("error: the result of an undisturbed run is another")
        shutil.rmtree(out)
        runs = Runs(
            cluster=cluster,
            command=command,
            seconds=seconds,
            bytes_read=report["source_bytes_read"],
            expected=expected,
        )
        for number in range(count):
            rows.append(one_run(runs, number, chance, out))
            print(rows[-1], file=sys.stderr, flush=True)
    return {"source_bytes": source_bytes, "undisturbed_seconds": undisturbed, "rows": rows}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--recipe", default="q5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; by default a temporary folder")
    options = parser.parse_args()
    start = now()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        measured = measure(Path(work), options.count, options.size, options.recipe, options.seed)
    settings = {"nodes": NODES, "cores": 1, "recipe": options.recipe, "seed": options.seed}
    document = {"machine": machine(start), "settings": settings, **measured}
    codec = "trellis" if options.recipe.startswith("t") else options.recipe
    publish("ray_kills", document, sections(document), options, (codec,))
    if not all(row["identical"] for row in document["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
