"""Wall time, CPU time and peak memory of whole commands, beside `cp -r` of the same checkpoint on the same disk.

    python benchmarks/commands.py --sizes 1GB 4GB 8GB --largest 100MB 1GB 1GB
    python benchmarks/commands.py --cold --sizes 4GB --largest 1GB        # as root
    python benchmarks/commands.py --recipe t4 --sizes 4GB --largest 1GB   # the trellis codec, without integer exports

Everything that a command reads is read once before it runs, so that it comes from the page cache; with --cold the
cache is emptied instead. Every command is timed until a `sync` after it returns. The commands take turns, and the
tables show medians. Quantize reads what cp reads; the BF16 export writes as much as cp, the integer exports (best
scales and offsets) a quarter; verify writes nothing. What bounds a command is told by two shares of its time: the CPU
seconds over the cores, and the bytes that it writes (cold: and reads) over what the disk moves with direct access.
Peaks are the kernel's ru_maxrss of the process, the largest of all rounds, beside an idle interpreter that imported
pqweights, torch and numpy. cp has no peak: the kernel would report that of this script.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import (
    PQWEIGHTS,
    Cell,
    Document,
    Run,
    argument_parser,
    disk_rates,
    folder_bytes,
    gigabytes,
    machine,
    make_source,
    median_of,
    now,
    publish,
    run_command,
    table,
    version,
)

RECIPE = "q5"
SETTINGS = {"dtype": "BF16", "block_size": 128}
EXPORTS = {
    "export bf16": ["bf16"],
    "torchao": ["torchao"],
    "mlx": ["mlx"],
    "vllm": ["vllm"],
}
COMMANDS = ("cp", "quantize", *EXPORTS, "verify")
# What is measured by recipe, by the names of digests.CODECS.
CODECS = {RECIPE: (RECIPE, "torchao int4", "mlx q4", "vllm w4a16"), "t4": ("trellis",)}


def measure(folder: Path, total: str, largest: str, *, recipe: str, rounds: int, cold: bool) -> list[dict]:
    """The rows of one checkpoint, one per command."""
    quantize = [*PQWEIGHTS, "quantize", "--recipe", recipe]
    exports = EXPORTS if recipe == RECIPE else {"export bf16": EXPORTS["export bf16"]}
    source, master, out = (folder / name for name in ("source", "master", "out"))
    source_bytes = make_source(source, total, largest)
    run_command([*quantize, str(source), str(master)])  # the first run on a machine also compiles
    commands = {
        "cp": (["cp", "-r", "--reflink=never", str(source), str(out)], source, out),
        "quantize": ([*quantize, str(source), str(out)], source, out),
        **{
            name: ([*PQWEIGHTS, "export", str(master), str(out), "--target", *arguments], master, out)
            for name, arguments in exports.items()
        },
        "verify": ([*PQWEIGHTS, "verify", str(master)], master, None),
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, (command, read, written) in commands.items():
            runs[name].append(run_command(command, [read], written, cold=cold))
    cp_seconds = median_of(runs["cp"], "seconds")
    return [
        {
            "checkpoint": total,
            "bytes": source_bytes,
            "largest_tensor": largest,
            "command": name,
            "seconds": [run.seconds for run in done],
            "median_seconds": median_of(done, "seconds"),
            "of_cp": median_of(done, "seconds") / cp_seconds,
            "exit_seconds": median_of(done, "exit_seconds"),
            "user_seconds": median_of(done, "user_seconds"),
            "system_seconds": median_of(done, "system_seconds"),
            "peak_bytes": max(run.peak_bytes for run in done) if name != "cp" else None,
            "read_bytes": folder_bytes(commands[name][1]),
            "written_bytes": done[0].written_bytes,
        }
        for name, done in runs.items()
    ]


TIMES_HEADER = (
    "checkpoint",
    "largest tensor",
    "command",
    "seconds",
    "of cp",
    "the runs",
    "until it returned",
    "user",
    "system",
    "CPU busy",
    "disk busy",
)


def shares(row: Document, document: Document) -> list[Cell]:
    """The shares of a command's time for which it kept the cores and the disk busy; cp has one thread."""
    seconds, rates = row["median_seconds"], document["settings"]["disk"]
    cores = 1 if row["command"] == "cp" else document["machine"]["cores"]
    disk = None
    if rates is not None:
        busy = row["written_bytes"] / rates["write"]
        busy += row["read_bytes"] / rates["read"] if document["settings"]["cold"] else 0
        disk = f"{busy / seconds:.0%}"
    return [f"{(row['user_seconds'] + row['system_seconds']) / cores / seconds:.0%}", disk]


