"""What llama.cpp computes with the files: the logits of transformers in float32, at all positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_cases
import numpy as np
import pytest
import torch
from closeness import assert_near, assert_within, bound, deviation, distance
from gguf_cases import CASES, Case
from gguf_files import converted, write_gguf

from pqweights.kernels.gguf_encoding import BLOCK_TYPES, decode_blocks, encode_blocks
from pqweights.runtime.models import open_model

# How names begin -> a kind of closeness.py; all others compute as transformers does.
KINDS = {
    "gemma3n": "llama.cpp, thresholds",
    **dict.fromkeys(("gemma", "starcoder2"), "llama.cpp, gelu"),
    **dict.fromkeys(("qwen3 next", "qwen3_5", "qwen4", "kimi linear", "jamba"), "llama.cpp, states"),
}


@pytest.fixture(autouse=True)
def rotates_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hunyuan V4 with rotary embeddings of neighbouring channels, as vLLM has it; transformers rotates halves."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave
    from transformers.models.hy_v4 import modeling_hy_v4

    monkeypatch.setattr(modeling_hy_v4, "apply_rotary_pos_emb", apply_rotary_pos_emb_interleave)


def check(name: str, dtype: str, folder: Path, kind: str) -> None:
    case = CASES[name]
    model = gguf_cases.with_gelu_table(gguf_cases.saved(case, folder))
    ids = gguf_cases.token_ids(case.tokens)
    expected = gguf_cases.logits(model, ids)
    found = open_model(write_gguf(folder, dtype)).logits(np.array(ids), len(ids))
    assert_near(found, expected, kind)


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_predicts_what_transformers_does(name: str, tmp_path: Path) -> None:
    check(name, "F32", tmp_path, next((KINDS[start] for start in KINDS if name.startswith(start)), "llama.cpp"))


def test_where_transformers_rotates_other_channels_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, ids = gguf_cases.saved(CASES["hy v4"], tmp_path), gguf_cases.token_ids(80)
    found = open_model(write_gguf(tmp_path)).logits(np.array(ids), len(ids))
    assert deviation(found, gguf_cases.logits(model, ids)) > bound("llama.cpp")
    assert any("transformers" in note and "halves" in note for note in converted(tmp_path).notes)


# A layer that chooses 40 of 200 tokens, or 4 of 13 blocks, which llama.cpp does with flash attention only.
ONE = {"num_hidden_layers": 1, "index_topk": 40}
BLOCKS = {"index_block_size": 16, "index_topk_blocks": 4, "num_hidden_layers": 2}
BLOCKS |= {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
OF_FOUR = {"num_hidden_layers": 2, "index_topk": 10, "mlp_layer_types": ["moe"] * 2}
OF_FOUR |= {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}


@pytest.mark.parametrize(
    ("name", "settings", "dtype", "kind"),
    [
        ("glm dsa", ONE, "float32", "llama.cpp"),
        ("deepseek v3.2", ONE, "float32", "llama.cpp"),
        ("hy v4", ONE | {"indexer_types": ["full"], "mlp_layer_types": ["dense"]}, "float32", "llama.cpp"),
        ("deepseek v4", OF_FOUR, "float32", "llama.cpp"),
        ("minimax m3", BLOCKS, "auto", "llama.cpp, F16"),
    ],
)
def test_most_tokens_attend_to_those_that_transformers_chooses(
    name: str, settings: dict[str, Any], dtype: str, kind: str, tmp_path: Path
) -> None:
    """Where the scores of two are nearly equal, llama.cpp may choose the other: it compares them in half precision."""
    case = replace(CASES[name], settings=CASES[name].settings | settings, tokens=200)
    ids = gguf_cases.token_ids(case.tokens)
    expected = gguf_cases.logits(gguf_cases.saved(case, tmp_path), ids)
    found = open_model(write_gguf(tmp_path), dtype=dtype).logits(np.array(ids), len(ids))
    same = np.abs(found - expected).max(axis=1) < bound(kind) * np.abs(expected).max()
    assert same[:40].all() and same.mean() > 0.9


def test_qwen4_exp_attends_to_part_of_one_more_block_where_few_tokens_are_behind_the_last(tmp_path: Path) -> None:
    settings = {"indexer_budget": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    settings["ple_layer_ids"] = [1]
    case, ids = CASES["qwen4 exp"], gguf_cases.token_ids(120)
    expected = gguf_cases.logits(gguf_cases.saved(replace(case, settings=case.settings | settings), tmp_path), ids)
    found = open_model(write_gguf(tmp_path), dtype="float32").logits(np.array(ids), len(ids))
    same = np.abs(found - expected).max(axis=1) < bound("llama.cpp, states") * np.abs(expected).max()
    behind_last = np.arange(1, len(ids) + 1) % case.settings["indexer_compress_ratio"]
    assert same[:19].all() and same[behind_last == 3].mean() > 0.9 and not same[19:][behind_last[19:] < 3].any()


# Experts are chosen differently after rounding, which is a difference of another kind.
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama llama3", "F16"), ("qwen2", "BF16"), ("gemma3", "F16"), ("phi3 long", "BF16")]
)
def test_llama_cpp_predicts_what_transformers_does_in_half_precision(name: str, dtype: str, tmp_path: Path) -> None:
    check(name, dtype, tmp_path, f"llama.cpp, {dtype}")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_llama_cpp_computes_with_the_weights_that_blocks_decode_to(kind: str, tmp_path: Path) -> None:
    """The rows of q and k move in the file, and blocks are parts of rows."""
    case = Case(name="Llama", settings={"hidden_size": 256, "intermediate_size": 512})
    model, ids = gguf_cases.saved(case, tmp_path), gguf_cases.token_ids(40)
    found = open_model(write_gguf(tmp_path, kind)).logits(np.array(ids), len(ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                blocks = encode_blocks(kind, parameter.numpy(), None)
                parameter.copy_(torch.from_numpy(decode_blocks(kind, blocks.codes).reshape(parameter.shape)))
    expected = gguf_cases.logits(model, ids)
    # It rounds inputs of matrices to 8 bits.
    assert_within(distance(found, expected), "llama.cpp, blocks")
