"""Kinds of rotary embeddings and of windows, in every target: each runtime computes what transformers does with the
source, or the export says that it does not, or refuses.

Texts are shorter than windows and original lengths, or longer. The layers of Gemma, OLMo 3 and Cohere 2 differ, those
of Qwen have a window from the second on, and those of Mistral, Phi and StarCoder all have one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from closeness import bound, distance
from gguf_cases import with_gelu_table
from gguf_files import converted, write_gguf
from position_cases import logits_of_mlx, read_by_mlx, saved

from pqweights.checkpoint.positions import stated_once
from pqweights.errors import ExportError
from pqweights.runtime.models import open_model

SHORT, LENGTH = 8, 24
WINDOW = {"sliding_window": 8}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window_pattern": 2}
HEADS = {"head_dim": 32}
UPPER = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
# What configurations state beside rotary embeddings.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2, windows": UPPER,
    "qwen3": HEADS,
    "qwen3, windows": UPPER | HEADS,
    "mistral": {"sliding_window": None},
    "mistral, windows": WINDOW,
    "phi3": {"sliding_window": None},
    "phi3, windows": WINDOW,
    "starcoder2": {"sliding_window": None},
    "starcoder2, windows": WINDOW,
    "ministral3": {"sliding_window": None, **HEADS},
    "ministral3, windows": WINDOW | HEADS,
    "gemma2, windows": WINDOW | HEADS | KINDS | {"query_pre_attn_scalar": 32},
    "gemma3_text, windows": WINDOW | HEADS | {"query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    "olmo3, windows": WINDOW | KINDS,
    "cohere2, windows": WINDOW | KINDS,
    "glm4": {"partial_rotary_factor": 0.5, **HEADS},
}
ORIGINAL = {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, exact": YARN | {"truncate": False},
    "yarn, attention": YARN | {"attention_factor": 0.7},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"rope_type": "longrope", **ORIGINAL},
}


def stated(family: str, variant: str) -> dict[str, Any]:
    """A configuration as transformers 5 writes it, with the kind of rotary embeddings in layers with full attention."""
    about = FAMILIES[family]
    rope = {"rope_theta": 500.0} | VARIANTS[variant]
    if variant == "longrope":
        count = 8 if "partial_rotary_factor" in about else 16
        rope |= {"short_factor": [1.0 + n / 8 for n in range(count)], "long_factor": [1.0 + n for n in range(count)]}
    if "partial_rotary_factor" in about:
        rope["partial_rotary_factor"] = about["partial_rotary_factor"]
    if family.startswith("ministral3"):
        rope |= {"llama_4_scaling_beta": 0.1, **ORIGINAL}
    if family.startswith(("gemma3_text", "olmo3")):
        local = {"rope_type": "default", "rope_theta": 500.0}
        rope = {"full_attention": rope, "sliding_attention": local}
    length = {"max_position_embeddings": 16} if variant == "dynamic" else {}
    outer = ORIGINAL if variant == "longrope" else {}
    return {"model_type": family.partition(",")[0], **about, **length, **outer, "rope_parameters": rope}


def logits(model: Any, length: int) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        found: npt.NDArray[np.float32] = model(torch.tensor([ids(length)])).logits[0].numpy()
    return found


def ids(length: int) -> list[int]:
    return [(7 * n * n + 3) % 128 for n in range(length)]


def outcome(model: Any, said: bool, found: dict[int, npt.NDArray[np.float32]]) -> str:
    """Whether a runtime computes the same for texts of both lengths, in one letter.

    s: the same; l: not for long texts, k: not for short ones, w: for neither, and it is said; o: the same here,
    although something is said; x: not the same, and nothing is said
    """
    same = [distance(found[length], logits(model, length)) < bound("llama.cpp, gelu") for length in (SHORT, LENGTH)]
    if not said:
        return "s" if all(same) else "x"
    return {(True, True): "o", (True, False): "l", (False, True): "k", (False, False): "w"}[same[0], same[1]]


def by_llama_cpp(model: Any, folder: Path) -> str:
    try:
        said = bool(converted(folder).notes)
    except ExportError:
        return "r"
    path = write_gguf(folder, "F32")
    found = {length: open_model(path).logits(np.array(ids(length)), length) for length in (SHORT, LENGTH)}
    return outcome(with_gelu_table(model), said, found)


def by_mlx(model: Any, folder: Path) -> str:
    try:
        read = read_by_mlx(folder)
    except ExportError:
        return "r"
    found = {length: logits_of_mlx(read.config, folder, ids(length)) for length in (SHORT, LENGTH)}
    return outcome(model, bool(read.warnings), found)


def by_transformers(model: Any, folder: Path) -> str:
    """What bf16, vllm and torchao exports are read as."""
    exported = folder.parent / "bf16"
    exported.mkdir()
    shutil.copy(folder / "model.safetensors", exported)
    config = stated_once(json.loads((folder / "config.json").read_text()))
    (exported / "config.json").write_text(json.dumps(config))
    again = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    return outcome(model, False, {length: logits(again, length) for length in (SHORT, LENGTH)})


# By the columns of VARIANTS, what mlx-lm and llama.cpp make of a model, in the letters of `outcome`; r: it is refused;
# -: transformers does not take the configuration. What llama.cpp makes of LongRoPE depends on the size of its context.
EXPECTED: dict[str, tuple[str, str]] = {
    #                          mlx-lm      llama.cpp
    "llama": ("sssswssk", "ssrsrssk"),
    "qwen2": ("sssswssk", "ssrsrsrr"),
    "qwen2, windows": ("llllwllw", "llrlrlrr"),
    "qwen3": ("sssswssk", "ssrsrsrr"),
    "qwen3, windows": ("llllwllw", "llrlrlrr"),
    "mistral": ("sssswssk", "ssrsrssk"),
    "mistral, windows": ("llllwllw", "llrlrllw"),
    "phi3": ("s------k", "s------k"),
    "phi3, windows": ("l------w", "l------w"),
    "starcoder2": ("swlwwwww", "ssrsrsrr"),
    "starcoder2, windows": ("lwlwwwww", "llrlrlrr"),
    "ministral3": ("sssswrsk", "ssrsrssk"),
    "ministral3, windows": ("llllwrlw", "llrlrllw"),
    "gemma2, windows": ("lwlwwwww", "srrrrrrr"),
    "gemma3_text, windows": ("ssssossk", "ssrrrrrr"),
    "olmo3, windows": ("ssssossk", "ssrsrsrr"),
    "cohere2, windows": ("swlwwwww", "srrrrrrr"),
    "glm4": ("swlwwwww", "ssrsrsrr"),
}
CELLS = [
    (family, variant) for family in FAMILIES for n, variant in enumerate(VARIANTS) if EXPECTED[family][0][n] != "-"
]


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_targets_compute_what_transformers_does_or_say_what_not(family: str, variant: str, tmp_path: Path) -> None:
    column, folder = list(VARIANTS).index(variant), tmp_path / "src"
    model = saved(folder, stated(family, variant))
    assert by_transformers(model, folder) == "s"
    assert (by_mlx(model, folder), by_llama_cpp(model, folder)) == tuple(row[column] for row in EXPECTED[family])
