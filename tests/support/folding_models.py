"""Models for the tests of folding: tiny ones of all families, with channels of very different sizes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from helpers import Tensor, as_float32, bf16, f16, f32, read_all, safetensors_bytes

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.folding.fold import EQUALIZE, Fold
from pqweights.planning.plan import KEEP
from pqweights.planning.recipe import load_recipe
from pqweights.quantizing import Quantize

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


def measured(folder: Path, work: Path, threads: int = 2) -> Fold:
    """The fold of a checkpoint, with its factors."""
    checkpoint = open_local(folder)
    fold = Fold(EQUALIZE, checkpoint, plain=kept(checkpoint))
    work.mkdir(parents=True, exist_ok=True)
    fold.measure(work, fetched=work, threads=threads, progress=lambda *_: None)
    return fold


def values_of(tensor: LogicalTensor) -> Floats:
    """A whole tensor in float32."""
    raw = np.empty(4 * math.prod(tensor.shape), dtype=np.uint8)
    tensor.read(0, math.prod(tensor.shape), "F32", raw)
    return raw.view(np.float32).reshape(tensor.shape)


def folded_values(fold: Fold) -> dict[str, Floats]:
    """All tensors of a folded checkpoint in float32."""
    return {tensor.name: values_of(tensor) for tensor in fold.folded.tensors}
