"""Transform coding from the weights: bases are what hooks on a model measure, and bits lie where they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from caches import gaussian, ids, made, model, relative_error
from closeness import ALIKE, F32_MATRIX, F32_SOLVED, F32_SUM, F64_SUM, each_near
from torch import Tensor

import pqweights
from pqweights.runtime.kv.bases import LEAST_SHARE, model_bases
from pqweights.runtime.kv.cache import kv_cache
from pqweights.runtime.kv.klt import ERRORS, KarhunenLoeve, LayerBases, StateBasis, allocated
from pqweights.runtime.kv.schemes import cached_model, parse_spec
from pqweights.runtime.kv.states import PackedStates

KLT = parse_spec("klt")
# Norms of 1 + weight or with biases, norms of each head's queries and keys, joint projections, and gates.
FAMILIES = ("llama", "qwen3", "phi3", "gemma3", "qwen3_5", "starcoder2", "stablelm")


def bases(net: Any) -> dict[int, LayerBases]:
    return model_bases(net, cached_model(net.config, KLT))


def parts(found: dict[int, LayerBases]) -> list[StateBasis]:
    return [basis for each in found.values() for basis in (each.keys, each.values)]


@pytest.mark.parametrize("name", [*FAMILIES, "glm", "cohere", "gpt_oss", "gptj", "cohere2", "gemma2", "qwen3_vl"])
def test_synthesis_undoes_analysis(name):
    for basis in parts(bases(model(name))):
        product = basis.analysis.double() @ basis.synthesis.double()
        assert each_near(product, torch.eye(32, dtype=torch.float64).expand_as(product), F32_SUM, F32_SOLVED)
        assert (basis.variances > 0).all() and basis.variances.shape == basis.analysis.shape[:2]


def attending_layers(net: Any) -> dict[int, Any]:
    return {layer.self_attn.layer_idx: layer for layer in net.modules() if hasattr(layer, "self_attn")}


def states_before_rope(net: Any, number: int) -> dict[str, Tensor]:
    """Queries, keys and values of a layer for random inputs, [tokens, heads, size], without RoPE and without biases.

    The layer runs as it is; its inputs are independent Gaussian numbers before the norm, and angles of RoPE are zero.
    """
    layer = attending_layers(net)[number]
    attention, inputs = layer.self_attn, layer.input_layernorm(gaussian(1, 40_000, net.config.hidden_size))
    seen: dict[str, Tensor] = {}

    class Stop(Exception):
        pass

    def attend(asked: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        seen.update(queries=query[0].transpose(0, 1), keys=key[0].transpose(0, 1), values=value[0].transpose(0, 1))
        raise Stop

    from transformers import AttentionInterface

    AttentionInterface.register("pqweights_seen", attend)
    before = net.config._attn_implementation
    net.config._attn_implementation = "pqweights_seen"
    rotated = cached_model(net.config, KLT).pairs
    cos = torch.ones(1, inputs.shape[1], rotated.rotated)
    with torch.no_grad(), pytest.raises(Stop):
        attention(inputs, position_embeddings=(cos, torch.zeros_like(cos)), attention_mask=None)
    net.config._attn_implementation = before
    return seen


def covariance(states: Tensor) -> Tensor:
    """[tokens, heads, size] -> [heads, size, size], without means, which come from biases."""
    states = (states - states.mean(0)).double()
    return torch.einsum("thd,the->hde", states, states) / len(states)


@pytest.mark.parametrize("name", FAMILIES)
def test_bases_follow_from_the_queries_keys_and_values_that_the_model_computes(name):
    """Errors of keys are measured by the covariance of the queries, not of their gates."""
    net = made(name)
    number = len(net.config.layer_types) - 1 if getattr(net.config, "layer_types", None) else 1
    for projection in net.modules():
        if isinstance(projection, torch.nn.Linear) and projection.bias is not None:
            torch.nn.init.zeros_(projection.bias)
    seen = states_before_rope(net, number)
    found = bases(net)[number]
    queries = covariance(seen["queries"]).unflatten(0, (2, -1)).sum(1)
    values, vectors = torch.linalg.eigh(queries)
    values = values / values.mean(-1, keepdim=True) + LEAST_SHARE
    root = vectors * values.sqrt()[:, None] @ vectors.transpose(-1, -2)
    expected = torch.linalg.eigvalsh(root @ covariance(seen["keys"]) @ root)
    assert alike(found.keys.variances, expected)
    # In the basis, keys are not correlated, and errors count as much as in the measure.
    turned = covariance(seen["keys"].transpose(0, 1).matmul(found.keys.analysis).transpose(0, 1))
    assert off_diagonal(turned) < 0.12
    measured = (
        found.keys.synthesis.double() @ (queries / values.mean(-1)[:, None, None]) @ found.keys.synthesis.double().mT
    )
    measured = measured / measured.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    assert off_diagonal(measured) < 0.12
    turned = covariance(seen["values"].transpose(0, 1).matmul(found.values.analysis).transpose(0, 1))
    assert off_diagonal(turned) < 0.12


def alike(variances: Tensor, expected: Tensor) -> bool:
    shares = [each.double() / each.double().sum(-1, keepdim=True) for each in (variances, expected)]
    return bool((shares[0] - shares[1]).abs().max() < 0.1 * shares[1].max())


def off_diagonal(matrix: Tensor) -> float:
    """The largest correlation of two of the coefficients of larger variance."""
    spread = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=1e-2 * float(matrix.diagonal(dim1=-2, dim2=-1).max())).sqrt()
    correlation = matrix / spread[:, :, None] / spread[:, None]
    return float((correlation - torch.diag_embed(correlation.diagonal(dim1=-2, dim2=-1))).abs().max())


# --- RoPE ---


@pytest.mark.parametrize("name", ["llama", "glm", "cohere", "gemma3", "phi3", "qwen3_vl", "cohere2"])
def test_keys_are_turned_back_to_what_they_were_before_rope(name):
    """The same token everywhere has the same key then; layers without RoPE are left alone."""
    net = model(name)
    cache = kv_cache(net, "none")
    with torch.no_grad():
        net(torch.full((1, 12), 7), past_key_values=cache)
    number, layer = next((n, each) for n, each in enumerate(cache.layers) if each in cache.packed_layers)
    keys = layer.states[0].window
    rope = bases(net)[number].rope
    assert (rope is None) == (name == "cohere2")
    back = keys if rope is None else rope.applied(keys, 0, -1)
    assert each_near(back, back[:, :, :1], F32_SUM, F32_MATRIX * float(keys.abs().max()))
    if rope is not None:
        assert each_near(rope.applied(back[:, :, 5:], 5, 1), keys[:, :, 5:], F32_SUM, F32_SUM * float(keys.abs().max()))


# --- bits ---


def test_bits_are_allocated_as_reverse_water_filling_has_it():
    variances = torch.logspace(3, -3, 64)
    for bits in (1, 2.25, 4):
        widths = allocated(variances, bits)
        assert widths == sorted(widths, reverse=True) and sum(widths) == int(bits * 8)
        eights = variances.unflatten(0, (8, 8)).mean(-1).tolist()

        def error(given: list[int], eights: list[float] = eights) -> float:
            return sum(variance * ERRORS[width] for variance, width in zip(eights, given, strict=True))

        for low in range(8):
            for high in range(8):
                other = list(widths)
                other[low] += 1
                other[high] -= 1
                if min(other) >= 0 and max(other) <= 8:
                    assert error(other) >= error(widths) * (1 - F64_SUM)
    assert allocated(torch.ones(64), 3) == [3] * 8
    assert allocated(torch.ones(8), 1) == [1]


def test_weights_of_zero_leave_everything_finite():
    net = made("llama")
    with torch.no_grad():
        for layer in attending_layers(net).values():
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
                projection.weight.zero_()
        cache = kv_cache(net, "klt:3")
        net(ids(100), past_key_values=cache)
        found = net(ids(2), past_key_values=cache).logits
        assert found.isfinite().all()
        for states in cache.packed_layers[0].states:
            decoded = states.decoded()
            assert decoded is not None and not decoded.any()


@pytest.mark.parametrize("size", [256, 512])
def test_large_heads_have_an_order_of_their_own(size):
    even = StateBasis(torch.eye(size)[None], torch.eye(size)[None], torch.ones(1, size))
    states = gaussian(1, 1, 300, size) * torch.logspace(0, 2, size)[torch.randperm(size)]
    held = PackedStates(KarhunenLoeve(even, 4, None), 0)
    held.append(states)
    found = held.decoded()
    assert found is not None and relative_error(found, states) < 0.01


def test_packed_model_gives_nearly_the_bases_of_the_plain_one(tmp_path_factory):
    folder: Path = families.master(tmp_path_factory.getbasetemp(), "llama")
    packed, plain = (pqweights.load_model(folder, packed=each, dtype="float32") for each in (True, False))
    for one, other in zip(parts(bases(packed)), parts(bases(plain)), strict=True):
        assert each_near(one.variances, other.variances, ALIKE, F32_SOLVED * float(other.variances.max()))
    prompt = ids(200)
    found = []
    with torch.no_grad():
        for net in (packed, plain):
            cache = kv_cache(net, "klt:4")
            net(prompt, past_key_values=cache)
            found.append(net(prompt[:, :3], past_key_values=cache).logits)
    assert relative_error(found[0], found[1]) < 0.01
