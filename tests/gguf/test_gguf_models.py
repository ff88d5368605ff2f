"""The metadata of GGUF models, and what the keys of configurations mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import converted, metadata, write_gemma, write_llama

from pqweights.checkpoint.gguf.settings import restated
from pqweights.models.llama_cpp import SETTINGS, Architecture, Size, keys_of
from pqweights.models.optional_parts import part_defaults
from pqweights.models.settings import OTHER_NAMES
from pqweights.models.table import MODELS

UINT32, FLOAT32, STRING, ARRAY = (
    int(gguf.GGUFValueType[name]) for name in ("UINT32", "FLOAT32", "STRING", "ARRAY")
)  # fmt: skip


def test_metadata_of_llama(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\npipeline_tag: text-generation\n---\n")
    metadata = converted(tmp_path).metadata
    assert {key: (entry.value, int(entry.type)) for key, entry in metadata.items()} == {
        "general.architecture": ("llama", STRING),
        "general.type": ("model", STRING),
        "general.name": ("tiny", STRING),
        "general.size_label": ("6.0K", STRING),
        "general.license": ("mit", STRING),
        "general.tags": (["text-generation"], ARRAY),
        "general.languages": (["en"], ARRAY),
        "llama.context_length": (128, UINT32),
        "llama.embedding_length": (16, UINT32),
        "llama.block_count": (2, UINT32),
        "llama.feed_forward_length": (24, UINT32),
        "llama.attention.head_count": (2, UINT32),
        "llama.attention.head_count_kv": (1, UINT32),
        "llama.attention.key_length": (8, UINT32),
        "llama.attention.value_length": (8, UINT32),
        "llama.attention.layer_norm_rms_epsilon": (1e-5, FLOAT32),
        "llama.vocab_size": (64, UINT32),
        "llama.rope.dimension_count": (8, UINT32),
        "llama.rope.freq_base": (10000.0, FLOAT32),
        "tokenizer.ggml.model": ("no_vocab", STRING),
    }


OLD = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
NEW = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}


@pytest.mark.parametrize("config", [OLD, NEW, OLD | {"rope_scaling": {"rope_type": "linear", "factor": 4}}])
def test_rope_parameters_are_read_by_old_and_new_keys(config: dict[str, Any], tmp_path: Path) -> None:
    found = metadata(converted(write_llama(tmp_path, config=config)))
    assert {key: value for key, value in found.items() if ".rope." in key} == {
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 5e5,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
    }


BY_LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": BY_LAYERS, "layer_types": ["full_attention", "sliding_attention"]},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_layers_with_a_window_have_their_own_base(config: dict[str, Any], tmp_path: Path) -> None:
    found = metadata(converted(write_gemma(tmp_path, "gemma3_text", **config)))
    assert {key: value for key, value in found.items() if ".rope." in key or "sliding" in key} == {
        "gemma3.attention.sliding_window": 32,
        "gemma3.attention.sliding_window_pattern": [False, True],
        "gemma3.rope.dimension_count": 8,
        "gemma3.rope.freq_base": 5e5,
        "gemma3.rope.freq_base_swa": 2e4,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }


def test_a_window_that_llama_cpp_lacks_is_said(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    model = converted(write_llama(tmp_path, config=mistral | {"sliding_window": 100}))
    assert metadata(model)["llama.context_length"] == 128
    (note,) = model.notes
    assert "100 tokens" in note
    for index, window in enumerate((None, 4096)):
        model = converted(write_llama(tmp_path / str(index), config=mistral | {"sliding_window": window}))
        assert (metadata(model)["llama.context_length"], model.notes) == (128, ())


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 100}, 100),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 100}, None),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True,
          "sliding_window": 64}, 64),
        ({"model_type": "qwen2", "sliding_window": 100}, None),
        # transformers' Llama has no windows, whatever its configuration says
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, None),
    ],
)  # fmt: skip
def test_windows_of_some_layers_are_said_too(config: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    named = {"architectures": ["Qwen2ForCausalLM"]} if "model_type" in config else {}
    notes = converted(write_llama(tmp_path, config=named | config)).notes
    assert len(notes) == (window is not None)
    assert all(f"{window} tokens" in note for note in notes)


def test_gemma_2_without_windows_gets_one_as_long_as_its_context(tmp_path: Path) -> None:
    """llama.cpp would take 4096."""
    folder = write_gemma(tmp_path, "gemma2", layer_types=["full_attention"] * 2)
    assert metadata(converted(folder))["gemma2.attention.sliding_window"] == 128


def test_the_choice_of_factors_of_longrope_is_said(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "factor": 2.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    (note,) = converted(write_llama(tmp_path, config={"rope_parameters": rope})).notes
    assert "LongRoPE" in note


def test_bounds_of_yarn_that_llama_cpp_must_be_told_are_said(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 1}
    model = converted(write_llama(tmp_path, config={"rope_scaling": rope}))
    assert metadata(model)["llama.rope.scaling.yarn_beta_fast"] == 1.0
    (note,) = model.notes
    assert note.endswith("--yarn-beta-fast 1")


@pytest.mark.parametrize("model_type", ["exaone4", "exaone_moe"])
def test_a_pattern_of_windows_is_read_as_their_period(model_type: str) -> None:
    assert restated({"model_type": model_type, "sliding_window_pattern": "LLLG"})["sliding_window_pattern"] == 4


@pytest.mark.parametrize("name", ["glm dsa", "deepseek v3.2"])
def test_the_choice_of_tokens_in_half_precision_is_said(name: str, tmp_path: Path) -> None:
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES[name], tmp_path)
    (note,) = converted(tmp_path).notes
    assert "2048 tokens" in note


# The keys of which the meaning of their absence matters.
ARCHITECTURES = {name: model.llama_cpp for name, model in MODELS.items() if model.llama_cpp is not None}


# What wraps a text model with a configuration of its own, and a type that transformers does not have.
OTHERS = {"gemma3", "kimi_k2", "minimax_m3_vl", "phi4mm", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"}
OTHERS |= {"step3p7"}
# What a class computes anyway, or a model has without a key of its own.
FIXED: dict[str, dict[str, Any]] = {
    "cohere2": {"head_dim": None},
    "distilbert": {"layer_norm_eps": 1e-12},
    "hy_v3": {"first_k_dense_replace": 1, "route_norm": True},
    "hy_v4": {"first_k_dense_replace": 1},
    "step3p5": {"norm_expert_weight": True, "num_experts": 288},
    "minimax_m3_vl_text": {"norm_topk_prob": True},
    "mt5": {"max_position_embeddings": 512, "decoder_start_token_id": None, "tie_word_embeddings": None},
    "umt5": {"max_position_embeddings": 512, "decoder_start_token_id": None},
    "t5": {"max_position_embeddings": 512},
    **{kind: {"mlp_only_layers": []} for kind in ("qwen2_moe", "qwen3_moe", "qwen3_next")},  # made of None
}
KEYS = {key for setting in SETTINGS for key in keys_of(setting.key)} | {
    "max_position_embeddings",
    "block_auto_adjust_ff_dim",
    "block_multiple_of",
    "block_ffn_dim_multiplier",
    "no_rope_layer_interval",
    "num_hidden_layers",
    "query_pre_attn_scalar",
    "tie_word_embeddings",
}


def keys_read(architecture: Architecture) -> set[str]:
    """The keys that an architecture reads."""
    expressions: list[Size | None] = [setting.key for setting in (architecture.norm, *architecture.settings)]
    expressions += [size for cut in architecture.cuts.values() for size in (*cut.blocks, cut.times)]
    expressions += [
        size for shape in (*architecture.shapes.values(), *architecture.reshaped.values()) for size in shape
    ]
    expressions += [size for scaled in architecture.scaled.values() for size in scaled.blocks]
    expressions += [architecture.rope.rotated if architecture.rope else None, architecture.first_position]
    expressions += [side for sides in architecture.equal for side in sides]
    keys = {key for size in expressions if size for key in keys_of(size)} | architecture.values.keys()
    for factor in (by for scaled in architecture.scaled.values() for by in scaled.by):
        if isinstance(factor, str):
            keys.add(factor)
        else:
            factor(lambda key, place=0: keys.add(key) or 1.0)
    return keys | (set() if architecture.windows is None else {"sliding_window"})


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.keys() - OTHERS))
def test_absent_keys_mean_what_transformers_takes(model_type: str) -> None:
    import transformers

    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    values = {
        field.name: field.default for field in dataclasses.fields(known) if field.default is not dataclasses.MISSING
    }
    read = KEYS.union(*map(keys_read, (ARCHITECTURES[model_type], *MODELS[model_type].variants)))
    found = MODELS[model_type].defaults
    known_parts = {key: is_there for key, is_there in part_defaults(model_type).items() if key not in found}
    expected = {
        key: next((values[name] for name in (key, *OTHER_NAMES.get(key, ())) if values.get(name) is not None), None)
        for key in (read | found.keys()) - known_parts.keys()  # what GGUF reads, and what exports to MLX say besides
    }
    expected |= FIXED.get(model_type, {})
    # tests/checkpoint/test_positions.py compares these
    expected |= dict.fromkeys(("sliding_window",), found.get("sliding_window"))
    assert found == {key: value for key, value in expected.items() if value is not None}
    assert all(bool(values.get(key)) == is_there for key, is_there in known_parts.items())


def test_every_architecture_is_one_of_the_package() -> None:
    variants = [other for model in MODELS.values() for other in model.variants]
    for architecture in (*ARCHITECTURES.values(), *variants):
        assert architecture.name in gguf.MODEL_ARCH.__members__
        for setting in (architecture.norm, *architecture.settings):
            assert setting.parameter.startswith(".") or hasattr(gguf.GGUFWriter, f"add_{setting.parameter}")
        for name in architecture.biases:
            assert name in gguf.MODEL_TENSOR.__members__
