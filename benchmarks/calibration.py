"""What a calibrated master takes: seconds of each pass, memory, and room on the disk.

    python benchmarks/calibration.py [--size 3.2GB] [--layers 22]

`quantize --calibrate FILE` runs in a process of its own on a synthetic Llama (hidden size 2048, intermediate size 5632,
a tied vocabulary of 32,000 words; 3.2 GB are 34 layers, 1.6 G weights) and a text of random words. The passes work
layer by layer, so a smaller model shows what --layers would take: each further layer counts by the median layer of each
pass. That holds while there is room to keep the moments of all layers, as there is for those of 22. Seconds of the
processor are those of all threads, and grow less than those of the clock when other processes run. Room on the disk is
that of the work folder.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import (
    Cell,
    Document,
    argument_parser,
    folder_bytes,
    gigabytes,
    machine,
    make_source,
    now,
    publish,
    run_command,
    table,
    usable_cores,
)

VOCABULARY, HIDDEN = 32_000, 2048
TOKENS = 12_288
FORWARD, BACKWARD, ENCODING = "forward", "backward", "encoding"
PASSES = (FORWARD, BACKWARD, ENCODING)
MEASURED = ("seconds", "cpu_seconds", "disk_bytes")


def write_texts(folder: Path, text: Path) -> None:
    """Give a checkpoint a tokenizer of words, and write a text of random ones."""
    words = [f"w{number}" for number in range(VOCABULARY)]
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "w0"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    text.write_text(" ".join(random.Random(0).choices(words, k=TOKENS + 100)))


def calibrate(source: Path, text: Path, out: Path, report: Path, threads: int) -> None:
    """Make a calibrated master, and write what had been spent after each step."""
    import pqweights

    start, steps = time.monotonic(), []

    def finished(done: int, total: int, what: str) -> None:
        spent = time.monotonic() - start, time.process_time(), folder_bytes(out.parent / f".{out.name}.calibration")
        steps.append({"done": done, "total": total, **dict(zip(MEASURED, spent, strict=True))})

    pqweights.quantize(source, out, "t4", calibrate=text, threads=threads, calibration_progress=finished)
    report.write_text(json.dumps({"layers": steps[0]["total"] // len(PASSES) - 1, "steps": steps}))


def measure(work: Path, size: str, threads: int) -> Document:
    """Make the checkpoint and its master in a folder; what that took."""
    source, text, out, report = (work / name for name in ("source", "text.txt", "master", "report.json"))
    source_bytes = make_source(source, size, str(VOCABULARY * HIDDEN * 2), "--no-head")
    write_texts(source, text)
    run = run_command(
        [sys.executable, __file__, "--inside", *map(str, (source, text, out, report, threads))], [source], out
    )
    told: Document = json.loads(report.read_text())
    return {
        "weights": source_bytes // 2,
        "layers": told["layers"],
        "threads": threads,
        "seconds": run.exit_seconds,
        "cpu_seconds": run.user_seconds + run.system_seconds,
        "peak_bytes": run.peak_bytes,
        "disk_bytes": max(step["disk_bytes"] for step in told["steps"]),
        "steps": told["steps"],
    }


def per_layer(row: Document) -> dict[str, dict[str, float]]:
    """What the median layer takes in each pass, and what it leaves on the disk.

    The first step of a pass is left out: it includes what comes before the pass. So is the last of the encoding, which
    is the embedding's.
    """
    result = {}
    for number, name in enumerate(PASSES):
        spent: dict[str, list[float]] = {what: [] for what in MEASURED}
        for before, step in zip(row["steps"], row["steps"][1:], strict=False):
            place = step["done"] - number * (row["layers"] + 1)
            if 2 <= place <= row["layers"] + (name == BACKWARD) and before["done"] == step["done"] - 1:
                for what in MEASURED:
                    spent[what].append(step[what] - before[what])
        result[name] = {what: statistics.median(values) for what, values in spent.items()}
    return result


def extrapolated(row: Document, layers: int) -> dict[str, float]:
    """What a model of that many layers would take, each further one as much as the median."""
    known = per_layer(row).values()
    more = {what: (layers - row["layers"]) * sum(of_pass[what] for of_pass in known) for what in MEASURED}
    return {what: row[what] + more[what] for what in MEASURED}


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    row, layers = document["row"], document["settings"]["layers"]
    lines: list[list[Cell]] = [
        [f"{name}, per layer", f"{took['seconds']:.1f}", f"{took['cpu_seconds']:.1f}", None, None]
        for name, took in per_layer(row).items()
    ]
    peak = gigabytes(row["peak_bytes"])
    lines.append([f"all of {row['layers']} layers, measured", *totals(row), peak, gigabytes(row["disk_bytes"])])
    if layers != row["layers"]:
        computed = extrapolated(row, layers)
        disk = gigabytes(round(computed["disk_bytes"]))
        lines.append([f"{layers} layers, computed from the above", *totals(computed), None, disk])
    note = (
        f"{row['weights'] / 1e9:.2f} G weights in {row['layers']} layers of hidden size {HIDDEN}, {TOKENS} tokens, "
        f"{row['threads']} threads; the layers are the median ones of their pass."
    )
    shown = table(["", "s", "CPU s", "peak memory", "work folder"], lines)
    return {"calibration": f"{note}\n\n{shown}"}


def totals(took: dict[str, Any]) -> tuple[str, str]:
    """The seconds of a whole run."""
    return f"{took['seconds']:.0f}", f"{took['cpu_seconds']:.0f}"


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        source, text, out, report = map(Path, sys.argv[2:6])
        calibrate(source, text, out, report, int(sys.argv[6]))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made; by default a temporary folder")
    parser.add_argument("--size", default="3.2GB", help="of the checkpoint; at least 500MB, for layers of that width")
    parser.add_argument("--layers", type=int, default=22, help="of the model whose figures are computed")
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    start = now()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        row = measure(Path(work), options.size, options.threads)
    settings = {"size": options.size, "layers": options.layers}
    document = {"machine": machine(start), "settings": settings, "row": row}
    publish("calibration", document, sections(document), options, ("columns",))


if __name__ == "__main__":
    main()
