"""Loading a master in transformers: seconds and memory, beside the original BF16 checkpoint.

    python benchmarks/loading.py --size 3300MB --largest 250MB

Every load is a fresh process that reads from the page cache. transformers maps BF16 files into memory, so their weights
are only read when the model computes: each process also makes one token, and memory is given after that. Peaks are
those of all resident memory, mapped files included (VmHWM), and of anonymous memory alone (RssAnon, sampled every 2
ms); both include what the imports take, which is given as well. Tokens per second are in running.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness import (
    PQWEIGHTS,
    Cell,
    Document,
    argument_parser,
    gigabytes,
    machine,
    make_source,
    memory,
    now,
    publish,
    read_all,
    run_command,
    silence_torchao,
    table,
    version,
)

BF16, DECODED, PACKED = "BF16 original, from_pretrained", "master, from_pretrained", "master, load_model(packed=True)"
WAYS = (BF16, DECODED, PACKED)


class Watch:
    """The peak of anonymous memory, by sampling."""

    def __init__(self) -> None:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, memory()["RssAnon"])

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.peak


def child(way: str, folder: str) -> dict[str, Any]:
    """Load and make a token. This is what a process of its own does."""
    silence_torchao()
    import torch
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401  # what a first load imports is not loading

    import pqweights

    transformers.logging.disable_progress_bar()
    imported, watch = memory()["VmRSS"], Watch()
    start = time.perf_counter()
    if way == PACKED:
        model = pqweights.load_model(folder, packed=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = time.perf_counter() - start
    with torch.inference_mode():
        model(torch.ones(1, 1, dtype=torch.long))
    first = time.perf_counter() - start
    anonymous, after = watch.stop(), memory()
    return {
        "seconds": loaded,
        "first_token_seconds": first,
        "imported_bytes": imported,
        "peak_bytes": after["VmHWM"],
        "peak_anonymous_bytes": anonymous,
        "final_bytes": after["VmRSS"],
        "final_anonymous_bytes": after["RssAnon"],
        "weights": sum(p.numel() for p in model.parameters()),
    }


def in_child(way: str, folder: Path) -> dict[str, Any]:
    """What `child` returns in a process of its own."""
    read_all(folder)
    command = [sys.executable, __file__, "--child", way, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def folder_bytes(folder: Path) -> int:
    """The size of the files of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def make(work: Path, size: str, largest: str) -> dict[str, Path]:
    """Make a checkpoint and its master; the folder that each way of loading reads."""
    make_source(work / "source", size, largest, "--no-head")
    run_command([*PQWEIGHTS, "quantize", str(work / "source"), str(work / "master")])
    return {way: work / ("source" if way == BF16 else "master") for way in WAYS}


PEAKS = ("peak_anonymous_bytes", "peak_bytes", "final_anonymous_bytes", "final_bytes")
LOADING_HEADER = (
    "way",
    "folder",
    "seconds",
    "the runs",
    "until a token",
    "peak, anonymous",
    "peak, all",
    "after a token, anonymous",
    "after a token, all",
)


def measure_loading(folders: dict[str, Path], rounds: int) -> list[dict]:
    """A row per way of loading; they take turns."""
    found: dict[str, list[dict]] = {way: [] for way in folders}
    for _ in range(rounds):
        for way, folder in folders.items():
            found[way].append(in_child(way, folder))
    return [
        {
            "way": way,
            "folder_bytes": folder_bytes(folders[way]),
            "seconds": [run["seconds"] for run in runs],
            "median_seconds": statistics.median(run["seconds"] for run in runs),
            "median_first_token_seconds": statistics.median(run["first_token_seconds"] for run in runs),
            **{field: max(run[field] for run in runs) for field in ("imported_bytes", *PEAKS, "weights")},
        }
        for way, runs in found.items()
    ]


def loading_row(row: Document) -> list[Cell]:
    """A line of the table of loading."""
    return [
        row["way"],
        gigabytes(row["folder_bytes"]),
        f"{row['median_seconds']:.2f}",
        ", ".join(f"{value:.2f}" for value in row["seconds"]),
        f"{row['median_first_token_seconds']:.2f}",
        *(gigabytes(row[key]) for key in PEAKS),
    ]


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    settings, rows = document["settings"], document["loading"]
    weights, imports = rows[0]["weights"] / 1e9, gigabytes(max(row["imported_bytes"] for row in rows))
    return {
        "loading": (
            f"A synthetic Llama of {weights:.2f} G weights in BF16, master at 5 bits; median of {settings['rounds']}, "
            f"page cache warm. The imports alone take {imports} of all memory.\n\n"
            + table(LOADING_HEADER, [loading_row(row) for row in rows])
        ),
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        way, folder = sys.argv[2:]
        print(json.dumps(child(way, folder)))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; by default a temporary folder")
    parser.add_argument("--size", default="3300MB", help="size of the checkpoint that is loaded")
    parser.add_argument("--largest", default="250MB", help="size of its largest tensor")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    start = now()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        loading = measure_loading(make(Path(work), options.size, options.largest), options.rounds)
    about = machine(start)
    about["versions"] |= {name: version(name) for name in ("transformers", "safetensors")}
    settings = {"dtype": "BF16", "bits": 5, "rounds": options.rounds}
    document = {"machine": about, "settings": settings, "loading": loading}
    publish("loading", document, sections(document), options, ("q5",))


if __name__ == "__main__":
    main()
