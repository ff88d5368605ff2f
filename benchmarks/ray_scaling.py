"""`quantize` on a cluster of this machine beside the plain command: the overhead of the engine, and what a byte costs.

    python benchmarks/ray_scaling.py --gigabytes 1 8

Page cache warm, until the command returned, medians; the commands take turns. The start of the engine is what it adds
to a checkpoint that is just large enough for a few tasks: a cluster is started, its node looked at, workers started and
pqweights imported in each, and the cluster ended.
Every result is compared with that of the plain command once, by the sha256 of all files. Commands on one core are
bound to it.
CPU seconds per byte are those of the plain command, less those of the small checkpoint, over the difference in bytes.
--costs measures them alone, and keeps the rest of the document in --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import paper_cluster
from harness import (
    PQWEIGHTS,
    Document,
    Run,
    argument_parser,
    folder_bytes,
    machine,
    machine_line,
    make_source,
    measured_with,
    median_of,
    now,
    publish,
    run_command,
    table,
)
from kills import digests

SMALL_COST = "4MB"
SCALAR, TRELLIS = "q5", "t4"
SMALL, SMALL_LARGEST = "200MB", "8MB"
# A result is about this part of its source.
RESULT_SHARE = 0.34
ONE_CORE = ("taskset", "-c", "0")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to run quantize.

    name: what it is called in the table
    beside: the mode that its overhead is measured against; None for a plain command
    options: added to the command
    prefix: put before the command
    """

    name: str
    beside: str | None
    options: tuple[str, ...]
    prefix: tuple[str, ...] = ()


PLAIN, PLAIN_ONE = "plain, 2 threads", "plain, 1 thread on 1 core"
MODES = (
    Mode(name=PLAIN, beside=None, options=("--threads", "2")),
    Mode(name="2 workers of 1 thread", beside=PLAIN, options=("--ray", "local", "--threads", "1")),
    Mode(name="1 worker of 2 threads", beside=PLAIN, options=("--ray", "local", "--threads", "2")),
    Mode(name=PLAIN_ONE, beside=None, options=("--threads", "1"), prefix=ONE_CORE),
    Mode(
        name="1 worker of 1 thread on 1 core",
        beside=PLAIN_ONE,
        options=("--ray", "local", "--threads", "1"),
        prefix=ONE_CORE,
    ),
)


def command(mode: Mode, source: Path, out: Path, shard: str, recipe: str = SCALAR) -> list[str]:
    """The command of a mode."""
    quantize = ["quantize", str(source), str(out), "--recipe", recipe, "--max-shard-size", shard]
    return [*mode.prefix, *PQWEIGHTS, *quantize, *mode.options]


