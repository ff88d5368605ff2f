"""Attention on codes gives what attention on restored keys and values gives, or leaves it to that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from caches import causal, ids, model, one_by_one, read
from closeness import assert_near, deviation
from commands import raises
from torch import Tensor

from pqweights.errors import OptionError
from pqweights.runtime.kv.cache import KVCache, kv_cache
from pqweights.runtime.kv.on_codes import NAME, PAST

PROMPT, NEXT = 180, 4
# Entries of the look-up tables of polar-rope are integers; the other products are in float32.
SPECS = (
    "hadamard:3",
    "hadamard:4,centred=0",
    "hadamard:keys=2,values=6,residual=16",
    "hadamard:8",
    "polar-rope",
    "polar-rope:m4n2,residual=0",
    "polar-rope:values=2,residual=40",
    "polar-rope:values=16",
)
WITHOUT_KERNELS = ("klt:3", "polar", "polar-rope:m6n4", "none")


@pytest.fixture(scope="module")
def llama() -> Any:
    return causal()


def caches(net: Any, spec: str, prompt: Tensor, mask: Tensor | None = None) -> tuple[KVCache, KVCache]:
    """A cache that restores and one that does not, which have read the same tokens."""
    before = kv_cache(net, spec)
    read(net, before, prompt, mask)
    after = kv_cache(net, spec, on_codes=True)
    read(net, after, prompt, mask)
    return before, after


def check_alike(
    net: Any,
    spec: str,
    before: KVCache,
    after: KVCache,
    *,
    batch: int = 1,
    mask: Tensor | None = None,
    again: bool = False,
) -> None:
    """Both give the same predictions within rounding, and the second attends on codes.

    again: they have read what each predicted before, which may have made another code
    """
    following = ids(NEXT, batch, seed=9)
    whole = None if mask is None else torch.nn.functional.pad(mask, (0, NEXT), value=1)
    expected, found = (one_by_one(net, cache, following, whole) for cache in (before, after))
    assert all(layer._past is not None and layer._past.used for layer in after.packed_layers)
    assert deviation(found, expected)
    differs = ", tables" if "polar-rope" in spec else ", again" if again else ""
    assert_near(found, expected, f"attention on codes{differs}")


def check_falls_back(net: Any, spec: str) -> None:
    """Predictions are those of restored keys and values, to the bit."""
    before, after = caches(net, spec, ids(PROMPT))
    following = ids(NEXT, 1, seed=9)
    assert torch.equal(one_by_one(net, after, following), one_by_one(net, before, following))


# --- the same as with restored states ---


@pytest.mark.parametrize("spec", SPECS)
def test_products_on_codes_are_those_with_restored_states(spec, llama):
    check_alike(llama, spec, *caches(llama, spec, ids(PROMPT)))


@pytest.mark.parametrize("spec", SPECS)
def test_batches_have_masks(spec, llama):
    mask = torch.ones(3, PROMPT, dtype=torch.int64)
    mask[0, :50] = mask[2, :7] = 0
    before, after = caches(llama, spec, ids(PROMPT, 3), mask)
    check_alike(llama, spec, before, after, batch=3, mask=mask)


@pytest.mark.parametrize("spec", SPECS)
def test_cropped_and_chosen_caches_stay_on_codes(spec, llama):
    pair = caches(llama, spec, ids(PROMPT, 3))
    check_alike(llama, spec, *pair, batch=3)
    for cache in pair:
        cache.crop(-75)
    check_alike(llama, spec, *pair, batch=3, again=True)
    for cache in pair:
        cache.reorder_cache(torch.tensor([2, 2, 0]))
    check_alike(llama, spec, *pair, batch=3, again=True)
    for cache in pair:
        cache.batch_select_indices(torch.tensor([1, 2]))
        cache.batch_repeat_interleave(2)
    check_alike(llama, spec, *pair, batch=4, again=True)
    pair = copy.deepcopy(pair)
    check_alike(llama, spec, *pair, batch=4, again=True)


@pytest.mark.parametrize("spec", ["hadamard:3", "polar-rope:residual=0"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_query_heads_share_keys(heads, spec):
    net = causal(num_attention_heads=heads, num_key_value_heads=1)
    check_alike(net, spec, *caches(net, spec, ids(100, 2)), batch=2)


@pytest.mark.parametrize("name", ["Qwen3", "Cohere", "Glm", "Phi", "Mistral", "OPT"])
def test_families_attend_on_codes(name):
    """Their RoPE has halves or neighbours, all coordinates or some; OPT has none."""
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 64} if name == "OPT" else {}
    hidden = 128 if name in ("Phi", "OPT") else 64
    net = causal(name, hidden_size=hidden, **{**sizes, **({"sliding_window": None} if name == "Mistral" else {})})
    spec = "hadamard:4" if name == "OPT" else "polar-rope:residual=0"
    check_alike(net, spec, *caches(net, spec, ids(PROMPT)))


def test_a_model_in_bfloat16_attends_on_codes():
    net = causal().to(torch.bfloat16)
    before, after = caches(net, "hadamard:4", ids(PROMPT))
    found, expected = (one_by_one(net, cache, ids(NEXT)) for cache in (after, before))
    assert found.dtype == torch.bfloat16
    assert_near(found.float(), expected.float(), "torch, BF16")


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_of_transformers_gives_the_same_tokens(beams, llama):
    def generated(**options: Any) -> list[list[int]]:
        cache = kv_cache(llama, "hadamard:8", **options)
        asked = {"max_new_tokens": 24, "num_beams": beams, "do_sample": False, "eos_token_id": -1}
        found: list[list[int]] = llama.generate(ids(60, 2), past_key_values=cache, **asked).tolist()
        return found

    assert generated(on_codes=True) == generated()


def test_sliding_layers_beside_packed_ones_attend_as_before():
    net = causal("Qwen3", num_hidden_layers=4, sliding_window=32, use_sliding_window=True, max_window_layers=2)
    before, after = caches(net, "hadamard:4", ids(PROMPT))
    assert len(after.packed_layers) == 2 < len(after.layers)
    check_alike(net, "hadamard:4", before, after)


def test_other_caches_compute_what_they_did():
    net = causal()
    prompt, mask = ids(PROMPT, 2), torch.ones(2, PROMPT + NEXT, dtype=torch.int64)
    mask[1, :20] = 0

    def predictions() -> Tensor:
        cache = transformers.DynamicCache(config=net.config)
        first = read(net, cache, prompt, mask[:, :PROMPT])
        return torch.cat([first[:, None], one_by_one(net, cache, ids(NEXT, 2), mask)], dim=1)

    expected = predictions()
    kv_cache(net, "hadamard:4", on_codes=True)
    assert net.config._attn_implementation == NAME
    assert torch.equal(predictions(), expected)
    with torch.no_grad():
        assert net(prompt, use_cache=False).logits.shape[1] == PROMPT


# --- where there are no kernels ---


@pytest.mark.parametrize("spec", WITHOUT_KERNELS)
def test_methods_without_kernels_restore(spec, llama):
    check_falls_back(llama, spec)


@pytest.mark.parametrize("size", [16, 40, 80, 512])
@pytest.mark.parametrize("spec", ["hadamard:4", "polar-rope"])
def test_sizes_of_heads_without_kernels_restore(spec, size):
    check_falls_back(causal(head_dim=size), spec)


def test_sizes_of_keys_have_kernels_where_values_stay():
    net = causal(head_dim=40)
    check_alike(net, "polar-rope:values=16", *caches(net, "polar-rope:values=16", ids(PROMPT)))
    check_falls_back(causal(head_dim=512), "polar-rope:values=16")


def test_more_query_heads_than_kernels_take_restore():
    check_falls_back(causal(num_attention_heads=32, num_key_value_heads=1), "hadamard:4")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("Gemma2", {"sliding_window": 16}),
        ("GptOss", {"num_local_experts": 4, "sliding_window": 16}),
        ("Bloom", {"n_head": 4}),
        ("GPTJ", {"n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16, "n_positions": 512}),
        ("Falcon", {"alibi": True, "multi_query": False, "num_kv_heads": 4, "head_dim": None}),
    ],
)
def test_models_that_attend_in_their_own_way_restore(name, changed):
    net = causal(name, **changed)
    check_falls_back(net, "hadamard:4")
    assert net.config._attn_implementation != NAME


def test_a_model_of_which_transformers_replaces_no_attention_restores():
    check_falls_back(model("qwen3_5"), "hadamard:4")


def test_sinks_and_masks_of_heads_restore(llama, monkeypatch):
    """What a model says to the attention beyond keys, values and a plain mask."""
    from pqweights.runtime.kv import on_codes

    kv_cache(llama, "hadamard:8", on_codes=True)  # asks the model whether it can
    calls = []
    monkeypatch.setattr(on_codes, "_scores", lambda *given: calls.append(given))
    for told in ({"s_aux": torch.zeros(4)}, {"attention_mask": torch.zeros(1, 4, 1, 101)}):
        cache = kv_cache(llama, "hadamard:8", on_codes=True)
        shape = (1, 2, 100, 32)
        layer = cache.packed_layers[0]
        first = torch.randn(2, *shape)
        layer.update(first[0], first[1])
        query, key, value = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32)
        taken, given = layer.update(key, value)
        module = torch.nn.Module()
        module.num_key_value_groups = 2  # type: ignore[assignment]
        mask = told.pop("attention_mask", None)
        found, _ = on_codes.attention(module, query, taken, given, mask, **told)
        keys, values = (states.decoded() for states in layer.states)
        last = [torch.cat([old[:, :, :100], new], dim=2) for old, new in ((keys, key), (values, value))]
        expected = torch.nn.functional.scaled_dot_product_attention(query, *last, enable_gqa=True).transpose(1, 2)
        assert_near(found, expected, "attention on codes")
    assert not calls


def test_an_attention_that_is_set_later_restores():
    """Also if it is set in the middle of a text."""
    net = causal()
    before, after = caches(net, "hadamard:4", ids(PROMPT))
    one_by_one(net, after, ids(2, 1, seed=7))
    net.set_attn_implementation("eager")
    assert net.config._attn_implementation != NAME
    one_by_one(net, before, ids(2, 1, seed=7))
    following = ids(NEXT)
    assert_near(one_by_one(net, after, following), one_by_one(net, before, following), "attention on codes")


# --- the agreement between cache and attention ---


def test_an_attention_that_ignores_packed_keys_is_noticed(llama):
    layer = kv_cache(llama, "hadamard:4", on_codes=True).packed_layers[0]
    states = torch.randn(2, 1, 2, 40, 32)
    layer.update(*states)
    one = torch.randn(2, 1, 2, 1, 32)
    assert getattr(layer.update(*one)[0], PAST, None) is not None
    with raises(OptionError, "leave out on_codes"):
        layer.update(*one)
    layer.crop(-1)  # what was broken off is taken back
    layer.update(*one)
    layer.reset()
    layer.update(*states)
    layer.update(*one)


def test_a_step_allocates_less_than_the_restored_states():
    count = 4000
    net = causal(num_hidden_layers=1, max_position_embeddings=8192)
    pair = caches(net, "hadamard:4", ids(count))
    largest = []
    for cache in pair:
        one_by_one(net, cache, ids(1))  # room for more rows may be made once
        with torch.profiler.profile(profile_memory=True) as profile:
            one_by_one(net, cache, ids(1))
        largest.append(max(event.cpu_memory_usage for event in profile.events()))
    restored = count * 2 * 32 * 4
    assert largest[0] >= restored > 4 * largest[1]
