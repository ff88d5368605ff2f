"""Models for the tests of folding: tiny ones of all families, with channels of very different sizes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from helpers import Tensor, as_float32, bf16, f16, f32, read_all, safetensors_bytes, write_checkpoint

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.planning.plan import KEEP
from pqweights.planning.recipe import load_recipe
from pqweights.rewrite.folding.fold import Fold
from pqweights.rewrite.quantizing import Quantize

Floats = npt.NDArray[np.float32]
STORE = {"F32": f32, "F16": f16, "BF16": bf16}


def rewritten(source: Path, out: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Copy a checkpoint with other tensors, in one file."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    (out / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return out


def uneven(source: Path, out: Path, dtype: str = "F32", seed: int = 0) -> Path:
    """Copy a checkpoint with gains, biases, rows and columns of different sizes."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, stored in read_all(source).items():
        values = as_float32(stored)
        if values.ndim == 1 and "norm" in name:
            values = values + 0.7 * random.standard_normal(values.shape)
        elif name.endswith("bias"):
            values = 0.3 * random.standard_normal(values.shape)
        elif values.ndim >= 2:
            columns, rows = (np.exp(random.standard_normal(values.shape[axis])) for axis in (-1, -2))
            values = values * columns * rows[:, None]
        tensors[name] = STORE[dtype](values.astype(np.float32))
    return rewritten(source, out, tensors)


def kept(checkpoint: Checkpoint, recipe: str = "q5") -> list[str]:
    """The tensors that quantizing with a recipe stores plainly."""
    planned = Quantize(recipe=load_recipe(recipe)).plan(checkpoint)
    return [tensor.name for tensor in planned if tensor.action == KEEP]


def measured(folder: Path, work: Path, *, threads: int = 2) -> Fold:
    """The fold of a checkpoint, with its factors."""
    checkpoint = open_local(folder)
    fold = Fold(checkpoint, plain=kept(checkpoint))
    work.mkdir(parents=True, exist_ok=True)
    fold.measure(work, fetched=work, threads=threads, progress=lambda *_: None)
    return fold


def say_rotated(master: Path) -> None:
    """Make the manifest of a folded master say what earlier versions did of one that they made with --fold rotate."""
    manifest = json.loads((master / "pqweights.json").read_bytes())
    manifest["fold"] = {"kind": "rotate", "block": WIDTH, "factors_sha256": manifest["fold"]["factors_sha256"]}
    for tensor in manifest["tensors"]:
        if "folded" in tensor:
            tensor["folded"] = ["residual stream"]
    (master / "pqweights.json").write_text(json.dumps(manifest, indent=2) + "\n")


def columns_of(fold: Fold) -> dict[str, Floats]:
    """The factors of the columns that read each vector that is folded, [matrices, channels], by its name."""
    found = {link.name: fold._columns(number) for number, link in enumerate(fold.structure.links)}
    return {name: columns for name, columns in found.items() if columns is not None}


def values_of(tensor: LogicalTensor) -> Floats:
    """A whole tensor in float32."""
    raw = np.empty(4 * math.prod(tensor.shape), dtype=np.uint8)
    tensor.read(0, math.prod(tensor.shape), "F32", raw)
    return raw.view(np.float32).reshape(tensor.shape)


def folded_values(fold: Fold) -> dict[str, Floats]:
    """All tensors of a folded checkpoint in float32."""
    return {tensor.name: values_of(tensor) for tensor in fold.folded.tensors}


WIDTH, WIDE, HEADS, KEY_HEADS, HEAD = 128, 256, 4, 2, 32
LAYERS = 3
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def spread(*shape: int, seed: int) -> Floats:
    """A matrix with rows and columns of different sizes."""
    random = np.random.default_rng(seed)
    columns, rows = np.exp(random.standard_normal(shape[-1])), np.exp(random.standard_normal(shape[-2]))
    return (0.02 * random.standard_normal(shape) * columns * rows[:, None]).astype(np.float32)


def llama_tensors(dtype: str = "BF16") -> dict[str, Tensor]:
    """The tensors of a Llama of three layers, with channels of very different sizes."""
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD, WIDTH),
        "self_attn.k_proj": (KEY_HEADS * HEAD, WIDTH),
        "self_attn.v_proj": (KEY_HEADS * HEAD, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD),
        "mlp.gate_proj": (WIDE, WIDTH),
        "mlp.up_proj": (WIDE, WIDTH),
        "mlp.down_proj": (WIDTH, WIDE),
    }
    result: dict[str, Floats] = {"model.embed_tokens.weight": spread(96, WIDTH, seed=1)}
    for layer in range(LAYERS):
        for number, (name, shape) in enumerate(sizes.items()):
            result[f"model.layers.{layer}.{name}.weight"] = spread(*shape, seed=100 * layer + number + 10)
        for number, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            result[f"model.layers.{layer}.{name}.weight"] = gains(seed=100 * layer + number + 50)
    result |= {"model.norm.weight": gains(seed=5), "lm_head.weight": spread(96, WIDTH, seed=6)}
    return {name: STORE[dtype](values) for name, values in result.items()}


def gains(seed: int) -> Floats:
    """The gains of a norm."""
    return np.exp(np.random.default_rng(seed).standard_normal(WIDTH)).astype(np.float32)


def llama(folder: Path, dtype: str = "BF16", shards: int = 1) -> Path:
    """Write that Llama. With several shards, all norms of layers lie in the first, and the last norm in the last."""
    tensors = llama_tensors(dtype)
    if shards == 1:
        return write_checkpoint(folder, tensors, config=CONFIG)
    norms = [name for name in tensors if "layernorm" in name]
    others = [name for name in tensors if name not in norms and name not in ("lm_head.weight", "model.norm.weight")]
    step = -(-len(others) // (shards - 2))
    groups = [norms, *(others[at : at + step] for at in range(0, len(others), step)), ["model.norm.weight"]]
    groups[1] = ["lm_head.weight", *groups[1]]
    return write_checkpoint(folder, *({name: tensors[name] for name in group} for group in groups), config=CONFIG)
