"""The bases of klt.py from the weights of a model: projections of queries, keys, values and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pqweights.errors import OptionError
from pqweights.models import has_trait
from pqweights.models.traits import Trait
from pqweights.runtime.kv.klt import LayerBases, LayerRope, StateBasis
from pqweights.runtime.kv.polar_rope import RopePairs
from pqweights.runtime.kv.schemes import FULL, CachedModel

# Directions that the weights leave out keep this share of the mean variance, so that every covariance is invertible.
LEAST_SHARE = 1e-4


def model_bases(net: Any, model: CachedModel) -> dict[int, LayerBases]:
    """Return the bases of all layers with full attention, by their number.

    net: the model, a PreTrainedModel

    Raises OptionError for a model whose attention is not made of four projections.
    """
    numbers = [number for number, layer_type in enumerate(model.layers) if layer_type == FULL]
    attentions = {getattr(module, "layer_idx", None): (module, parent) for module, parent in _attentions(net)}
    result = {}
    for number in numbers:
        if number not in attentions:
            raise OptionError(
                f"KV cache klt: {model.config.model_type}: layer {number}: expected q_proj, k_proj, v_proj and o_proj, "
                "from which the transform is made; use hadamard"
            )
        rope = _rope(net, model, number, attentions[number][0])
        heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        result[number] = _layer_bases(*attentions[number], heads, rope)
    return result


def _attentions(net: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the attention modules with four projections, each with the module that it is a child of."""
    for parent in net.modules():
        for child in parent.children():
            apart = all(hasattr(child, name) for name in ("q_proj", "k_proj", "v_proj"))
            if (apart or hasattr(child, "qkv_proj")) and _output(child) is not None:
                yield child, parent


def _output(attention: Any) -> Any:
    """Return the output projection of an attention module; None without one."""
    return next(
        (getattr(attention, name) for name in ("o_proj", "out_proj", "dense") if hasattr(attention, name)), None
    )


def _layer_bases(attention: Any, parent: Any, heads: int, rope: LayerRope | None) -> LayerBases:
    """Return the bases of a layer. heads: those of keys, as the configuration says"""
    with torch.no_grad():
        size = attention.head_dim
        gain = _norm_gain(parent, attention)
        query_weight, keys, values = (weight * gain for weight in _projections(attention, heads))
        key_heads = keys.unflatten(0, (-1, size))
        heads = len(key_heads)  # not all models follow their configuration
        value_heads = values.unflatten(0, (heads, -1))
        queries = query_weight.unflatten(0, (heads, -1, size))
        output = _weight(_output(attention))
        if queries.shape[1] * heads * value_heads.shape[1] == 2 * output.shape[1]:  # each head's queries, then its gate
            queries = queries[:, 0::2]
        outputs = output.unflatten(1, (heads, -1, value_heads.shape[1]))
        key_gain, query_gain = (_head_gain(attention, name, size) for name in ("k_norm", "q_norm"))
        of_queries = torch.einsum("hrdi,hrei->hde", queries, queries) * query_gain[:, None] * query_gain
        of_keys = torch.einsum("hdi,hei->hde", key_heads, key_heads) * key_gain[:, None] * key_gain
        of_values = torch.einsum("hdi,hei->hde", value_heads, value_heads)
        of_outputs = torch.einsum("ihrd,ihre->hde", outputs, outputs)
        return LayerBases(_basis(of_keys, of_queries), _basis(of_values, of_outputs), rope)


def _basis(covariance: Tensor, measure: Tensor) -> StateBasis:
    """Return the transform of a covariance for errors that are measured by e^T measure e, both [heads, size, size]."""
    values, vectors = torch.linalg.eigh(measure.double())
    # Of the measure only its directions matter; with a mean of one, coefficients have the size of states.
    mean = values.mean(-1, keepdim=True)
    values = values.clamp(min=0) / torch.where(mean > 0, mean, 1) + LEAST_SHARE
    root = vectors * values.sqrt()[:, None] @ vectors.transpose(-1, -2)
    inverse = vectors * values.rsqrt()[:, None] @ vectors.transpose(-1, -2)
    variances, vectors = torch.linalg.eigh(root @ covariance.double() @ root)
    mean = variances.mean(-1, keepdim=True)
    variances = variances.clamp(min=0) + torch.where(mean > 0, LEAST_SHARE * mean, 1)  # weights may be zero
    synthesis = vectors.transpose(-1, -2) @ inverse
    return StateBasis((root @ vectors).float(), synthesis.float(), variances.float())


