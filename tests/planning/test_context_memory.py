"""What a model keeps of its context: keys and values of its layers with attention, no more of them than a window."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from blocks import examples
from hypothesis import given
from hypothesis import strategies as st

from pqweights.planning.context_memory import context_bytes, most_context

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parents[1] / "architectures"), *sys.path])
    from known_architectures import ARCHITECTURES, SLIDING

TOKENS = 48


def stated(name: str) -> dict[str, Any]:
    """What config.json says of a tiny model."""
    import transformers

    about = ARCHITECTURES[name]
    config = getattr(transformers, about.config)(**about.settings)
    return {**json.loads(config.to_json_string()), "architectures": [about.model]}


# One of each kind: shared heads by several names, windows, latents, states beside attention, images.
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "falcon", "bloom", "llama", "mistral", "gemma2", "cohere2", "olmo3", "gpt_oss", "deepseek_v3"),
        *("qwen3_next", "qwen3_5 with images", "jamba", "bamba", "nemotron_h", "lfm2", "smollm3"),
    ],
)
def test_keys_and_values_are_those_in_the_cache_of_transformers(name: str) -> None:
    import torch
    import transformers

    about = ARCHITECTURES[name]
    config = getattr(transformers, about.config)(**about.settings)
    model = getattr(transformers, about.model)(config).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.randint(3, 60, (1, TOKENS)), use_cache=True).past_key_values
    kept = [getattr(layer, part) for layer in cache.layers for part in ("keys", "values") if hasattr(layer, part)]
    tokens = sum(tensor.numel() for tensor in kept if tensor is not None)
    # transformers keeps a token less than a window has.
    windows = sum(tensor[..., :1, :].numel() for tensor in kept if tensor is not None and 1 < tensor.shape[-2] < TOKENS)
    assert context_bytes(stated(name), TOKENS) == 2 * (tokens + windows)


def test_a_window_is_not_counted_that_transformers_does_not_have() -> None:
    """Of Qwen it has to be switched on, and a type without windows passes over kinds of layers."""
    for name in ("qwen2", "llama"):
        config = {key: value for key, value in stated(name).items() if key not in ("layer_types", "use_sliding_window")}
        assert context_bytes(config | {"sliding_window": 32}, TOKENS) == context_bytes(config, TOKENS)
    listed = config | {"sliding_window": 32, "layer_types": ["sliding_attention"] * config["num_hidden_layers"]}
    assert context_bytes(listed, TOKENS) == context_bytes(config, TOKENS)
    other = context_bytes(listed | {"model_type": "of another library"}, TOKENS)
    assert TOKENS * other == 32 * context_bytes(config, TOKENS)


def test_layers_that_share_keys_and_values_count_once() -> None:
    config = stated("gemma3n_text")
    assert 2 * context_bytes(config | {"num_kv_shared_layers": 1}, 8) == context_bytes(
        config | {"num_kv_shared_layers": 0}, 8
    )


def test_the_configuration_of_a_text_model_counts() -> None:
    text = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 77}
    nested = {"hidden_size": 8, "vision_config": {"hidden_size": 4096}, "text_config": text}
    assert context_bytes(nested, 10) == context_bytes(text, 10) == 2 * 3 * 10 * 2 * 64
    assert most_context(nested) == 77


def test_what_a_configuration_does_not_say_counts_nothing() -> None:
    for config in (None, {"num_hidden_layers": 10**6}, {"num_hidden_layers": 2}):
        assert context_bytes(config, 1000) == 0 == most_context(config)


KEYS = sorted({key for about in ARCHITECTURES.values() for key in about.settings} | {*SLIDING, "architectures"})
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(st.sampled_from(KEYS), LEAF, max_size=3)


@examples(100)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8))
def test_no_configuration_is_a_bug(config: dict[str, Any]) -> None:
    assert context_bytes(config, 1000) >= 0 <= most_context(config)
