"""Models that llama.cpp would compute otherwise, or not load: they are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import raises
from gguf_files import CONFIG, GEMMA3, converted, edit_config, llama_tensors, write_gemma, write_llama
from helpers import bf16, gaussian, write_checkpoint

from pqweights.checkpoint.gguf.settings import read_settings
from pqweights.errors import ExportError

MLA = {"model_type": "deepseek_v3", "q_lora_rank": 4, "first_k_dense_replace": 1}
YARN = {"type": "yarn", "factor": 2.0}
DELTA_NET = {"model_type": "qwen3_5_text", "linear_value_head_dim": 8, "linear_key_head_dim": 8}
GEMMA2 = GEMMA3 | {"model_type": "gemma2"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("phimoe", "softmax"),
        ("kimi_k3", "transformers"),
    ],
)
def test_a_model_that_llama_cpp_has_and_may_compute_otherwise_is_refused_with_the_reason(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    with raises(ExportError, "config.json", model_type, reason, "use another target"):
        converted(write_llama(tmp_path, config={"model_type": model_type}))


MUSE = {
    "model_type": "muse_glimmer_text", "hidden_activation": "silu", "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


QWEN4 = {
    "model_type": "qwen4_exp_text", "output_gate_type": "sigmoid", "indexer_kv_heads": 1,
    "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (QWEN4 | {"output_gate_type": "silu"}, "output_gate_type 'silu'"),
        (QWEN4 | {"layer_types": ["full_attention"] * 2}, "linear_attention"),
        (QWEN4 | {"ple_layer_ids": [1, 2]}, "[1, 2]"),
        (QWEN4 | {"ple_layer_ids": [2]}, "[2]"),
        (QWEN4 | {"ple_embed_dim": 32}, "hidden_size ple_embed_dim 32"),
        (QWEN4 | {"ngram_size": 9}, "n-grams 8"),
        (QWEN4 | {"ngram_vocab_size_base": 10**9}, "n-grams 2147483647"),
        (QWEN4 | {"eos_token_id": None}, "seed eos_token_id None"),
        ({"model_type": "mamba"}, "mamba arcee, qwen3_moe"),
        ({"model_type": "minimax_m3_vl_text", "dense_intermediate_size": 24, "mlp_layer_types": ["sparse"] * 2,
          "layer_types": ["minimax_m3_sparse", "full_attention"]}, "minimax_m3_sparse"),
        ({"model_type": "deepseek_v4", "layer_types": ["compressed_sparse_attention"] * 2, "index_head_dim": 64},
         "compressed 128"),
        ({"model_type": "mimo_v2_flash", "layer_types": ["full_attention"] * 2}, "sliding_attention"),
        (MLA | {"model_type": "deepseek_v32", "index_head_dim": 32}, "64 index_head_dim 32"),
        (MLA | {"model_type": "hy_v4", "indexer_types": ["full", "half"]}, "layer_types 'half'"),
        ({"hidden_act": "gelu"}, "hidden_act 'silu' 'swish' 'gelu'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type default, 'dynamic'"),
        ({"rope_parameters": {"rope_type": "new"}}, "rope_type 'new'"),
        ({"rope_scaling": {"type": "linear"}}, "factor None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ({"layer_types": ["full_attention"]}, "layer_types ['full_attention']"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor 0.5 low_freq_factor"),
        ({"model_type": "qwen2", "hidden_size": 17}, "hidden_size 17"),
        (GEMMA2 | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 0}, "sliding_window 0"),
        (
            {"model_type": "cohere2", "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
            "cohere2 sliding window",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [1.0], "short_factor": [1.0]}},
            "4 long_factor",
        ),
        ({"model_type": "qwen2", "head_dim": 4}, "head_dim 8 4"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "norm_topk_prob True False"),
        (
            {"model_type": "gemma3_text", "hidden_act": None, "head_dim": 8},
            "query_pre_attn_scalar 8 256",
        ),
        (MLA | {"num_hidden_layers": 27}, "q_lora_rank 26 27"),
        (MLA | {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
         "mscale mscale_all_dim 1.0 0.5"),
        (MLA | {"model_type": "deepseek_v32", "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
         "mscale mscale_all_dim 1.0 0.7"),
        (MLA | {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types ['sparse', 'dense']"),
        (DELTA_NET | {"linear_key_head_dim": 4}, "linear_value_head_dim linear_key_head_dim 8 4"),
        (DELTA_NET | {"layer_types": ["full_attention", "linear_attention"]}, "1th"),
        (DELTA_NET | {"layer_types": ["full_attention", "conv"]}, "layer_types 'conv'"),
        ({"model_type": "exaone4", "layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "64 layers"),
        ({"model_type": "jamba", "attn_layer_period": 0}, "jamba"),
        ({"model_type": "llama4_text", "moe_layers": [1]}, "interleave_moe_layer_step moe_layers [1]"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "4th rotary"),
        (MUSE | {"layer_rope_theta": [1e4, 1e4]}, "rotary sliding"),
        (MUSE | {"post_norm_eps": 1e-6}, "post_norm_eps 1e-06"),
        (
            {"model_type": "olmo3", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
            | {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}, "full_attention": {"rope_theta": 2.0}}},
            "rope_theta 2.0 sliding_attention 1.0",
        ),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path, config=config | ({"architectures": None} if "model_type" in config else {}))
    with raises(ExportError, "config.json", *named.split(), "use --target bf16"):
        converted(folder)


def test_a_configuration_without_a_type_is_refused_as_such(tmp_path: Path) -> None:
    with raises(ExportError, "config.json", "model_type"):
        converted(write_llama(tmp_path, config={"model_type": None, "architectures": None}))


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_gemma_2_without_its_caps_is_refused(key: str, tmp_path: Path) -> None:
    """llama.cpp would take 50 and 30."""
    folder = write_gemma(tmp_path, "gemma2")
    edit_config(folder, {key: None})
    with raises(ExportError, key):
        converted(folder)


@pytest.mark.parametrize(
    ("model_type", "name", "shape"),
    [("llama", "extra.weight", (2, 2)), ("qwen2", "o_proj.bias", (16,))],  # a bias that llama.cpp does not add
)
def test_tensors_that_llama_cpp_lacks_are_refused(
    model_type: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = f"model.layers.0.self_attn.{name}"
    write_llama(
        tmp_path,
        config={"model_type": model_type, "architectures": None},
        **{tensor.replace(".", "__"): bf16(gaussian(*shape))},
    )
    with raises(ExportError, tensor, model_type):
        converted(tmp_path)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ],
)
def test_missing_tensors_are_refused(name: str, named: str, tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors[name]
    with raises(ExportError, named):
        converted(write_checkpoint(tmp_path, tensors, config=CONFIG))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_key_value_heads": 2}, "k_proj.weight 16 (8, 16)"),
        ({"intermediate_size": 32}, "gate_proj.weight 32 (24, 16)"),
        ({"hidden_size": 32}, "embed_tokens.weight 32"),
    ],
)
def test_tensors_of_other_shapes_are_refused(
    changed: dict[str, Any], named: str, model_type: str, tmp_path: Path
) -> None:
    """llama.cpp would not load the file."""
    config = {"model_type": model_type, "architectures": None}
    with raises(ExportError, *named.split()):
        converted(write_llama(tmp_path, config=config | changed))


def test_a_single_number_is_no_matrix(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = llama_tensors() | {name: ("F32", np.ones((), dtype=np.float32))}
    with raises(ExportError, name, "()"):
        converted(write_checkpoint(tmp_path, tensors, config=CONFIG))


def test_a_head_that_llama_cpp_would_not_compute_with_is_refused(tmp_path: Path) -> None:
    """Its Gemma has the embeddings in the place of a head; transformers takes one that is stored and differs."""
    head = {"lm_head__weight": bf16(gaussian(*llama_tensors()["lm_head.weight"][1].shape, seed=9))}
    config = {"model_type": "gemma", "architectures": None, "hidden_act": "gelu", "head_dim": 8}
    folder = write_llama(tmp_path, config=config | {"tie_word_embeddings": None}, **head)
    with raises(ExportError, "lm_head.weight"):
        converted(folder)


def test_a_refusal_has_its_reason_apart_from_the_file_and_what_to_do() -> None:
    """Also in another process."""
    with raises(ExportError, "config.json", "zamba2") as refused:
        read_settings({"model_type": "zamba2"})
    error = pickle.loads(pickle.dumps(refused.value))
    assert str(error) == str(refused.value)
    assert "config.json" not in refused.value.reason and "--target" not in refused.value.reason