def _projections(attention: Any, heads: int) -> Iterator[Tensor]:
    """Yield the weights of queries, keys and values, [outputs, inputs] f32.

    heads: those of keys, which are as many rows of a joint projection as those of values
    """
    if hasattr(attention, "qkv_proj"):
        whole = _weight(attention.qkv_proj)
        rows = heads * attention.head_dim
        yield from whole.split([len(whole) - 2 * rows, rows, rows])
    else:
        for name in ("q_proj", "k_proj", "v_proj"):
            yield _weight(getattr(attention, name))


def _weight(module: Any) -> Tensor:
    """Return the matrix of a linear layer, [outputs, inputs] f32, also of one whose weight is packed."""
    weight = module.weight
    with torch.no_grad():
        plain: Tensor = weight.float() if type(weight).__module__.startswith(("torch.", "pqweights.")) else (
            weight.dequantize()
        )  # fmt: skip
        return plain.float()


def _norm_gain(parent: Any, attention: Any) -> Tensor | float:
    """Return the gain of the norm before the attention, [inputs] f32; 1 if there is none that is known."""
    norm = getattr(parent, "input_layernorm", None)
    weight = getattr(norm, "weight", None)
    projection = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.k_proj
    if norm is None or weight is None or weight.numel() != projection.in_features:
        return 1.0
    return _gain(norm, weight)


def _gain(norm: Any, weight: Any) -> Tensor:
    """Return what a norm multiplies each coordinate by, [size] f32: its weight, or 1 + weight.

    It shows in what the norm makes of ones and minus ones, and of the opposite, which leaves out its bias.
    """
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    gain: Tensor = (norm(signs[None]) - norm(-signs[None]))[0].float().abs() / 2
    return gain


def _head_gain(attention: Any, name: str, size: int) -> Tensor:
    """Return the gain of a norm of each head's queries or keys, [size] f32; ones if there is none."""
    norm = getattr(attention, name, None)
    weight = getattr(norm, "weight", None)
    known = norm is not None and weight is not None and weight.numel() == size
    return _gain(norm, weight) if known else torch.ones(size, device=_weight(_output(attention)).device)


def _rope(net: Any, model: CachedModel, number: int, attention: Any) -> LayerRope | None:
    """Return the angles of RoPE in a layer; None for a layer without it."""
    if model.pairs is None or not _is_rotated(model, number, attention):
        return None
    names = ("inv_freq", f"{model.layers[number]}_inv_freq")
    # A tower for images has angles of its own, which come first.
    decoder = net.get_decoder() if hasattr(net, "get_decoder") else net
    buffers = (getattr(module, name, None) for module in decoder.modules() for name in names)
    frequencies = next((buffer for buffer in buffers if isinstance(buffer, Tensor) and buffer.dim() == 1), None)
    if frequencies is None or 2 * len(frequencies) > model.size:
        return None
    pairs = RopePairs(model.size, 2 * len(frequencies), model.pairs.interleaved)
    return LayerRope(pairs, frequencies.detach().clone().cpu())


def _is_rotated(model: CachedModel, number: int, attention: Any) -> bool:
    """Whether RoPE turns the keys of a layer in a model that has RoPE."""
    only_windows = has_trait(model.config.model_type, Trait.ROTATES_WINDOWS_ONLY)
    if only_windows and any(layer_type != FULL for layer_type in model.layers):
        return False
    listed = getattr(model.config, "no_rope_layers", None)  # in spite of the name, 1 stands for layers with RoPE
    return bool(getattr(attention, "use_rope", True) and (not listed or listed[number]))
