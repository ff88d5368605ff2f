"""Wall time and memory of `pqweights plan` on checkpoints of many tensors and many shards, start-up included.

    python benchmarks/planning.py

The checkpoints have the names and shapes of DeepSeek-V3. Only their headers are written; each file is then extended to
its full size with os.truncate, so that it takes no room on the disk (nominally terabytes: the file system must support
sparse files). They are planned in turns, headers warm in the page cache, each time in a fresh process; the table shows
medians. The last rows are the least that any command costs: --help, and a plan of one small file. Memory for each
tensor is the peak above that of the same command with the small file, over the number of tensors.

Linux carries the peak of this script over to what it starts. So the checkpoints are made in another process, and the
peak of --help, which is lower, is not shown. Python may write bytecode, as in an installed package, even if the
environment says otherwise; the first run of each command is not counted.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import (
    PQWEIGHTS,
    Cell,
    Document,
    Run,
    argument_parser,
    machine,
    median_of,
    now,
    publish,
    run_command,
    table,
)

from pqweights.checkpoint.header import TensorSpec, build_header
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE, shard_name

HIDDEN, EXPERTS, EXPERT_ROWS, SCALE_BLOCK = 7168, 256, 2048, 128
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK]}


def layer_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a mixture-of-experts layer of DeepSeek-V3, without prefix (arXiv:2412.19437, section 4.2)."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_a_proj.weight": (1536, HIDDEN),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (24576, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (32768, 512),
        "self_attn.o_proj.weight": (HIDDEN, 16384),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.gate.e_score_correction_bias": (EXPERTS,),
    }
    for expert in ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS))):
        shapes[f"mlp.{expert}.gate_proj.weight"] = (EXPERT_ROWS, HIDDEN)
        shapes[f"mlp.{expert}.up_proj.weight"] = (EXPERT_ROWS, HIDDEN)
        shapes[f"mlp.{expert}.down_proj.weight"] = (HIDDEN, EXPERT_ROWS)
    return shapes


def stored_tensors(fp8: bool) -> Iterator[TensorSpec]:
    """An embedding, then an endless sequence of layers; with fp8, block scales before every linear weight."""
    yield TensorSpec("model.embed_tokens.weight", "BF16", (129280, HIDDEN))
    shapes = layer_shapes()
    for layer in itertools.count():
        for name, shape in shapes.items():
            name = f"model.layers.{layer}.{name}"
            if fp8 and "_proj" in name:
                yield TensorSpec(f"{name}_scale_inv", "F32", tuple(-(-n // SCALE_BLOCK) for n in shape))
                yield TensorSpec(name, "F8_E4M3", shape)
            else:
                yield TensorSpec(name, "BF16", shape)


def write_sparse_shard(path: Path, specs: Iterable[TensorSpec]) -> None:
    """Write a safetensors file whose data are a hole."""
    header, stored = build_header(path.name, list(specs), {"format": "pt"})
    path.write_bytes(header)
    os.truncate(path, stored[-1].offset + stored[-1].byte_count)


def make_checkpoint(folder: Path, shards: int, tensors_per_shard: int, fp8: bool = False) -> Path:
    """Write a checkpoint folder of headers, index and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    specs = stored_tensors(fp8)
    for number in range(shards):
        file = shard_name(number, shards)
        group = list(itertools.islice(specs, tensors_per_shard))
        write_sparse_shard(folder / file, group)
        weight_map |= {spec.name: file for spec in group}
    config = {"model_type": "deepseek_v3", "torch_dtype": "bfloat16"} | (
        {"quantization_config": FP8_CONFIG} if fp8 else {}
    )
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    name: what the table calls it
    arguments: those of pqweights
    tensors: how many tensors it plans
    base: the name of the case whose memory does not count as that of tensors, if there is one
    """

    name: str
    arguments: list[str]
    tensors: int = 0
    base: str | None = None


def make_cases(work: Path, shards: int, tensors: int) -> list[Case]:
    """Make the checkpoints, and return the cases. tensors: how many each shard has."""
    bf16, fp8 = (str(make_checkpoint(work / name, shards, tensors, fp8=name == "fp8")) for name in ("bf16", "fp8"))
    few, one = str(make_checkpoint(work / "few", shards, 10)), str(make_checkpoint(work / "one", 1, 10))
    many, small, small_json = (
        f"{shards} shards of {tensors}",
        "plan, 1 shard of 10 BF16 tensors",
        "plan --json of the same",
    )
    count = shards * tensors
    return [
        Case(name=f"plan, {many} BF16 tensors", arguments=["plan", bf16], tensors=count, base=small),
        Case(
            name=f"plan --json, {many} BF16 tensors",
            arguments=["plan", bf16, "--json"],
            tensors=count,
            base=small_json,
        ),
        Case(name=f"plan, {many} tensors, FP8 with scales", arguments=["plan", fp8], tensors=count, base=small),
        Case(name=f"plan, {shards} shards of 10 BF16 tensors", arguments=["plan", few]),
        Case(name=small, arguments=["plan", one]),
        Case(name=small_json, arguments=["plan", one, "--json"]),
        Case(name="--help", arguments=["--help"]),
    ]


def row_of(case: Case, found: dict[str, list[Run]]) -> dict[str, Any]:
    """Return a row of the document: the times, their median, the median of the peaks, and what of it a tensor takes."""
    runs = found[case.name]
    peak = median_of(runs, "peak_bytes") if "plan" in case.arguments else None
    base = None if case.base is None else median_of(found[case.base], "peak_bytes")
    return {
        "command": case.name,
        "median_seconds": median_of(runs, "exit_seconds"),
        "seconds": [run.exit_seconds for run in runs],
        "peak_bytes": peak,
        "bytes_per_tensor": None if peak is None or base is None else (peak - base) / case.tensors,
    }


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    rows: list[list[Cell]] = [
        [
            row["command"],
            f"{row['median_seconds']:.3f}",
            ", ".join(f"{value:.3f}" for value in row["seconds"]),
            None if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} MB",
            None if row["bytes_per_tensor"] is None else f"{row['bytes_per_tensor'] / 1e3:.1f} kB",
        ]
        for row in document["rows"]
    ]
    note = f"Median of {document['settings']['rounds']}, page cache warm, start-up of Python included."
    return {"planning": f"{note}\n\n{table(['command', 'seconds', 'the runs', 'peak memory', 'per tensor'], rows)}"}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made; by default a temporary folder")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--tensors", type=int, default=300, help="tensors per shard")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    start = now()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        with ProcessPoolExecutor(max_workers=1) as pool:
            cases = pool.submit(make_cases, Path(work), options.shards, options.tensors).result()
        found: dict[str, list[Run]] = {case.name: [] for case in cases}
        for number in range(options.rounds + 1):
            for case in cases:
                run = run_command([*PQWEIGHTS, *case.arguments])
                if number:
                    found[case.name].append(run)
    rows = [row_of(case, found) for case in cases]
    document = {"machine": machine(start), "settings": {"rounds": options.rounds}, "rows": rows}
    publish("planning", document, sections(document), options, ())


if __name__ == "__main__":
    main()
