"""Make a synthetic checkpoint: BF16 Gaussian weights under a Llama's names, in shards, one tensor of a given size.

    python benchmarks/synthetic.py FOLDER --total 4GB --largest 1GB --shard 1GB

Files are streamed: memory holds one random block, whose rolled copies fill the tensors. Sizes are accurate to a layer.
The other benchmarks make their checkpoints with this script.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pqweights.checkpoint.header import TensorSpec, build_header
from pqweights.checkpoint.names import shard_name
from pqweights.common.units import parse_size

BLOCK_WEIGHTS = 1 << 22
ITEM_BYTES = 2


def hidden_size(total_bytes: int) -> int:
    """A hidden size with which there are several layers, but not too many."""
    return 4096 if total_bytes >= 8 * 10**9 else 2048 if total_bytes >= 5 * 10**8 else 512


def tensor_specs(total_bytes: int, largest_bytes: int, head: bool = True) -> list[TensorSpec]:
    """An embedding of about largest_bytes, whole layers, and perhaps a head of the size that is left."""
    hidden = hidden_size(total_bytes)
    row_bytes = hidden * ITEM_BYTES
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (max(1, largest_bytes // row_bytes), hidden))]
    left = total_bytes - specs[0].byte_count
    number = 0
    while left >= (layer_bytes := sum(spec.byte_count for spec in layer_specs(number, hidden))):
        specs += layer_specs(number, hidden)
        left -= layer_bytes
        number += 1
    specs.append(TensorSpec("model.norm.weight", "BF16", (hidden,)))
    if head and left // row_bytes:
        specs.append(TensorSpec("lm_head.weight", "BF16", (left // row_bytes, hidden)))
    return specs


def layer_specs(number: int, hidden: int) -> list[TensorSpec]:
    """The tensors of one decoder layer."""
    shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (hidden * 11 // 4, hidden),
        "mlp.up_proj": (hidden * 11 // 4, hidden),
        "mlp.down_proj": (hidden, hidden * 11 // 4),
    }
    return [TensorSpec(f"model.layers.{number}.{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def shards(specs: list[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """The tensors in order, cut where a file would exceed shard_bytes."""
    result: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if result[-1] and sum(s.byte_count for s in result[-1]) + spec.byte_count > shard_bytes:
            result.append([])
        result[-1].append(spec)
    return result


def random_block(seed: int) -> np.ndarray:  # [BLOCK_WEIGHTS] BF16 as u16
    """Gaussian weights of standard deviation 0.02, truncated (not rounded) to BF16."""
    values = np.random.default_rng(seed).standard_normal(BLOCK_WEIGHTS, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def pieces(block: np.ndarray, weights: int, chance: np.random.Generator) -> Iterator[np.ndarray]:
    """That many weights as slices of the block, each from a random start."""
    while weights:
        start = int(chance.integers(BLOCK_WEIGHTS - 1))
        piece = block[start : start + weights]
        yield piece
        weights -= len(piece)


def write_shard(stream: BinaryIO, header: bytes, stored: list[TensorSpec], *, seed: int, block: np.ndarray) -> None:
    """Write one file."""
    chance = np.random.default_rng(seed)
    stream.write(header)
    for spec in stored:
        for piece in pieces(block, spec.byte_count // ITEM_BYTES, chance):
            stream.write(piece.data)


def llama_config(specs: list[TensorSpec], hidden: int) -> dict:
    """The config.json. Embeddings are tied although there may be a head, which only fills up the size."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": sum(spec.name.endswith("q_proj.weight") for spec in specs),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "vocab_size": specs[0].shape[0],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }


def make_checkpoint(
    folder: Path, *, total_bytes: int, largest_bytes: int, shard_bytes: int, seed: int = 0, head: bool = True
) -> dict:
    """Write the checkpoint, and say what it holds. Without a head transformers loads it as a model."""
    folder.mkdir(parents=True, exist_ok=True)
    specs, block = tensor_specs(total_bytes, largest_bytes, head), random_block(seed)
    weight_map: dict[str, str] = {}
    cut = shards(specs, shard_bytes)
    for number, group in enumerate(cut):
        file = shard_name(number, len(cut))
        header, stored = build_header(file, group, {"format": "pt"})
        with open(folder / file, "wb") as stream:
            data = [TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in stored]
            write_shard(stream, header, data, seed=seed + number, block=block)
        weight_map |= {spec.name: file for spec in group}
    written = sum(spec.byte_count for spec in specs)
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = llama_config(specs, hidden_size(total_bytes))
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "folder": str(folder),
        "bytes": written,
        "largest_tensor_bytes": max(spec.byte_count for spec in specs),
        "tensors": len(specs),
        "files": len(cut),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total", type=parse_size, default="1GB")
    parser.add_argument("--largest", type=parse_size, default="256MB")
    parser.add_argument("--shard", type=parse_size, default="1GB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-head", action="store_true", help="leave out the head, which only fills up the size")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    made = make_checkpoint(
        options.folder,
        total_bytes=options.total,
        largest_bytes=options.largest,
        shard_bytes=options.shard,
        seed=options.seed,
        head=not options.no_head,
    )
    if options.json:
        print(json.dumps(made, indent=2))
    else:
        print(
            f"{made['folder']}: {made['bytes']} bytes in {made['tensors']} tensors and {made['files']} files, "
            f"the largest tensor {made['largest_tensor_bytes']} bytes"
        )


if __name__ == "__main__":
    main()
