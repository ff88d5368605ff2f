"""Time of quantize against the size of the checkpoint, and of quantize and export against the number of threads.

    python benchmarks/scaling.py

Timing is as in commands.py: page cache warm, through `sync`, medians. A line in the size, `a + b GB`, is fitted to the
seconds and printed with its largest residual. Thread counts take turns on one checkpoint.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from harness import (
    PQWEIGHTS,
    Document,
    Run,
    argument_parser,
    machine,
    make_source,
    median_of,
    now,
    publish,
    run_command,
    table,
    usable_cores,
)

SETTINGS = {"dtype": "BF16", "recipe": "q5", "bits": 5, "block_size": 128}
TIMES = ("seconds", "exit_seconds")


def against_size(folder: Path, sizes: list[str], largest: str, rounds: int) -> list[dict]:
    """Quantize with all threads: a row per checkpoint."""
    rows = []
    for number, size in enumerate(sizes):
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, out = Path(work) / "source", Path(work) / "out"
            source_bytes = make_source(source, size, largest)
            command = [*PQWEIGHTS, "quantize", str(source), str(out)]
            if number == 0:
                run_command(command, out=out)  # the first run on a machine compiles
            runs = [run_command(command, [source], out) for _ in range(rounds)]
        rows.append({"bytes": source_bytes} | medians(runs))
    return rows


def against_threads(folder: Path, size: str, largest: str, *, threads: list[int], rounds: int) -> list[dict]:
    """Quantize and export of one checkpoint: a row per command and thread count."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, master, out = (Path(work) / name for name in ("source", "master", "out"))
        make_source(source, size, largest)
        run_command([*PQWEIGHTS, "quantize", str(source), str(master)])
        runs: dict[tuple[str, int], list[Run]] = {}
        for _ in range(rounds):
            for count in threads:
                limit = ["--threads", str(count)]
                quantize = [*PQWEIGHTS, "quantize", str(source), str(out), *limit]
                export = [*PQWEIGHTS, "export", str(master), str(out), "--target", "bf16", *limit]
                runs.setdefault(("quantize", count), []).append(run_command(quantize, [source], out))
                runs.setdefault(("export", count), []).append(run_command(export, [master], out))
    return [{"command": name, "threads": count} | medians(done) for (name, count), done in sorted(runs.items())]


def medians(runs: list[Run]) -> dict[str, float]:
    """The medians of the fields that the tables show."""
    return {field: median_of(runs, field) for field in (*TIMES, "user_seconds", "system_seconds")}


def line(rows: list[dict], field: str) -> dict[str, float]:
    """The least-squares line of a field over the size, and its largest residual."""
    sizes, times = [row["bytes"] / 1e9 for row in rows], [row[field] for row in rows]
    slope, intercept = statistics.linear_regression(sizes, times)
    misses = [time - intercept - slope * size for size, time in zip(sizes, times, strict=True)]
    return {"seconds": intercept, "seconds_per_gigabyte": slope, "largest_residual_seconds": max(misses, key=abs)}


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    settings, sizes, threads = document["settings"], document["sizes"], document["threads"]
    note = (
        f"{settings['dtype']} source, {settings['bits']} bits, blocks of {settings['block_size']}; median of "
        f"{settings['rounds']}"
    )
    rows = [[f"{row['bytes'] / 1e9:.2f}", *(f"{row[field]:.2f}" for field in TIMES)] for row in sizes]
    fits = "; ".join(
        f"{name}: {fit['seconds']:.2f} s + {fit['seconds_per_gigabyte']:.3f} s per GB, largest residual "
        f"{fit['largest_residual_seconds']:+.2f} s"
        for name, fit in zip(("through sync", "until it returned"), document["lines"].values(), strict=True)
    )
    alone = {row["command"]: row for row in threads if row["threads"] == min(settings["threads"])}
    header = ["command", "threads", "seconds", "until it returned", "speed-up", "user", "system"]
    counted = [
        [
            row["command"],
            row["threads"],
            f"{row['seconds']:.2f}",
            f"{row['exit_seconds']:.2f}",
            f"{alone[row['command']]['exit_seconds'] / row['exit_seconds']:.2f}",
            f"{row['user_seconds']:.2f}",
            f"{row['system_seconds']:.2f}",
        ]
        for row in threads
    ]
    return {
        "size": (
            f"`quantize`, {note}. {fits}.\n\n"
            + table(["GB of source", "seconds through sync", "until it returned"], rows)
        ),
        "threads": f"A checkpoint of {settings['threads_size']}, {note}.\n\n{table(header, counted)}",
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; by default a temporary folder")
    parser.add_argument("--sizes", nargs="+", default=["0.5GB", "1GB", "2GB", "4GB", "8GB"])
    parser.add_argument("--threads-size", default="2GB")
    parser.add_argument("--largest", default="256MB", help="largest tensor of all checkpoints")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="thread counts; by default 1, 2, 4, ... and the number of cores"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    start = now()
    cores = usable_cores()
    threads = options.threads or sorted({*(1 << i for i in range(cores.bit_length())), cores})
    sizes = against_size(options.folder, options.sizes, options.largest, options.rounds)
    document = {
        "machine": machine(start),
        "settings": {**SETTINGS, "rounds": options.rounds, "threads": threads, "threads_size": options.threads_size},
        "sizes": sizes,
        "lines": {field: line(sizes, field) for field in TIMES},
        "threads": against_threads(
            options.folder, options.threads_size, options.largest, threads=threads, rounds=options.rounds
        ),
    }
    publish("scaling", document, sections(document), options, ("q5",))


if __name__ == "__main__":
    main()
