"""A round over the Hub, on the loopback: plan, quantize with little disk, push, load and export, all by id; peak disk measured.

    python benchmarks/hub.py --size 2GB --shard 250MB

The official client talks to the small Hub of tests/support/loopback_hub.py in this process, without xet. A source of Gaussian weights
under a Llama's names is pushed; each step is a process of its own. Disk: what the output folder and the client's cache hold
together, looked at every 10 ms. The plan of a large model is of 200 sparse shards that the Hub serves. Last come the faults of
tests/support/hub_cases.py: what the command that meets one does, and the same command again.
"""

from __future__ import annotations

import json
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
    """What files take on the disk, those that are being deleted not counted."""
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                total += 0 if path.is_symlink() else path.lstat().st_blocks * 512 if path.is_file() else 0
            except FileNotFoundError:
                continue
    return total


class DiskWatch:
    """The most that some folders held together, by looking often."""

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


def run(step: str, hub: LoopbackHub, work: Path, command: list[str], watched: list[Path]) -> dict[str, Any]:
    """One step: seconds, requests, bytes that the Hub sent, most disk, and what was printed."""
    hub.requests.clear()
    start = time.monotonic()
    with DiskWatch(*watched) as disk:
        done = subprocess.run(
            command, env=hub.environment(work / "home"), stdout=subprocess.PIPE, check=True, text=True
        )
    return {
        "step": step,
        "seconds": time.monotonic() - start,
        "requests": len(hub.requests),
        "sent_bytes": sum(request.bytes_sent for request in hub.requests),
        "peak_disk_bytes": disk.peak,
        "said": done.stdout,
    }


def measure_round(work: Path, size: str, largest: str, shard: str) -> dict[str, Any]:
    """Every step, and the bound that the disk must keep."""
    source, out, exported = work / "source", work / "master", work / "bf16"
    make_source(source, size, largest, "--no-head", "--shard", shard)
    shards = sorted((path.stat().st_size for path in source.glob("*.safetensors")), reverse=True)
    with LoopbackHub(folder=work / "hub") as hub:
        home = work / "home"
        steps = [run("push the source", hub, work, [sys.executable, "-c", PUSH_SOURCE, str(source), SOURCE], [])]
        shutil.rmtree(source)
        steps.append(run("plan SOURCE", hub, work, [*PQWEIGHTS, "plan", SOURCE, "--json"], [home]))
        planned = json.loads(steps[-1]["said"])["totals"]
        command = [*PQWEIGHTS, "quantize", SOURCE, str(out), "--low-disk"]
        steps.append(run("quantize SOURCE OUT --low-disk", hub, work, command, [home, out]))
        bytes_in_out = disk_bytes(out)
        steps.append(run("push OUT MASTER", hub, work, [*PQWEIGHTS, "push", str(out), MASTER], [out]))
        steps.append(run("from_pretrained(MASTER)", hub, work, [sys.executable, "-c", LOAD, MASTER], [home]))
        loaded = json.loads(steps[-1]["said"].splitlines()[-1])
        command = [*PQWEIGHTS, "export", MASTER, str(exported), "--target", "bf16"]
        steps.append(run("export MASTER OUT --target bf16", hub, work, command, [home, exported]))
        steps.append(run("verify MASTER", hub, work, [*PQWEIGHTS, "verify", MASTER], [home]))
        card = hub.repositories[MASTER].read("README.md").decode()
    for step in steps:
        del step["said"]
    return {
        "card": card, "source_bytes": sum(shards), "shards": len(shards), "two_largest_shards": sum(shards[:2]),
        "planned_output_bytes": planned["output_bytes"], "output_folder_bytes": bytes_in_out, "loaded": loaded, "steps": steps,
    }  # fmt: skip


