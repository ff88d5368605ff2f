"""What llama.cpp computes with files of encoders: the vectors and scores of transformers and sentence-transformers.

Differences are the largest of all values, in units of their standard deviation.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import encoder_cases
import llama_embeddings
from encoder_cases import CASES
from external_runtimes import need
from gguf_files import write_gguf
from helpers import Array, run_command

need("llama.cpp")


def difference(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / expected.std())


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    case, ids = CASES[name], encoder_cases.token_ids(80)
    expected = encoder_cases.vectors(encoder_cases.saved(case, tmp_path), ids)
    assert difference(llama_embeddings.token_vectors(write_gguf(tmp_path), ids), expected) < case.bound


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("pooling_mode_cls_token", lambda vectors: vectors[0]), ("pooling_mode_mean_tokens", lambda v: v.mean(axis=0)),
     ("pooling_mode_lasttoken", lambda vectors: vectors[-1])],
)  # fmt: skip
def test_vectors_are_pooled_as_sentence_transformers_pools_them(mode: str, expected, tmp_path: Path) -> None:
    ids = encoder_cases.token_ids(40)
    vectors = encoder_cases.vectors(encoder_cases.saved(CASES["bert"], tmp_path), ids)
    encoder_cases.pooling(tmp_path, mode)
    found = llama_embeddings.pooled(write_gguf(tmp_path), ids)
    assert difference(found, expected(vectors)) < CASES["bert"].bound
