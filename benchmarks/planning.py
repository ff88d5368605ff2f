"""Wall time of `pqweights plan` on checkpoints of many tensors and many shards, start-up included.

    python benchmarks/planning.py

The checkpoints have the names and shapes of DeepSeek-V3. Only their headers are written; each file is then extended to
its full size with os.truncate, so that it takes no room on the disk (nominally terabytes: the file system must support
sparse files). They are planned in turns, headers warm in the page cache, each time in a fresh process; the table shows
medians. The last two rows are the least that any command costs: --help, and a plan of one small file.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness import PQWEIGHTS, Document, argument_parser, machine, now, publish, table

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


def seconds(arguments: list[str]) -> float:
    """The wall time of one command in a process of its own."""
    start = time.perf_counter()
    subprocess.run([*PQWEIGHTS, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    rows = [
        [row["command"], f"{row['median_seconds']:.3f}", ", ".join(f"{value:.3f}" for value in row["seconds"])]
        for row in document["rows"]
    ]
    note = f"Median of {document['settings']['rounds']}, page cache warm, start-up of Python included."
    return {"planning": f"{note}\n\n{table(['command', 'seconds', 'the runs'], rows)}"}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made; by default a temporary folder")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--tensors", type=int, default=300, help="tensors per shard")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    start = now()
    shards, tensors = options.shards, options.tensors
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        bf16 = str(make_checkpoint(Path(work) / "bf16", shards, tensors))
        fp8 = str(make_checkpoint(Path(work) / "fp8", shards, tensors, fp8=True))
        few = str(make_checkpoint(Path(work) / "few", shards, 10))
        one = str(make_checkpoint(Path(work) / "one", 1, 10))
        commands = {
            f"plan, {shards} shards of {tensors} BF16 tensors": ["plan", bf16],
            f"plan --json, {shards} shards of {tensors} BF16 tensors": ["plan", bf16, "--json"],
            f"plan, {shards} shards of {tensors} tensors, FP8 with scales": ["plan", fp8],
            f"plan, {shards} shards of 10 BF16 tensors": ["plan", few],
            "plan, 1 shard of 10 BF16 tensors": ["plan", one],
            "--help": ["--help"],
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, arguments in commands.items():
                found[name].append(seconds(arguments))
    rows = [
        {"command": name, "median_seconds": statistics.median(values), "seconds": values}
        for name, values in found.items()
    ]
    document = {"machine": machine(start), "settings": {"rounds": options.rounds}, "rows": rows}
    publish("planning", document, sections(document), options)


if __name__ == "__main__":
    main()
