"""Exports of a model with modules of sentence-transformers load there, and give its vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers as sentences

import pqweights

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = ["abc", "hello world"]
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT whose vectors are pooled."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("sentences") / "source"
    words = ["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).bfloat16().save_pretrained(folder)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def vectors(folder: Path) -> np.ndarray:
    return np.asarray(sentences.SentenceTransformer(str(folder), device="cpu").encode(TEXTS))


@pytest.mark.parametrize(("name", "least"), [("w8a16", 0.999), ("w4a16", 0.97), ("fp8", 0.998)])
def test_exports_for_vllm_give_the_vectors_of_the_source(name: str, least: float, source: Path, tmp_path: Path) -> None:
    """They call modules of the model one by one, which transformers does not decode when they are called."""
    pqweights.quantize(source, tmp_path / "master", bits=8)
    pqweights.export(tmp_path / "master", tmp_path / "out", target="vllm", format=name)
    one, other = vectors(source), vectors(tmp_path / "out")
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    assert cosines.min() > least
