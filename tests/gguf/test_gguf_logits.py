"""What llama.cpp computes with the files: the logits of transformers in float32, at all positions.

Differences are the largest of all logits, in units of their standard deviation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import gguf_cases
import torch
from external_runtimes import need
from gguf_cases import CASES, Case
from gguf_files import write_gguf

from pqweights.inference.runtimes.models import open_model
from pqweights.kernels.gguf_encoding import decode_blocks, encode_blocks
from pqweights.kernels.gguf_types import BLOCK_TYPES

need("llama.cpp")

# ggml takes values of gelu from a table of half-precision numbers: where two are as near, it may take the other.
BY_TABLE = ("gemma", "starcoder2")
# In ten layers of Gemma 3n the activations above a bound count only, so that small differences grow.
SPARSE = ("gemma3n",)
# transformers adds up the states of DeltaNet chunk by chunk, and llama.cpp in chunks of another size; those of Mamba 1
# in another order.
STATES = ("qwen3 next", "qwen3_5", "kimi linear", "jamba")
# llama.cpp rounds the inputs of matrices to the type of the matrix.
BOUNDS = {"F32": 2e-5, "F16": 0.02, "BF16": 0.15}


def difference(name: str, dtype: str, folder: Path) -> float:
    case = CASES[name]
    model = gguf_cases.with_gelu_table(gguf_cases.saved(case, folder))
    ids = gguf_cases.token_ids(case.tokens)
    expected = gguf_cases.logits(model, ids)
    found = open_model(write_gguf(folder, dtype)).logits(np.array(ids), len(ids))
    return float(np.abs(found - expected).max() / expected.std())


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_predicts_what_transformers_does(name: str, tmp_path: Path) -> None:
    bound = 5e-3 if name.startswith(BY_TABLE) else 2e-4 if name.startswith(STATES) else BOUNDS["F32"]
    bound = 0.1 if name in SPARSE else bound
    assert difference(name, "F32", tmp_path) < bound


# A layer that chooses 40 of 200 tokens, or 4 of 13 blocks, which llama.cpp does with flash attention only.
ONE = {"num_hidden_layers": 1, "index_topk": 40}
BLOCKS = {"index_block_size": 16, "index_topk_blocks": 4, "num_hidden_layers": 2}
BLOCKS |= {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
OF_FOUR = {"num_hidden_layers": 2, "index_topk": 10, "mlp_layer_types": ["moe"] * 2}
OF_FOUR |= {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}


@pytest.mark.parametrize(
    ("name", "settings", "dtype", "bound"),
    [
        ("glm dsa", ONE, "float32", BOUNDS["F32"]),
        ("deepseek v3.2", ONE, "float32", BOUNDS["F32"]),
        ("deepseek v4", OF_FOUR, "float32", BOUNDS["F32"]),
        ("minimax m3", BLOCKS, "auto", BOUNDS["F16"]),
    ],
)
def test_most_tokens_attend_to_those_that_transformers_chooses(
    name: str, settings: dict[str, Any], dtype: str, bound: float, tmp_path: Path
) -> None:
    """Where the scores of two are nearly equal, llama.cpp may choose the other: it compares them in half precision."""
    case = replace(CASES[name], settings=CASES[name].settings | settings, tokens=200)
    ids = gguf_cases.token_ids(case.tokens)
    expected = gguf_cases.logits(gguf_cases.saved(case, tmp_path), ids)
    found = open_model(write_gguf(tmp_path), dtype=dtype).logits(np.array(ids), len(ids))
    same = np.abs(found - expected).max(axis=1) < bound * expected.std()
    assert same[:40].all() and same.mean() > 0.9


# Experts are chosen differently after rounding, which is a difference of another kind.
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama llama3", "F16"), ("qwen2", "BF16"), ("gemma3", "F16"), ("phi3 long", "BF16")]
)
def test_llama_cpp_predicts_what_transformers_does_in_half_precision(name: str, dtype: str, tmp_path: Path) -> None:
    assert difference(name, dtype, tmp_path) < BOUNDS[dtype]


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
                parameter.copy_(torch.from_numpy(decode_blocks(kind, blocks.data).reshape(parameter.shape)))
    expected = gguf_cases.logits(model, ids)
    # It rounds inputs of matrices to 8 bits.
    assert np.sqrt(np.mean(np.square(found - expected))) < 0.08 * expected.std()
