"""Encoders as the Hub has them: other keys of configurations and names of tensors than transformers writes today."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import encoder_cases
import numpy as np
import pytest
from commands import raises
from encoder_cases import CASES, Case
from gguf_files import all_values, converted, metadata
from helpers import bf16, gaussian, read_all, write_checkpoint

from pqweights.checkpoint.gguf.model import GgufModel
from pqweights.errors import ExportError


def rewritten(
    case: Case, folder: Path, config: dict[str, Any], names: dict[str, str] | None = None, **more: Any
) -> tuple[GgufModel, GgufModel]:
    """The models of a case as transformers writes it, and with other keys and names.

    config: the keys that it has instead; None drops one
    names: expressions for parts of names, and what stands in their place
    more: tensors that it has beside its own, with `__` for the dots of their names
    """
    encoder_cases.saved(case, folder / "new")
    tensors = dict(read_all(folder / "new"))
    for expression, text in (names or {}).items():
        tensors = {re.sub(expression, text, name): value for name, value in tensors.items()}
    tensors |= {name.replace("__", "."): value for name, value in more.items()}
    stated = json.loads((folder / "new" / "config.json").read_text()) | config
    stated = {key: value for key, value in stated.items() if value is not None}
    return converted(folder / "new"), converted(write_checkpoint(folder / "old", tensors, config=stated))


def check_same(new: GgufModel, old: GgufModel) -> None:
    assert old.metadata == new.metadata
    found, expected = all_values(old), all_values(new)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_first_checkpoints_of_bert(tmp_path: Path) -> None:
    """bert-base-uncased: norms have a gamma and a beta, and the model lies in one for pre-training."""
    names = {r"LayerNorm\.weight": "LayerNorm.gamma", r"LayerNorm\.bias": "LayerNorm.beta", "^": "bert."}
    head = "cls__predictions__transform__dense__weight"
    config = {"architectures": ["BertForMaskedLM"]}
    new, old = rewritten(CASES["bert"], tmp_path, config, names, **{head: bf16(gaussian(4, 4))})
    check_same(new, old)
    assert old.left_out.keys() == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", head.replace("__", ".")}


def test_the_configuration_of_nomic_embed(tmp_path: Path) -> None:
    """nomic-ai/nomic-embed-text-v1.5, by llama.cpp's conversion/bert.py: it was trained on 2048 tokens."""
    dropped = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
         "layer_norm_eps", "rope_parameters", "hidden_act", "head_dim")
    )  # fmt: skip
    published = {
        "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 8192, "max_trained_positions": 256,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "activation_function": "swiglu", "prenorm": False,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    }  # fmt: skip
    check_same(*rewritten(CASES["nomic"], tmp_path, dropped | published))
    with raises(ExportError, "moe_every_n_layers", "2"):
        rewritten(CASES["nomic"], tmp_path / "moe", {"moe_every_n_layers": 2})


def test_the_configuration_of_modernbert(tmp_path: Path) -> None:
    """answerdotai/ModernBERT-base: every third layer has full attention, the first among them."""
    published = {
        "layer_types": None, "rope_parameters": None, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0, "layer_norm_eps": 1e-5, "architectures": ["ModernBertForMaskedLM"],
    }  # fmt: skip
    new, old = rewritten(CASES["modernbert"], tmp_path, published, {"^": "model."})
    check_same(new, old)
    assert metadata(new)["modern-bert.attention.sliding_window_pattern"] == [False, True, True, False]


def test_embeddings_of_t5_that_are_stored_again_are_left_out(tmp_path: Path) -> None:
    new, old = rewritten(CASES["t5 encoder"], tmp_path, {}, encoder__embed_tokens__weight=bf16(gaussian(128, 64)))
    check_same(new, old)
    assert old.left_out.keys() == {"encoder.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder False True"),
        ("bert", {"max_position_embeddings": 100}, "position_embeddings 100 256"),
        ("xlm-roberta", {"max_position_embeddings": 100}, "position_embeddings 98 254"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("t5 encoder", {"feed_forward_proj": "gated-silu"}, "feed_forward_proj 'gated-silu'"),
        ("t5 encoder", {"d_kv": 16}, "SelfAttention 64 96"),
    ],
)
def test_encoders_that_llama_cpp_would_compute_otherwise_are_refused(
    name: str, config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with raises(ExportError, *named.split()):
        rewritten(CASES[name], tmp_path, config)


def test_missing_tensors_of_encoders_are_refused(tmp_path: Path) -> None:
    for name, other in (("t5 encoder", "encoder.embed_tokens.weight"), ("bert", "pooler.dense.weight")):
        with raises(ExportError, "blk.1.attn_k.weight"):
            rewritten(CASES[name], tmp_path / name, {}, {r".*\.1\..*\.(k|key)\.weight": other})
