"""The error of attention: an independent computation from states that hooks caught, and nothing left behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from caches import decoded, ids, made, model
from torch import Tensor

from pqweights.inference.kv import attention_error as module
from pqweights.inference.kv.attention_error import attention_error
from pqweights.inference.kv.cache import kv_cache

TOKENS, QUERIES = 96, 20


def states(net: Any, prompt: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of all layers after RoPE, by hooks and by the model's own rotation."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda asked, given, named: inputs.append(named["hidden_states"]), with_kwargs=True
        )
        for layer in net.model.layers
    ]
    with torch.no_grad():
        net(prompt)
        found = []
        cos, sin = net.model.rotary_emb(inputs[0], torch.arange(prompt.shape[1])[None])
        for layer, hidden in zip(net.model.layers, inputs, strict=True):
            attention = layer.self_attn
            query, key, value = (
                projection(hidden).unflatten(-1, (-1, 32)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            found.append((*apply_rotary_pos_emb(query, key, cos, sin), value))
    for hook in hooks:
        hook.remove()
    return found


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One head after the other, one query after the other."""
    result = torch.zeros(QUERIES, 4, 32, dtype=torch.float64)
    for head in range(4):
        for place in range(QUERIES):
            token = TOKENS - QUERIES + place
            keys, values = (each[0, head // 2, : token + 1].double() for each in (key, value))
            scores = torch.softmax(keys @ query[0, head, token].double() / 32**0.5, dim=0)
            result[place, head] = scores @ values
    return result


@pytest.mark.parametrize("spec", ["hadamard:2,centred=0", "polar", "polar-rope:m4n2,residual=0"])
def test_error_is_that_of_an_independent_computation(spec: str) -> None:
    net, prompt = model("llama"), ids(TOKENS)
    error = energy = 0.0
    for query, key, value in states(net, prompt):
        before = TOKENS - QUERIES
        other = [
            torch.cat([decoded(spec, each[:, :, :before], kind), each[:, :, before:]], dim=2)
            for each, kind in ((key, "keys"), (value, "values"))
        ]
        exact, found = attended(query, key, value), attended(query, *other)
        error += float((found - exact).square().sum())
        energy += float(exact.square().sum())
    with torch.no_grad():
        assert attention_error(net, kv_cache(net, spec), prompt, QUERIES) == pytest.approx(error / energy, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss", "qwen3_5", "falcon_h1"])
def test_there_is_an_error_where_codes_are(name: str) -> None:
    net = model(name)
    with torch.no_grad():
        assert attention_error(net, kv_cache(net, "none"), ids(64), 16) is None
        assert 1e-5 < attention_error(net, kv_cache(net, "hadamard:4"), ids(64), 16) < 0.1


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss"])
def test_model_computes_what_it_computes_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with bounded scores, and with sinks; otherwise later layers would be measured on wrong inputs."""
    net, prompt = model(name), ids(40)
    outputs: list[Tensor] = []
    hook = net.register_forward_hook(lambda asked, given, output: outputs.append(output.logits))
    with torch.no_grad():
        net.set_attn_implementation("eager")
        net(prompt)
        attention_error(net, kv_cache(net, "hadamard:2"), prompt, 10)
    hook.remove()
    assert torch.allclose(outputs[0], outputs[1], atol=1e-4 * float(outputs[0].abs().max()))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_of_the_model_is_restored(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = made("llama")
    net.set_attn_implementation(implementation)
    before = net(ids(20)).logits
    with torch.no_grad():
        attention_error(net, kv_cache(net, "polar"), ids(40), 10)
    assert net.config._attn_implementation == implementation
    assert torch.equal(net(ids(20)).logits, before)

    def fails(*given: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(module, "_attention", fails)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no"):
        attention_error(net, kv_cache(net, "polar"), ids(40), 10)
    assert net.config._attn_implementation == implementation
    assert torch.equal(net(ids(20)).logits, before)


def test_cache_is_let_go() -> None:
    net = model("llama")
    cache = kv_cache(net, "polar")
    with torch.no_grad():
        attention_error(net, cache, ids(40), 10)
    assert cache.get_seq_length() == 40
    there = weakref.ref(cache.layers[0])
    del cache
    gc.collect()
    assert there() is None
