"""Rotary embeddings and windows, resolved from configurations: as transformers' own classes and functions do."""

from __future__ import annotations

import copy
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import F32_SUM, F64_SUM, approx, each_near
from commands import raises
from huggingface_hub.errors import StrictDataclassError

from pqweights.checkpoint.positions import (
    attention_factor,
    frequencies,
    layer_types,
    parameters_of,
    rope_parameters,
    stated_once,
    windows,
)
from pqweights.errors import ExportError
from pqweights.models.rotary import WINDOWS_EVERYWHERE, WITHOUT
from pqweights.models.table import MODELS

SIZES = {"num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512}
DEFAULT = {"rope_type": "default", "rope_theta": 7e4}
LONG = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
# What configurations state, under older and newer keys, once, twice, or not at all.
STATED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the base outside": {"rope_theta": 5e4},
    "the base inside": {"rope_parameters": DEFAULT},
    "two bases": {"rope_theta": 5e4, "rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 2.0}},
    "rope_scaling beside rope_parameters": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": DEFAULT,
    },
    "rope_scaling beside its base": {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "an empty rope_scaling": {"rope_scaling": {}, "rope_parameters": DEFAULT},
    "no rope_scaling": {"rope_theta": 5e4, "rope_scaling": None},
    "two original lengths": {
        "rope_theta": 5e4, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "an original length outside": {"original_max_position_embeddings": 64, "rope_parameters": DEFAULT | {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }},
    "longrope": {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope", **LONG}},
    "longrope by its first name": {"rope_scaling": {"type": "su", **LONG}},
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "a share outside": {"partial_rotary_factor": 0.75},
    "two shares": {"partial_rotary_factor": 0.75, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
    "names of GPT NeoX": {"rotary_emb_base": 5e4, "rotary_pct": 0.5},
    "names of ModernBERT": {"global_rope_theta": 5e4, "local_rope_theta": 3e4},
    "a base for windows": {"rope_theta": 5e4, "rope_local_base_freq": 2e4},
    "rotary_dim": {"rotary_dim": 8, "head_dim": 32},
    "by kinds": {"layer_types": ["sliding_attention", "full_attention"] * 3, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4},
        "sliding_attention": {"rope_type": "default"},
    }},
    "bases layer by layer": {
        "rope_theta": [5e4, 3e4] * 3, "partial_rotary_factors": [0.5, 1.0] * 3,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
    "a window": {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2},
    "a window that is not used": {"sliding_window": 32, "use_sliding_window": False},
    "a null window": {"sliding_window": None, "layer_types": ["full_attention"] * 6},
    "a period of windows": {"sliding_window": 32, "sliding_window_pattern": 3, "global_attn_every_n_layers": 3},
    "kinds of layers": {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"] * 3},
    "old kinds of layers": {"layer_types": ["attention", "mamba"] * 3},
}  # fmt: skip
# The keys of transformers' ROPE_INIT_FUNCTIONS: it reads others, and fails when it builds the model.
KNOWN_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
# Types that mlx-lm has and llama.cpp has not, of which transformers has a class.
OF_MLX = """
afmoe apertus bailing_hybrid bitnet gemma3n gemma4 glm gpt_neox helium internlm3 iquestcoder kimi_k25 laguna llama4
llava longcat_flash mellum minicpm3 minimax mistral3 muse_glimmer nanochat nemotron olmo olmo_hybrid phi phimoe qwen3_5
qwen3_5_moe recurrent_gemma solar_open
"""
OF_THE_HUB = ("kimi_k2", "phi4mm")
TYPES = {name for name, row in MODELS.items() if row.llama_cpp is not None} | {*OF_MLX.split()}


def significant(parameters: Any) -> Any:
    """Parameters without those that mean nothing: the older name of a kind, and what is null."""
    if any(isinstance(value, dict) for value in parameters.values()):
        return {key: significant(value) for key, value in parameters.items() if isinstance(value, dict)}
    skipped = ("type", "max_position_embeddings")
    return {key: value for key, value in parameters.items() if key not in skipped and value is not None}


@pytest.mark.parametrize("model_type", sorted(TYPES - WITHOUT))
def test_configurations_mean_what_transformers_makes_of_them(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING as classes

    known = classes[model_type] if model_type not in OF_THE_HUB else None
    checked = 0
    for stated in STATED.values():
        found = _resolved_by_transformers(known, {**SIZES, **stated}) if known else None
        if found is None:  # transformers refuses it
            continue
        config: dict[str, Any] = {**SIZES, **stated, "model_type": model_type}
        if (text_type := found.model_type) != model_type:
            config = {"model_type": model_type, "text_config": config | {"model_type": text_type}}
        types = found.layer_types if hasattr(found, "layer_types") else None
        expected, of_ours = significant(found.rope_parameters), significant(rope_parameters(config))
        if any(isinstance(value, dict) for value in expected.values()):  # of kinds without a layer, there is nothing
            expected, of_ours = ({k: v for k, v in of.items() if k in types} for of in (expected, of_ours))
        assert of_ours == expected, stated
        ours = layer_types(config)
        assert (ours or types) == types, stated
        if text_type in WINDOWS_EVERYWHERE:
            assert windows(config) == [found.sliding_window] * 6, stated
        elif types and any(windows(config)):
            window = found.sliding_window
            assert windows(config) == [window if kind == "sliding_attention" else None for kind in types], stated
        checked += 1
    assert checked > 0 or known is None


def _resolved_by_transformers(known: Any, stated: dict[str, Any]) -> Any:
    """The configuration of the text model; None if transformers refuses it, or its model has no rotary embeddings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            outer = known(**copy.deepcopy(stated))
            found = outer.get_text_config()
            if found is not outer:
                found = type(outer)(
                    text_config=copy.deepcopy(stated) | {"model_type": found.model_type}
                ).get_text_config()
            found.standardize_rope_params()
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError):
        return None
    parameters = getattr(found, "rope_parameters", None) or {}
    kinds = [of.get("rope_type") for of in (parameters, *parameters.values()) if isinstance(of, dict)]
    by_kind = "rope_type" not in (getattr(type(found)(), "rope_parameters", None) or {"rope_type": "default"})
    nested = any(isinstance(of, dict) for of in parameters.values())
    fails = by_kind != nested or not any(kinds) or {*kinds} - {*KNOWN_KINDS, None}
    return None if fails else found


CONTRADICTING = ("two bases", "rope_scaling beside rope_parameters", "two original lengths", "two shares")


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "glm4", "gemma3_text", "mistral3"])
def test_exports_state_positions_once(model_type: str, name: str) -> None:
    """transformers reads the same before and after; older keys and newer ones say the same."""
    text = {**SIZES, **STATED[name], "model_type": model_type.replace("mistral3", "mistral")}
    config = {"model_type": model_type, "text_config": text} if model_type == "mistral3" else text
    before = copy.deepcopy(config)
    once = stated_once(config)
    assert once is not None and config == before
    assert significant(rope_parameters(once)) == significant(rope_parameters(config))
    if model_type in ("llama", "qwen3", "mistral3") and name in CONTRADICTING:
        stated = once.get("text_config", once)
        parameters = rope_parameters(config)
        assert stated["rope_theta"] == stated["rope_parameters"]["rope_theta"] == parameters["rope_theta"]
        assert (stated["rope_scaling"] or {"rope_type": "default"})["rope_type"] == parameters["rope_type"]
    if name in ("nothing", "the base outside", "the base inside", "a window"):
        assert once == before


def test_readers_of_exports_know_the_newer_keys() -> None:
    """A configuration with rope_parameters alone is written as it is: transformers 5 and vLLM on it read that."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    bounds = [re.fullmatch(r"transformers>=(\d+)\..*", of) for extra in extras.values() for of in extra]
    assert {int(bound[1]) for bound in bounds if bound} == {5}


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn without an original length": {"rope_type": "yarn", "factor": 4.0},
    "yarn with an attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn with one mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5},
    "yarn with two mscales": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn with betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 0.5, "truncate": False},
    "yarn with an empty factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0 + n for n in range(16)], "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 128,
    },
    "longrope with factors": {
        "rope_type": "longrope", "short_factor": [1.5] * 16, "long_factor": [2.0] * 16, "factor": 3.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("length", [100, 300, 2000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_are_those_of_transformers(variant: str, length: int) -> None:
    import transformers

    functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    stated = {"rope_parameters": {"rope_theta": 5e4} | VARIANTS[variant]}
    config = transformers.LlamaConfig(**SIZES, **copy.deepcopy(stated))
    parameters = parameters_of({"model_type": "llama"} | SIZES | stated)
    found = frequencies(parameters, 32, length=length, most=512)
    if variant == "default":
        expected, scale = 5e4 ** (-np.arange(0, 32, 2) / 32), 1.0
    else:
        tensor, scale = functions[parameters["rope_type"]](config, seq_len=length)
        expected = tensor.double().numpy()
    assert each_near(found, expected, F32_SUM, F64_SUM)
    assert attention_factor(parameters, 512) == approx(scale)


def test_alpha_of_hunyuan_gives_another_base_at_every_length() -> None:
    parameters = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    expected = (1e4 * 1000 ** (32 / 30)) ** (-np.arange(0, 32, 2) / 32)
    for length in (1, 5000):
        assert each_near(frequencies(parameters, 32, length=length, most=512), expected, F64_SUM)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["yarn", 3, [1]])
def test_what_is_not_an_object_is_refused(key: str, value: Any) -> None:
    with raises(ExportError, key):
        rope_parameters({"model_type": "llama", key: value})


TYPES_OF_WINDOWS = "qwen2 gemma3_text smollm3 mimo_v2_flash step3p5 mistral4 minimax_m2 modernbert afmoe"
KEYS_OF_WINDOWS = """
num_hidden_layers layer_types sliding_window sliding_window_pattern max_window_layers no_rope_layers
no_rope_layer_interval head_dim rotary_dim rope_theta partial_rotary_factors global_attn_every_n_layers
"""


@pytest.mark.parametrize("value", ["x", -1, 1e308, [1], {"a": 1}, None, 2**70, True])
@pytest.mark.parametrize("model_type", [*TYPES_OF_WINDOWS.split(), 7, [1], None])
def test_values_of_other_types_raise_nothing_else(model_type: Any, value: Any) -> None:
    for key in KEYS_OF_WINDOWS.split():
        config = {"model_type": model_type, **SIZES, "use_sliding_window": True, key: value}
        rope_parameters(config)
        assert len(windows(config)) <= 512