def large_repository(work: Path, shards: int) -> dict[str, Path]:
    """Shards of 2.1 GB that take no disk: headers of a Llama with a hidden size of 16384, and then a hole."""
    hidden, folder = 16384, work / "large"
    folder.mkdir()
    files: dict[str, Path] = {}
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        parts = [(f"{kind}_proj", (hidden, hidden)) for kind in ("q", "o")]
        parts += [("k_proj", (hidden // 2, hidden)), ("v_proj", (hidden // 2, hidden)), ("gate_proj", (hidden, hidden))]
        for part, shape in parts:
            group = "mlp" if part == "gate_proj" else "self_attn"
            tensor = f"model.layers.{number}.{group}.{part}.weight"
            byte_count = shape[0] * shape[1] * 2
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + byte_count]}
            position += byte_count
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        files[name] = folder / name
        with open(files[name], "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + position)
    for name, value in (
        ("config.json", {"model_type": "llama"}),
        ("model.safetensors.index.json", {"weight_map": weight_map}),
    ):
        files[name] = folder / name
        files[name].write_text(json.dumps(value))
    return files


def measure_large(work: Path, shards: int) -> dict[str, Any]:
    """The plan of a model that would fit no disk here."""
    files = large_repository(work, shards)
    with LoopbackHub() as hub:
        hub.commit(LARGE, dict(files))
        found = run("plan", hub, work, [*PQWEIGHTS, "plan", LARGE, "--json"], [])
    said = json.loads(found.pop("said"))
    return found | {
        "shards": shards,
        "source_bytes": said["totals"]["source_bytes"],
        "output_bytes": said["totals"]["output_bytes"],
        "reported": said["hub"],
    }


def measure_faults() -> list[dict[str, Any]]:
    """A row per fault; a case whose end is not the right one is an error."""
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


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    found, large = document["round"], document["large"]
    rows = [
        [s["step"], f"{s['seconds']:.2f}", s["requests"], gigabytes(s["sent_bytes"]), gigabytes(s["peak_disk_bytes"]) if s["peak_disk_bytes"] else None]
        for s in found["steps"]
    ]  # fmt: skip
    bound = found["output_folder_bytes"] + found["two_largest_shards"]
    peak = next(s["peak_disk_bytes"] for s in found["steps"] if "--low-disk" in s["step"])
    faults = [
        [
            row["fault"], f"`{row['command']}`", f"`{row['line']}`" if row["exit"] else "done, right bytes",
            f"exit code {row['again']}" if row["again"] else "done, right bytes",
        ]
        for row in document["faults"]
    ]  # fmt: skip
    return {
        "hub-faults": table(["what goes wrong", "command", "what becomes of it", "the same command again"], faults),
        "hub-round": (
            f"A source of {gigabytes(found['source_bytes'])} in {found['shards']} shards, BF16, 5 bits; client and Hub on the same "
            f"machine.\n\n{table(['step', 'seconds', 'requests', 'sent by the Hub', 'most disk'], rows)}\n\n"
            f"With `--low-disk` the output folder and the client's cache never held more than **{gigabytes(peak)}**; the output "
            f"({gigabytes(found['output_folder_bytes'])}) and the two largest shards ({gigabytes(found['two_largest_shards'])}) are "
            f"{gigabytes(bound)}, the source and the output {gigabytes(found['source_bytes'] + found['output_folder_bytes'])}."
        ),
        "hub-large": (
            f"`pqweights plan` of a repository of {large['shards']} shards, {large['source_bytes']} bytes: **{large['seconds']:.2f} s**, "
            f"{large['reported']['requests']} requests, {large['reported']['bytes']} bytes fetched; the master's safetensors files "
            f"would have {large['output_bytes']} bytes."
        ),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where everything is made; by default a temporary folder")
    parser.add_argument("--size", default="2GB", help="of the source")
    parser.add_argument("--largest", default="100MB", help="its largest tensor")
    parser.add_argument("--shard", default="250MB", help="its largest file")
    parser.add_argument("--shards", type=int, default=200, help="of the large model, of 2.1 GB each")
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
    publish("hub", document, sections(document), options.out)
    if options.out is not None:
        (options.out / "hub-card.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
