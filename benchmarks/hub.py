"""A round over a Hub on the loopback, all by id: plan, quantize with little disk, push, load and export.

    python benchmarks/hub.py --size 2GB --shard 250MB

The official client, in processes of its own, talks to the small Hub of tests/support/loopback_hub.py in this process,
without xet. A source of Gaussian weights under a Llama's names is pushed first. Peak disk is what the output folder and
the client's cache hold together, sampled every 10 ms. The plan of a large model covers 200 sparse shards that the Hub
serves. Last come the faults of tests/support/hub_cases.py: what the command that meets a fault does, and then the same
command again.
"""

from __future__ import annotations

import json
import os
import shutil
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
    now,
    publish,
    table,
    version,
)

from pqweights.checkpoint.header import TensorSpec, build_header
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE, shard_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import hub_cases
from loopback_hub import LoopbackHub

SOURCE, MASTER, LARGE = "me/source", "me/master", "me/large"
LOAD = """
import json, sys, pqweights
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(json.dumps({"class": type(model).__name__, "weights": sum(p.numel() for p in model.parameters())}))
"""
PUSH_SOURCE = """
import sys, huggingface_hub
api = huggingface_hub.HfApi()
api.create_repo(sys.argv[2])
api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])
"""


def disk_bytes(*folders: Path) -> int:
    """The disk space that the files of some folders take, without those that are deleted meanwhile."""
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                total += 0 if path.is_symlink() else path.lstat().st_blocks * 512 if path.is_file() else 0
            except FileNotFoundError:
                continue
    return total


class DiskWatch:
    """The peak of what some folders hold together, by sampling."""

    def __init__(self, *folders: Path) -> None:
        self.peak, self._folders, self._done = 0, folders, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, disk_bytes(*self._folders))

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def run(step: str, hub: LoopbackHub, home: Path, *, command: list[str], watched: list[Path]) -> dict[str, Any]:
    """Run one step: seconds, requests, bytes that the Hub sent, peak disk, and what was printed.

    home: where the client keeps its cache.
    """
    hub.requests.clear()
    start = time.monotonic()
    with DiskWatch(*watched) as disk:
        done = subprocess.run(command, env=hub.environment(home), stdout=subprocess.PIPE, check=True, text=True)
    return {
        "step": step,
        "seconds": time.monotonic() - start,
        "requests": len(hub.requests),
        "sent_bytes": sum(request.bytes_sent for request in hub.requests),
        "peak_disk_bytes": disk.peak,
        "said": done.stdout,
    }


def measure_round(work: Path, size: str, largest: str, shard: str) -> dict[str, Any]:
    """Every step, and the sizes that bound the disk."""
    source = work / "source"
    make_source(source, size, largest, "--no-head", "--shard", shard)
    shards = sorted((path.stat().st_size for path in source.glob("*.safetensors")), reverse=True)
    with LoopbackHub(folder=work / "hub") as hub:
        found = round_over(hub, work, source)
        card = hub.repositories[MASTER].read("README.md").decode()
    said = [step.pop("said") for step in found["steps"]]
    return found | {
        "card": card,
        "source_bytes": sum(shards),
        "shards": len(shards),
        "two_largest_shards": sum(shards[:2]),
        "planned_output_bytes": json.loads(said[1])["totals"]["output_bytes"],
        "loaded": json.loads(said[4].splitlines()[-1]),
    }


def round_over(hub: LoopbackHub, work: Path, source: Path) -> dict[str, Any]:
    """Push the source, plan, quantize, push the master, load, export and verify."""
    out, exported, home = work / "master", work / "bf16", work / "home"
    steps: list[dict[str, Any]] = []

    def step(name: str, command: list[str], *watched: Path) -> None:
        steps.append(run(name, hub, home, command=command, watched=list(watched)))

    step("push the source", [sys.executable, "-c", PUSH_SOURCE, str(source), SOURCE])
    shutil.rmtree(source)
    step("plan SOURCE", [*PQWEIGHTS, "plan", SOURCE, "--json"], home)
    quantize = [*PQWEIGHTS, "quantize", SOURCE, str(out), "--low-disk"]
    step("quantize SOURCE OUT --low-disk", quantize, home, out)
    bytes_in_out = disk_bytes(out)
    step("push OUT MASTER", [*PQWEIGHTS, "push", str(out), MASTER], out)
    step("from_pretrained(MASTER)", [sys.executable, "-c", LOAD, MASTER], home)
    export = [*PQWEIGHTS, "export", MASTER, str(exported), "--target", "bf16"]
    step("export MASTER OUT --target bf16", export, home, exported)
    step("verify MASTER", [*PQWEIGHTS, "verify", MASTER], home)
    return {"steps": steps, "output_folder_bytes": bytes_in_out}


