"""What llama.cpp computes with files of encoders: the vectors, scores and logits of transformers.

Differences are the largest of all values, in units of their standard deviation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import encoder_cases
import llama_embeddings
import torch
from encoder_cases import ANSWERING, CASES, SCORING, Case
from external_runtimes import need
from gguf_files import write_gguf
from helpers import Array

need("llama.cpp")


def difference(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / expected.std())


def bound(case: Case) -> float:
    return 2e-5 if case.exact else 1e-3


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    case, ids = CASES[name], encoder_cases.token_ids(80)
    expected = encoder_cases.vectors(encoder_cases.saved(case, tmp_path), ids)
    assert difference(llama_embeddings.token_vectors(write_gguf(tmp_path), ids), expected) < bound(case)


@pytest.mark.parametrize("name", SCORING)
def test_llama_cpp_computes_the_scores_of_transformers(name: str, tmp_path: Path) -> None:
    """Of rerankers and classifiers."""
    case, ids = SCORING[name], encoder_cases.token_ids(40)
    model = encoder_cases.saved(case, tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = llama_embeddings.pooled(write_gguf(tmp_path), ids, scores=len(expected))
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("name", ANSWERING)
def test_llama_cpp_computes_the_logits_of_encoders_with_decoders(name: str, tmp_path: Path) -> None:
    case, ids, answer = ANSWERING[name], encoder_cases.token_ids(60), [0, *encoder_cases.token_ids(30)]
    model = encoder_cases.saved(case, tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([answer])).logits[0].numpy()
    assert difference(llama_embeddings.decoded(write_gguf(tmp_path), ids, answer), expected) < bound(case)
