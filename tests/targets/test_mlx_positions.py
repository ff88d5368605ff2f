"""Rotary embeddings and windows of MLX exports: mlx-lm computes what transformers does, or the export says what not.

The weights are loaded by mlx-lm as they are, with the configuration that the export would write. Families are those of
test_position_matrix.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from position_cases import distance, read_by_mlx, saved

from pqweights.errors import ExportError

EXPERTS = {
    "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LONG = {"short_factor": [1.0] * 16, "long_factor": [1.0 + n for n in range(16)]}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 32}
LENGTH = 24

# What configurations state; nothing is said of these, as mlx-lm computes the same.
SAME: dict[str, dict[str, Any]] = {
    "rope_scaling beside rope_parameters": {
        "model_type": "qwen3", "head_dim": 32, "rope_parameters": DEFAULT, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "two bases": {
        "model_type": "llama", "rope_theta": 5e5, "rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 2},
    },
    "yarn without an original length": {
        "model_type": "llama", "rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "yarn with one mscale": {"model_type": "qwen2", "rope_parameters": DEFAULT | {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.5,
    }},
    "a base by default": {"model_type": "qwen2"},
    "a kind that others call type": {
        "model_type": "nemotron", "rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 2.0},
    },
    "alpha of HunYuan": {"model_type": "hunyuan_v1_dense", "head_dim": 32, "tie_word_embeddings": True,
        "rope_parameters": DEFAULT | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "names of GPT NeoX": {
        "model_type": "gpt_neox", "rotary_emb_base": 500, "rotary_pct": 0.5, "intermediate_size": 512,
    },
    "kinds of layers by older keys": {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "rope_theta": 5e3, "rope_local_base_freq": 50.0,
        "sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 32,
    },
    "kinds of layers of OLMo 3": {"model_type": "olmo3", **KINDS},
}  # fmt: skip
# What is said; in short texts, or in long ones, mlx-lm computes the same.
WINDOW = {"sliding_window": 8}
WARNED: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "mistral": ({"model_type": "mistral", **WINDOW}, "more than 8 tokens", 8, LENGTH),
    "qwen2": (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, **WINDOW},
        "whole context in 1 layers .* more than 8 tokens", 8, LENGTH,
    ),
    "linear scaling": (
        {"model_type": "qwen2_moe", "rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 8}, **EXPERTS},
        "ignores the scaling .*linear.* any length", 1, LENGTH,
    ),
    "long factors": (
        {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 16,
         "rope_theta": 50.0, "rope_scaling": {"type": "longrope", **LONG}},
        "the long factors of LongRoPE .* at most 16 tokens", LENGTH, 16,
    ),
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "a base of layers with full attention alone": {"model_type": "olmo3", **KINDS, "rope_theta": 5e3},
    "whole heads instead of halves": {"model_type": "glm", "head_dim": 32},
    "an activation that mlx-lm ignores": {"model_type": "llama", "hidden_act": "gelu"},
    "kinds of layers out of order": {
        "model_type": "gemma3_text", "head_dim": 32, "num_hidden_layers": 3, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "layers without positions out of order": {
        "model_type": "cohere2", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_mlx_lm_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "src", SAME[name])
    read = read_by_mlx(tmp_path / "src")
    assert read.warnings == ()
    assert distance(model, read, tmp_path / "src", LENGTH) < 1e-3


@pytest.mark.parametrize("name", WARNED)
def test_what_mlx_lm_computes_otherwise_is_said_with_the_length(name: str, tmp_path: Path) -> None:
    stated, message, same, other = WARNED[name]
    model = saved(tmp_path / "src", stated)
    read = read_by_mlx(tmp_path / "src")
    (warning,) = read.warnings
    assert re.search(message, warning), warning
    assert distance(model, read, tmp_path / "src", same) < 1e-3
    assert distance(model, read, tmp_path / "src", other) > 0.02


@pytest.mark.parametrize("name", REFUSED)
def test_what_mlx_lm_computes_otherwise_at_every_length_is_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "src", REFUSED[name])
    with raises(ExportError, "config.json", "mlx-lm", "use --target"):
        read_by_mlx(tmp_path / "src")


def test_window_that_no_text_fills_is_not_spoken_of(tmp_path: Path) -> None:
    saved(tmp_path / "src", {"model_type": "mistral", "sliding_window": 64})
    assert read_by_mlx(tmp_path / "src").warnings == ()