def sparse_shard(path: Path, layer: int) -> list[str]:
    """Write a shard of 2.1 GB that takes no disk, the header of a layer and then a hole; returns its tensor names."""
    hidden = 16384
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "mlp.gate_proj": (hidden, hidden),
    }
    specs = [TensorSpec(f"model.layers.{layer}.{name}.weight", "BF16", shape) for name, shape in shapes.items()]
    header, stored = build_header(path.name, specs, {"format": "pt"})
    path.write_bytes(header)
    os.truncate(path, stored[-1].offset + stored[-1].byte_count)
    return [spec.name for spec in specs]


def large_repository(folder: Path, shards: int) -> dict[str, Path]:
    """The files of a Llama with a hidden size of 16384, in sparse shards."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = shard_name(number, shards)
        weight_map |= dict.fromkeys(sparse_shard(folder / file, number), file)
    (folder / CONFIG_FILE).write_text(json.dumps({"model_type": "llama"}))
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return {path.name: path for path in folder.iterdir()}


def measure_large(work: Path, shards: int) -> dict[str, Any]:
    """The plan of a model that would not fit on any disk here."""
    files = large_repository(work / "large", shards)
    with LoopbackHub() as hub:
        hub.commit(LARGE, dict(files), sha256=dict.fromkeys(files, "0" * 64))  # they are never read whole
        found = run("plan", hub, work / "home", command=[*PQWEIGHTS, "plan", LARGE, "--json"], watched=[])
    said = json.loads(found.pop("said"))
    return found | {
        "shards": shards,
        "source_bytes": said["totals"]["source_bytes"],
        "output_bytes": said["totals"]["output_bytes"],
    }


def measure_faults() -> list[dict[str, Any]]:
    """A row per fault. Raises an error for a case that does not end as it must."""
    rows = []
    for case in hub_cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            outcome = hub_cases.play(case, Path(folder))
            line = outcome.line.replace(folder, "")
        command = " ".join([case.command, *case.options])
        rows.append(
            {"fault": case.name, "command": command, "exit": outcome.first, "line": line, "again": outcome.second}
        )
    return rows


def step_row(step: Document) -> list[Cell]:
    """A line of the table of steps."""
    peak = step["peak_disk_bytes"]
    sent = gigabytes(step["sent_bytes"])
    return [step["step"], f"{step['seconds']:.2f}", step["requests"], sent, gigabytes(peak) if peak else None]


def fault_table(rows: list[Document]) -> str:
    """What the commands do; faults of the same outcome are on one line."""
    faults: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        first = f"`{row['line']}`" if row["exit"] else "done, right bytes"
        again = f"exit code {row['again']}" if row["again"] else "done, right bytes"
        faults.setdefault((f"`{row['command']}`", first, again), []).append(row["fault"])
    header = ["what goes wrong", "command", "what the command does", "the same command again"]
    return table(header, [["; ".join(names), *outcome] for outcome, names in faults.items()])


def round_text(found: Document) -> str:
    """The steps, and how much disk `--low-disk` took."""
    out, two = found["output_folder_bytes"], found["two_largest_shards"]
    peak = next(step["peak_disk_bytes"] for step in found["steps"] if "--low-disk" in step["step"])
    header = ["step", "seconds", "requests", "sent by the Hub", "peak disk"]
    return (
        f"A source of {gigabytes(found['source_bytes'])} in {found['shards']} shards, BF16, 5 bits; client and Hub on "
        f"the same machine.\n\n{table(header, [step_row(step) for step in found['steps']])}\n\n"
        f"With `--low-disk` the output folder and the client's cache never held more than **{gigabytes(peak)}**. "
        f"The output ({gigabytes(out)}) and the two largest shards ({gigabytes(two)}) take {gigabytes(out + two)}, "
        f"the source and the output {gigabytes(found['source_bytes'] + out)}."
    )


def large_text(large: Document) -> str:
    """What planning the large model took."""
    return (
        f"`pqweights plan` of a repository of {large['shards']} shards, {large['source_bytes']} bytes: "
        f"**{large['seconds']:.2f} s**, {large['requests']} requests, {large['sent_bytes']} bytes "
        f"fetched; the master's safetensors files would have {large['output_bytes']} bytes."
    )


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    return {
        "hub-faults": fault_table(document["faults"]),
        "hub-round": round_text(document["round"]),
        "hub-large": large_text(document["large"]),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where everything is made; by default a temporary folder")
    parser.add_argument("--size", default="2GB", help="size of the source")
    parser.add_argument("--largest", default="100MB", help="size of its largest tensor")
    parser.add_argument("--shard", default="250MB", help="size of its largest file")
    parser.add_argument("--shards", type=int, default=200, help="number of shards of the large model, 2.1 GB each")
    options = parser.parse_args()
    start = now()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        large = measure_large(Path(work), options.shards)
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        found = measure_round(Path(work), options.size, options.largest, options.shard)
    about = machine(start)
    about["versions"] |= {name: version(name) for name in ("huggingface_hub", "transformers")}
    document = {
        "machine": about,
        "settings": {"dtype": "BF16", "bits": 5},
        "round": found,
        "large": large,
        "faults": measure_faults(),
    }
    card = found.pop("card")
    publish("hub", document, sections(document), options, ("q5",))
    if options.out is not None:
        (options.out / "hub-card.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
