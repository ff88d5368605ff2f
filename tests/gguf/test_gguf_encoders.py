"""What llama.cpp computes with files of encoders: the vectors, scores and logits of transformers."""

from __future__ import annotations

from pathlib import Path

import encoder_cases
import llama_embeddings
import pytest
import torch
from closeness import assert_near
from encoder_cases import ANSWERING, CASES, SCORING, Case
from gguf_files import write_gguf


def kind(case: Case) -> str:
    return "llama.cpp" if case.exact else "llama.cpp, gelu"


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    case, ids = CASES[name], encoder_cases.token_ids(80)
    expected = encoder_cases.vectors(encoder_cases.saved(case, tmp_path), ids)
    assert_near(llama_embeddings.token_vectors(write_gguf(tmp_path), ids), expected, kind(case))


@pytest.mark.parametrize("name", SCORING)
def test_llama_cpp_computes_the_scores_of_transformers(name: str, tmp_path: Path) -> None:
    """Of rerankers and classifiers."""
    case, ids = SCORING[name], encoder_cases.token_ids(40)
    model = encoder_cases.saved(case, tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = llama_embeddings.pooled(write_gguf(tmp_path), ids, scores=len(expected))
    assert_near(found, expected, kind(case))


@pytest.mark.parametrize("name", ANSWERING)
def test_llama_cpp_computes_the_logits_of_encoders_with_decoders(name: str, tmp_path: Path) -> None:
    case, ids, answer = ANSWERING[name], encoder_cases.token_ids(60), [0, *encoder_cases.token_ids(30)]
    model = encoder_cases.saved(case, tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([answer])).logits[0].numpy()
    assert_near(llama_embeddings.decoded(write_gguf(tmp_path), ids, answer), expected, kind(case))