def times_row(row: Document, document: Document) -> list[Cell]:
    """A line of the table of times."""
    return [
        row["checkpoint"],
        row["largest_tensor"],
        row["command"],
        f"{row['median_seconds']:.2f}",
        f"{row['of_cp']:.2f}",
        ", ".join(f"{value:.2f}" for value in row["seconds"]),
        *(f"{row[field]:.2f}" for field in ("exit_seconds", "user_seconds", "system_seconds")),
        *shares(row, document),
    ]


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    settings, rows, idle = document["settings"], document["rows"], document["idle_peak_bytes"]
    note = f"{settings['dtype']} source, recipe {settings['recipe']}, blocks of {settings['block_size']}"
    times = table(TIMES_HEADER, [times_row(row, document) for row in rows])
    cache = "empty" if settings["cold"] else "warm"
    disk = settings["disk"]
    moved = (
        ""
        if disk is None
        else f" Disk, direct: writes {gigabytes(disk['write'])}/s, reads {gigabytes(disk['read'])}/s."
    )
    if settings["cold"]:
        return {"cold": f"{note}; median of {settings['rounds']}, page cache empty, through sync.{moved}\n\n{times}"}
    peaks = {(row["checkpoint"], row["command"]): row["peak_bytes"] for row in rows}
    shown = [name for name in COMMANDS if name != "cp" and any(name == command for _, command in peaks)]
    checkpoints = dict.fromkeys((row["checkpoint"], row["largest_tensor"]) for row in rows)
    memory = [
        [size, largest, *(f"{peaks[size, name] / 1e6:.0f} MB" for name in shown)] for size, largest in checkpoints
    ]
    beside = "torch is not installed" if idle is None else gigabytes(idle)
    suffix = "" if settings["recipe"] == RECIPE else f"-{settings['recipe']}"
    about = f"{note}; median of {settings['rounds']}, page cache {cache}, through sync.{moved}"
    return {
        f"wall-time{suffix}": f"{about}\n\n{times}",
        f"memory{suffix}": (
            f"{note}. Idle `python -c 'import pqweights, torch, numpy'`: {beside}.\n\n"
            + table(["checkpoint", "largest tensor", *shown], memory)
        ),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; by default a temporary folder")
    parser.add_argument("--sizes", nargs="+", default=["1GB", "4GB", "8GB"])
    parser.add_argument("--largest", nargs="+", default=["100MB", "1GB", "1GB"], help="largest tensor, one per size")
    parser.add_argument(
        "--recipe", default=RECIPE, choices=[*CODECS], help="recipe of the masters; others than q5 get a document apart"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each command; as root")
    options = parser.parse_args()
    start = now()
    if len(options.sizes) != len(options.largest):
        parser.error("--largest: expected as many as --sizes")
    idle = (
        run_command([sys.executable, "-c", "import pqweights, torch, numpy"]).peak_bytes if version("torch") else None
    )
    rows = []
    for size, largest in zip(options.sizes, options.largest, strict=True):
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            rows += measure(Path(work), size, largest, recipe=options.recipe, rounds=options.rounds, cold=options.cold)
    settings = {
        **SETTINGS,
        "recipe": options.recipe,
        "rounds": options.rounds,
        "cold": options.cold,
        "disk": disk_rates(options.folder),
    }
    document = {"machine": machine(start), "settings": settings, "idle_peak_bytes": idle, "rows": rows}
    plain = "commands" if options.recipe == RECIPE else f"commands-{options.recipe}"
    publish("cold" if options.cold else plain, document, sections(document), options, CODECS[options.recipe])


if __name__ == "__main__":
    main()