def measure(folder: Path, source_bytes: int, source: Path, *, shards: int, rounds: int) -> list[dict]:
    """The rows of one checkpoint, one per mode."""
    out = folder / "out"
    shard = f"{max(1, round(source_bytes * RESULT_SHARE / shards / 1e6))}MB"
    found, results = 0, {}
    for mode in MODES:  # also brings everything into the page cache
        quantize = command(mode, source, out, shard)
        subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        results[mode.name] = digests(out)
        found = len(list(out.glob("*.safetensors")))
        shutil.rmtree(out)
    runs: dict[str, list[Run]] = {mode.name: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            runs[mode.name].append(run_command(command(mode, source, out, shard), [source], out))
    return [
        {
            "recipe": SCALAR,
            "bytes": source_bytes,
            "shards": found,
            "mode": mode.name,
            "beside": mode.beside,
            "seconds": [run.exit_seconds for run in runs[mode.name]],
            "median_seconds": median_of(runs[mode.name], "exit_seconds"),
            "identical": results[mode.name] == results[PLAIN],
        }
        for mode in MODES
    ]


def starts(rows: list[dict]) -> dict[str, float]:
    """What the engine of each mode adds to a small checkpoint, in seconds."""
    seconds = {row["mode"]: row["median_seconds"] for row in rows}
    return {row["mode"]: seconds[row["mode"]] - seconds[row["beside"]] for row in rows if row["beside"]}


def cost(folder: Path, recipe: str, size: str, rounds: int) -> dict:
    """CPU seconds and bytes of the result per byte of the source, by one recipe."""
    measured = []
    for total, largest in ((SMALL_COST, "1MB"), (size, "8MB")):
        source, out = folder / f"{recipe}-{total}", folder / "out"
        source_bytes = make_source(source, total, largest)
        quantize = command(MODES[0], source, out, "5GB", recipe)
        subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        result_bytes = folder_bytes(out)
        shutil.rmtree(out)
        runs = [run_command(quantize, [source], out) for _ in range(rounds)]
        seconds = statistics.median(run.user_seconds + run.system_seconds for run in runs)
        measured.append((source_bytes, result_bytes, seconds))
        shutil.rmtree(source)
    (small, small_result, small_seconds), (large, large_result, large_seconds) = measured
    return {
        "recipe": recipe,
        "bytes": large,
        "cpu_seconds": large_seconds,
        "fixed_cpu_seconds": small_seconds,
        "cpu_seconds_per_byte": (large_seconds - small_seconds) / (large - small),
        "result_share": (large_result - small_result) / (large - small),
    }


def overhead(row: dict, document: Document) -> tuple[str | None, str | None]:
    """How much longer a mode took than the one beside it, without its start: in seconds, and in percent."""
    if row["beside"] is None:
        return None, None
    plain = next(
        each["median_seconds"]
        for each in document["rows"]
        if (each["recipe"], each["bytes"], each["mode"]) == (row["recipe"], row["bytes"], row["beside"])
    )
    more = row["median_seconds"] - document["starts"][row["mode"]] - plain
    return f"{more:+.2f}", f"{more / plain:+.0%}"


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    header = [
        "recipe",
        "GB",
        "shards",
        "quantize",
        "seconds",
        "the runs",
        "start",
        "overhead, s",
        "overhead",
        "same bytes",
    ]
    lines = [
        [
            row["recipe"],
            f"{row['bytes'] / 1e9:.2g}",
            row["shards"],
            row["mode"],
            f"{row['median_seconds']:.2f}",
            ", ".join(f"{value:.2f}" for value in row["seconds"]),
            f"{document['starts'][row['mode']]:.2f}" if row["beside"] else None,
            *overhead(row, document),
            "yes" if row["identical"] else "NO",
        ]
        for row in document["rows"]
    ]
    costs = [
        [
            each["recipe"],
            f"{each['bytes'] / 1e9:.2g}",
            f"{each['cpu_seconds_per_byte'] * 1e9:.1f}",
            f"{each['result_share']:.3f}",
        ]
        for each in document["costs"]
    ]
    return {
        "ray-scaling": table(header, lines),
        "ray-costs": table(["recipe", "GB", "CPU seconds per GB of source", "result of the source"], costs)
        + f"\n\n{machine_line({'machine': document['costs_machine']})}",
    } | paper_cluster.sections(document)


def costs(folder: Path, options: argparse.Namespace) -> dict:
    """What a byte costs, with the machine that it was measured on."""
    start = now()
    sizes = {SCALAR: options.cost_size, TRELLIS: options.trellis_size}
    rows = [cost(folder, recipe, size, options.rounds) for recipe, size in sizes.items()]
    return {"costs": rows, "costs_machine": machine(start), **measured_with(("q5", "trellis"))}


def overheads(folder: Path, options: argparse.Namespace) -> dict:
    """What the engine adds."""
    start, rows, small = now(), [], folder / "small"
    small_bytes = make_source(small, SMALL, SMALL_LARGEST)
    started = starts(measure(folder, small_bytes, small, shards=12, rounds=max(5, options.rounds)))
    for count in options.gigabytes:
        source = folder / "source"
        source_bytes = make_source(source, f"{round(count * 1000)}MB", f"{max(2, round(count * 1000 / 48))}MB")
        rows += measure(folder, source_bytes, source, shards=options.shards, rounds=options.rounds)
        shutil.rmtree(source)
    settings = {"dtype": "BF16", "rounds": options.rounds}
    return {"machine": machine(start), "settings": settings, "starts": started, "rows": rows}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; by default a temporary folder")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=16, help="about how many shards a result has")
    parser.add_argument("--cost-size", default="1GB", help="checkpoint of which CPU seconds are counted")
    parser.add_argument("--trellis-size", default="100MB", help="the same with the trellis codec")
    parser.add_argument("--costs", action="store_true", help="measure only what a byte costs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        if options.costs:
            known = json.loads((options.out / "ray_scaling.json").read_text())
        else:
            known = overheads(Path(work), options)
        document = known | costs(Path(work), options)
    publish("ray_scaling", document, sections(document), options, None)
    if not all(row["identical"] for row in document["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
