"""The cache of a whole model: equal to transformers' without quantization, small with it, and usable by generate."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from caches import ids, made, model, relative_error
from closeness import F32_FEW, F32_MATRIX, F32_SUM, each_near
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from pqweights.runtime.kv.cache import PackedLayer, kv_cache

SPECS = ("klt:4", "hadamard:4", "polar", "polar-rope:residual=0", "polar-rope")
FAMILIES = ("llama", "gemma3", "qwen3_5")


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def plain(net: Any) -> DynamicCache:
    return DynamicCache(config=net.config.get_text_config(decoder=True))


def read(net: Any, cache: Any, tokens: Tensor, *lengths: int) -> Tensor:
    """The logits of tokens that are read in pieces, the rest one by one."""
    found, start = [], 0
    for length in (*lengths, *[1] * (tokens.shape[1] - sum(lengths))):
        found.append(net(tokens[:, start : start + length], past_key_values=cache).logits)
        start += length
    return torch.cat(found, dim=1)


# --- without quantization ---


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2", "gpt_oss", "gpt_neox", "gptj", "phi3"])
def test_unquantized_cache_is_that_of_transformers(name):
    net, prompt = model(name), ids(40, 2)
    expected = read(net, plain(net), prompt, 20, 7)
    cache = kv_cache(net, "none")
    assert torch.equal(read(net, cache, prompt, 20, 7), expected)
    assert cache.bits_per_coordinate() == 16


@pytest.mark.parametrize("name", FAMILIES)
def test_unquantized_cache_has_the_lengths_of_transformers(name):
    net = model(name)
    caches = [plain(net), kv_cache(net, "none")]
    for tokens in (0, 20, 21):
        for cache in caches:
            if tokens:
                read(net, cache, ids(tokens), tokens)
        first, second = caches
        assert first.get_seq_length() == second.get_seq_length()
        assert first.is_sliding == second.is_sliding and first.is_croppable == second.is_croppable
        for number, layer in enumerate(second.layers):
            if isinstance(layer, PackedLayer | DynamicSlidingWindowLayer):
                for queries in (1, 5):
                    assert first.get_mask_sizes(queries, number) == second.get_mask_sizes(queries, number)
        assert second.get_max_length() == first.get_max_length()


def test_only_full_attention_is_packed():
    assert [type(layer) for layer in kv_cache(model("llama"), "polar").layers] == [PackedLayer, PackedLayer]
    kinds = [type(layer) for layer in kv_cache(model("gemma3"), "polar").layers]
    assert kinds == [DynamicSlidingWindowLayer, PackedLayer]
    kinds = [type(layer) for layer in kv_cache(model("qwen3_5"), "polar").layers]
    assert kinds == [type(plain(model("qwen3_5")).layers[0]), PackedLayer]


# --- with quantization ---


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", FAMILIES)
def test_later_tokens_are_near_the_exact_ones(name, spec):
    net, prompt = model(name), ids(160, 2)
    expected = read(net, plain(net), prompt, 150, 5)[:, 150:]
    cache = kv_cache(net, spec)
    found = read(net, cache, prompt, 150, 5)[:, 150:]
    assert cache.get_seq_length() == 160
    assert relative_error(found, expected) < 0.25
    if spec != "polar-rope":
        assert not torch.equal(found, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_memory_falls(spec):
    net, prompt = model("llama"), ids(480)
    cache = kv_cache(net, spec)
    read(net, cache, prompt, 480)
    exact = 2 * 2 * 2 * 480 * 32 * 4
    assert cache.held_bytes() < (0.45 if spec == "polar-rope" else 0.2) * exact
    assert cache.coordinates_per_token() == 2 * 2 * 2 * 32
    assert not any(isinstance(value, Tensor) for layer in cache.packed_layers for value in vars(layer).values())


@pytest.mark.parametrize(("spec", "bits"), [("polar", 3.875), ("hadamard:3,centred=0", 3.5)])
def test_bits_are_those_of_a_count_by_hand(spec, bits):
    """Heads of 32: a factor or a scale costs half a bit; polar pads one of four angles to a byte of four."""
    net = made("llama", head_dim=64) if spec == "polar" else model("llama")
    cache = kv_cache(net, spec)
    assert cache.bits_per_coordinate() == 0 == cache.held_bytes() == cache.coordinates_per_token()
    read(net, cache, ids(256), 256)
    assert cache.bits_per_coordinate() == bits
    assert cache.held_bytes() * 8 == bits * 256 * cache.coordinates_per_token()
    for token in range(40):
        read(net, cache, ids(1, seed=token), 1)
        assert bits <= cache.bits_per_coordinate() < bits * 1.14


def test_recent_tokens_count_with_sixteen_bits():
    cache = kv_cache(model("llama"), "hadamard:4,centred=0,residual=64")
    read(model("llama"), cache, ids(256), 256)
    assert cache.bits_per_coordinate() == (64 * 16 + 192 * 4.5) / 256


# --- what generate and users do with a cache ---


@pytest.mark.parametrize("spec", ["none", *SPECS])
def test_reset_forgets_everything(spec):
    net, prompt = model("llama"), ids(150)
    cache = kv_cache(net, spec)
    first = read(net, cache, prompt, 140, 5)
    cache.reset()
    assert cache.get_seq_length() == 0 == cache.held_bytes()
    assert torch.equal(read(net, cache, prompt, 140, 5), first)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.crop(-1000)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("spec", ["none", *SPECS])
def test_sequences_are_reordered_repeated_and_chosen(spec):
    net, prompt = model("llama"), ids(140, 3)
    cache = kv_cache(net, spec)
    read(net, cache, prompt[:, :138], 138)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    assert cache.batch_size == 3
    again = kv_cache(net, spec)
    read(net, again, prompt[:, :138], 138)
    order = torch.tensor([2, 0, 1])
    found, expected = read(net, cache, prompt[order][:, 138:]), read(net, again, prompt[:, 138:])
    assert each_near(found, expected[order], F32_SUM, F32_MATRIX)


@pytest.mark.parametrize("spec", SPECS)
def test_copies_are_independent(spec):
    """As users copy the cache of a long prompt for each question about it."""
    net, prompt = model("llama"), ids(150)
    cache = kv_cache(net, spec)
    read(net, cache, prompt[:, :140], 130)
    copied = copy.deepcopy(cache)
    expected = read(net, copied, prompt[:, 140:])
    assert cache.get_seq_length() == 140
    assert torch.equal(read(net, cache, prompt[:, 140:]), expected)


def generated(net: Any, cache: Any, prompt: Tensor, **settings: Any) -> Tensor:
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **settings}
    found: Tensor = net.generate(prompt, past_key_values=cache, **settings)
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_takes_every_method(spec, settings):
    net, prompt = model("llama"), ids(70)
    cache = kv_cache(net, spec)
    found = generated(net, cache, prompt, **settings)
    assert found.shape == (1, 78) and cache.get_seq_length() == 77
    assert torch.equal(generated(net, kv_cache(net, spec), prompt, **settings), found)
    if not settings:  # a second turn continues the cache
        second = generated(net, cache, torch.cat([found, ids(5, seed=9)], dim=1))
        assert second.shape == (1, 78 + 5 + 8) and cache.get_seq_length() == 90


@pytest.mark.parametrize("spec", ["none", *SPECS])
def test_padded_batches(spec):
    """A sequence with padding before it gets nearly the tokens that it gets alone."""
    net, prompt = model("llama"), ids(60, 2)
    prompt[1, :25] = 0
    mask = torch.ones_like(prompt)
    mask[1, :25] = 0
    cache = kv_cache(net, spec)
    found = net(prompt, attention_mask=mask, past_key_values=cache).logits
    alone = net(prompt[1:, 25:]).logits
    assert relative_error(found[1:, 25:], alone) < F32_FEW
    longer = torch.cat([mask, torch.ones(2, 12, dtype=mask.dtype)], dim=1)
    tokens = ids(12, 2, seed=4)
    for count in range(12):
        seen = longer[:, : 61 + count]
        last = net(tokens[:, count : count + 1], attention_mask=seen, past_key_values=cache).logits
    expected = net(torch.cat([prompt[1:, 25:], tokens[1:]], dim=1)).logits[:, -1:]
    assert relative_error(last[1:], expected) < (F32_FEW if spec == "none" else 0.3)
    exact = generated(net, kv_cache(net, "none"), prompt, attention_mask=mask)
    assert torch.equal(exact, generated(net, plain(net), prompt, attention_mask=mask))
    assert generated(net, kv_cache(net, spec), prompt, attention_mask=mask).shape == exact.shape


def test_models_of_half_precision():
    net = made("llama").to(torch.bfloat16)
    for spec in SPECS:
        cache = kv_cache(net, spec)
        found = read(net, cache, ids(140), 135)
        assert found.dtype == torch.bfloat16 and found.isfinite().all()
        assert all(states.decoded().dtype == torch.bfloat16 for states in cache.layers[0].states)


def test_caches_of_inference_mode_go_on_outside_of_it():
    net, prompt = model("llama"), ids(150)
    for spec in SPECS:
        cache = kv_cache(net, spec)
        with torch.inference_mode():
            read(net, cache, prompt[:, :142], 140)
        assert read(net, cache, prompt[:, 142:]).isfinite().all(), spec


def test_gradients_flow_around_a_cache():
    """What is packed has none, but tables that inference mode made may not be in the way."""
    net = model("llama")
    for spec in SPECS:
        with torch.inference_mode():
            read(net, kv_cache(net, spec), ids(130), 130)
        cache = kv_cache(net, spec)
        with torch.enable_grad():
            read(net, cache, ids(131), 130).sum().backward()
        net.zero_grad()


# --- bases ---


def test_bases_are_made_once_for_a_model_and_go_with_it():
    net = made("llama")
    first, second = kv_cache(net, "klt:3"), kv_cache(net, "klt:2,keys=4")
    assert all(first.bases[number] is second.bases[number] for number in (0, 1))
    assert kv_cache(made("llama"), "klt:3").bases[0] is not first.bases[0]
    there = weakref.ref(net)
    bases = weakref.ref(first.bases[0])
    del net, first, second
    gc.collect()
    assert there() is None and bases() is None


def test_a_cache_does_not_keep_its_model():
    net = made("llama")
    cache = kv_cache(net, "klt:3")
    read(net, cache, ids(70), 70)
    there = weakref.ref(net)
    del net
    gc.collect()
    assert there() is None and cache.get_seq_length() == 70
