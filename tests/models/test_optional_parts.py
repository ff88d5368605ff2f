"""Parts of layers that models have only if a key says so, compared with the classes of transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from pqweights.models.optional_parts import PARTS, READ_BY, THERE_BY_DEFAULT, missing_parts, unused_parts

# What a class wants beside its defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "deepseek_v2": {"q_lora_rank": 64},
    "granitemoehybrid": {"layer_types": ["attention", "mamba"], "num_hidden_layers": 2},
}
ALL_LAYERS = ("bailing_hybrid", "gemma3n_text", "kimi_linear")  # whose first layers are not of every kind
OF_TEXT = {f"{name}_text" for name in ("qwen3_vl", "qwen3_vl_moe")}
READING = [(kind, key) for key, types in READ_BY.items() for kind in types.split() if kind not in OF_TEXT]


@functools.cache
def names(kind: str, **settings: Any) -> tuple[set[str], dict[str, Any]]:
    """The names of the parameters that transformers has for a model of a type, and its configuration."""
    layers = {} if kind in ALL_LAYERS else {"num_hidden_layers": 4}
    config = transformers.AutoConfig.for_model(kind, **layers | SETTINGS.get(kind, {}) | settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return set(model.state_dict()), config.to_dict()


@pytest.mark.parametrize(("kind", "key"), READING)
def test_a_key_gives_a_model_what_it_has_in_transformers(kind: str, key: str) -> None:
    whole, having = names(kind, **{key: True})
    without, lacking = names(kind, **{key: False})
    unused = unused_parts(whole, lacking)
    assert unused.keys() == {name for name in whole - without if name != "lm_head.bias"}
    assert set(unused.values()) == {key}
    assert key in missing_parts(without, having) and key not in missing_parts(whole, having)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in READING}))
def test_a_key_that_is_absent_means_what_it_does_in_transformers(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **SETTINGS.get(kind, {})).to_dict()
    keys = [key for key, types in READ_BY.items() if kind in types.split()]
    assert {key: bool(config[key]) for key in keys} == {
        key: kind in THERE_BY_DEFAULT.get(key, "").split() for key in keys
    }


def test_types_that_do_not_read_a_key_keep_their_biases() -> None:
    biases = [f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"]
    for kind in ("qwen2", "mistral", "unknown"):
        assert unused_parts(biases, {"model_type": kind} | dict.fromkeys(PARTS, False)) == {}
