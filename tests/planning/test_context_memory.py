"""What a model keeps of its context is what its cache in transformers holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blocks import examples
from hypothesis import given
from hypothesis import strategies as st

from pqweights.planning.context_memory import (
    STATE_BYTES,
    VALUE_BYTES,
    ContextMemory,
    context_memory,
    text_sizes,
)

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parents[1] / "architectures"), *sys.path])
    from known_architectures import ARCHITECTURES, SLIDING

TOKENS = 48
# One of each kind: shared heads by several names, windows, latents, layers of other sizes, states of all kinds, images,
# an encoder.
KINDS = (
    "gpt2", "gpt_bigcode", "falcon", "bloom", "dbrx", "jetmoe", "llama", "mistral", "gemma2", "gemma4_text", "cohere2",
    "olmo3", "exaone4", "gpt_oss", "deepseek_v3", "kimi_linear", "qwen3_next", "qwen3_5 with images", "jamba", "bamba",
    "granitemoehybrid", "zamba2", "nemotron_h", "mamba", "mamba2", "falcon_h1", "lfm2", "minimax", "t5", "bart",
)  # fmt: skip


def configuration(name: str) -> tuple[Any, dict[str, Any]]:
    """The configuration of a tiny model, and what its config.json says."""
    import transformers

    about = ARCHITECTURES[name]
    config = getattr(transformers, about.config)(**about.settings)
    return config, json.loads(config.to_json_string()) | {"architectures": [about.model]}


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of a cache, each once."""
    import torch

    found, left = {}, [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif type(value).__module__.startswith("transformers"):
            left += vars(value).values()
    return iter(found.values())


@pytest.mark.parametrize("name", KINDS)
def test_counted_values_are_those_in_the_cache_of_transformers(name: str) -> None:
    config, stated = configuration(name)
    import torch
    import transformers

    about = ARCHITECTURES[name]
    model = getattr(transformers, about.model)(config).eval()
    ids = torch.randint(3, 60, (1, TOKENS))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if about.takes == "seq2seq" else {})
    with torch.no_grad():
        output = model(**inputs, use_cache=True)
    cache = next(output[name] for name in ("past_key_values", "cache_params") if name in output)
    expected = sum(tensor.numel() for tensor in tensors_in(cache) if tensor.ndim)  # scalars count tokens
    found = context_memory(stated)
    # transformers keeps a token less than a window has.
    windows = sum(size * min(TOKENS, window - 1) for size, window in found.windows)
    assert found.per_token * TOKENS + windows + found.state == expected
    assert found.notes == ()


def test_sizes_of_a_context_count_windows_and_states_once() -> None:
    kept = ContextMemory(per_token=3, windows=((5, 10), (7, 100)), state=11)
    assert kept.bytes(50) == VALUE_BYTES * (3 * 50 + 5 * 10 + 7 * 50) + STATE_BYTES * 11
    assert kept.bytes(50, ahead=20) == VALUE_BYTES * (3 * 50 + 5 * 30 + 7 * 50) + STATE_BYTES * 11


# What the configurations of published models have in place of a list of layers.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "every other layer": ("gemma2", {}),
    "the last of a period that is stated": ("gemma3_text", {"sliding_window_pattern": 6}),
    "the last of a period that is known": ("cohere2", {}),
    "an interval of full attention": ("qwen3_next", {"full_attention_interval": 4}),
    "an offset in a period": ("jamba", {}),
    "all layers": ("mistral", {}),
    "chunks, where layers have positions": ("llama4", {}),
    "windows, where layers have no positions": ("smollm3", {}),
    "letters": ("nemotron_h", {"hybrid_override_pattern": "M*E", "num_hidden_layers": 3}),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_layers_are_those_of_transformers_where_the_configuration_does_not_list_them(case: str) -> None:
    name, instead = PUBLISHED[case]
    _, stated = configuration(name)
    listed = ("layer_types", "layers_block_type", "no_rope_layers")
    shorter = {key: value for key, value in stated.items() if key not in listed}
    assert context_memory(shorter | instead) == context_memory(stated)


def test_a_window_is_not_counted_that_transformers_does_not_have() -> None:
    """Of Qwen it has to be switched on, and a type without windows passes over kinds of layers."""
    for name in ("qwen2", "llama"):
        _, stated = configuration(name)
        for key in ("layer_types", "use_sliding_window"):
            stated.pop(key, None)
        assert context_memory(stated | {"sliding_window": 32}).windows == ()
    listed = stated | {"sliding_window": 32, "layer_types": ["sliding_attention"] * stated["num_hidden_layers"]}
    assert context_memory(listed).windows == ()
    assert len(context_memory(listed | {"model_type": "of another library"}).windows) == len(listed["layer_types"])


def test_windows_that_are_switched_off_or_begin_later_see_everything() -> None:
    _, stated = configuration("qwen2")
    del stated["layer_types"]
    of_one = context_memory(stated | {"num_hidden_layers": 1}).per_token
    windowed = stated | {"sliding_window": 32, "use_sliding_window": True}
    assert context_memory(windowed | {"use_sliding_window": False}).windows == ()
    later = context_memory(windowed | {"max_window_layers": 1, "num_hidden_layers": 3})
    assert (later.per_token, later.windows) == (of_one, ((of_one, 32),) * 2)


def test_layers_that_share_keys_and_values_count_once() -> None:
    _, stated = configuration("gemma3n_text")
    alone = context_memory(stated | {"num_kv_shared_layers": 1})
    assert alone.per_token == 0 and len(alone.windows) == 1


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (None, "does not say how many layers"),
        ({"num_hidden_layers": 10**6}, "does not say how many layers"),
        ({"num_hidden_layers": 2}, "how wide its keys and values are"),
        ({"architectures": ["BertModel"], "num_hidden_layers": 2}, "BertModel does not generate text"),
        ({"model_type": "rwkv", "num_hidden_layers": 2, "hidden_size": 64}, "the state of its layers"),
    ],
)
def test_what_cannot_be_counted_is_said(config: dict[str, Any] | None, note: str) -> None:
    found = context_memory(config)
    assert note in found.notes[0]
    assert found.bytes(1000) == 0


def test_sizes_of_the_text_model_of_a_model_of_images_are_its_own() -> None:
    sizes = text_sizes({
        "hidden_size": 8, "vision_config": {"hidden_size": 4096}, "text_config": {
            "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 100, "vocab_size": 50,
            "moe_intermediate_size": 40, "num_experts_per_tok": 4, "max_position_embeddings": 77,
        },
    })  # fmt: skip
    assert (sizes.width, sizes.inner, sizes.vocabulary, sizes.most_context) == (128, 160, 50, 77)


KEYS = sorted({key for about in ARCHITECTURES.values() for key in about.settings} | {*SLIDING, "architectures"})
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(st.sampled_from(KEYS), LEAF, max_size=3)


@examples(100)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8))
def test_no_configuration_is_a_bug(config: dict[str, Any]) -> None:
    assert context_memory(config).bytes(1000) >= 0
    assert text_sizes(config).width >= 0
