"""What `eval` measures in tests: a tiny model with 128 tokens of context, its master, an export of that, and a text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import export, quantize
from families import build, causal
from shared import made_once, run_folder

from pqweights.planning.recipe import load_recipe

CONTEXT = 128
TEXT = " ".join(f"w{number}" for number in np.random.default_rng(8).integers(0, 500, 300))
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
}  # fmt: skip


def model_folder(folder: Path, **settings: Any) -> Path:
    """The model. settings: of its configuration, in place of the usual ones"""
    return build(causal("Llama", **SIZES | settings), folder)


def evaluated(factory: pytest.TempPathFactory, name: str) -> Path:
    """A new folder with source, its master q3, the BF16 export bf16 of that, and text.txt. name: of the folder"""
    made = made_once(run_folder(factory.getbasetemp()) / "evaluated", _make)
    return Path(shutil.copytree(made, factory.mktemp(name), dirs_exist_ok=True))


def _make(folder: Path) -> None:
    model_folder(folder / "source")
    quantize(folder / "source", folder / "q3", load_recipe("q3"), threads=2)
    export(folder / "q3", folder / "bf16", "bf16", threads=2)
    (folder / "text.txt").write_text(TEXT)
