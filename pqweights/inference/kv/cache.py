"""The quantized cache of a model, as transformers takes it for `past_key_values`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache

from pqweights.errors import OptionError
from pqweights.inference.kv.bases import model_bases
from pqweights.inference.kv.klt import LayerBases
from pqweights.inference.kv.layer import PackedLayer
from pqweights.inference.kv.model import FULL, CachedModel, cached_model
from pqweights.inference.kv.on_codes import NAME as ON_CODES
from pqweights.inference.kv.on_codes import VALUE_UNIT, may_attend_on_codes
from pqweights.inference.kv.schemes import UNQUANTIZED, Hadamard, PolarRope, Scheme, parse_spec
from pqweights.inference.kv.states import TOKENS_TOGETHER, PackedStates, tensor_bytes


class KVCache(Cache):
    """A cache whose layers with full attention hold packed keys and values.

    Layers with a sliding window, which forget all but the last tokens, and recurrent states stay as they are.

    model: what is known of the model
    scheme: the method
    bases: what the weights say, by layer, for methods that need it
    """

    def __init__(self, model: CachedModel, scheme: Scheme, bases: Mapping[int, LayerBases]) -> None:
        self.scheme, self.model, self.bases = scheme, model, bases
        layers = [_layer(model, scheme, number, bases.get(number)) for number in range(len(model.layers))]
        super().__init__(layers=layers)

    @property
    def spec(self) -> str:
        """The method with its options, as parse_spec takes it."""
        return str(self.scheme)

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers with packed keys and values."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    def held_bytes(self) -> int:
        """Return the memory of all packed layers: codes, scales, recent tokens, and room for more, in bytes."""
        return sum(tensor_bytes(tensor) for tensor in self._tensors())

    def bits_per_coordinate(self) -> float:
        """Return the memory for each coordinate of the keys and values of the packed layers, in bits.

        Everything that held_bytes counts is in it, but coordinates that are not packed count with 16 bits each, as in a
        model of BF16, even if the model computes in float32. 0 for an empty cache.
        """
        bits, count = 0, 0
        for states, window in self._states():
            bits += 8 * states.packed_bytes() + 16 * window.numel()
            batch, heads, _, size = window.shape
            count += batch * heads * states.tokens * size
        return bits / count if count else 0.0

    def coordinates_per_token(self) -> int:
        """Return how many coordinates the keys and values of one token have in all packed layers that hold any."""
        return sum(window.shape[1] * window.shape[3] for _, window in self._states())

    def _states(self) -> Iterator[tuple[PackedStates, Tensor]]:
        """Yield the keys and the values of all packed layers that hold any, each with its window."""
        for layer in self.packed_layers:
            for states in layer.states if layer.is_initialized else ():
                if states.window is not None:
                    yield states, states.window

    def _tensors(self) -> Iterator[Tensor]:
        for states, _ in self._states():
            yield from states.tensors()


def kv_cache(model: Any, spec: str, *, on_codes: bool = False) -> KVCache:
    """Return an empty quantized cache for a model, for `past_key_values` of its `generate` or of its forward pass.

    model: a PreTrainedModel, or its configuration, from which all methods but klt can be made
    spec: the method and its options, such as "klt:3", "hadamard:3", "polar" or "polar-rope:m4n2,values=2,residual=64"
    on_codes: whether tokens that are generated one by one attend on the codes, without restoring keys and values, where
        there are kernels for it: on CPUs, for hadamard and polar-rope, where sizes allow. The
        model's attention is then set to one that can (`set_attn_implementation`); with other caches it computes what
        it did. A few tokens are read to see whether the model hands keys and values on as they are.

    Raises OptionError for a spec that names no method, and for a model whose cache the method cannot quantize.
    """
    scheme = parse_spec(spec)
    config = getattr(model, "config", model)
    cached = cached_model(config, scheme)
    if scheme.needs_weights and config is model:
        raise OptionError(f"KV cache {scheme.name}: expected the model itself, as its weights give the transform, "
                          "found its configuration only")  # fmt: skip
    cache = KVCache(cached, scheme, _bases(model, cached) if scheme.needs_weights else {})
    if on_codes and scheme.has_kernels and config is not model and _attend_on_codes(model, cached):
        for layer in cache.packed_layers:
            layer.on_codes = True
    return cache


# What is known of models that are still there: the bases, with the weights that they were made from, and whether the
# attention takes packed keys.
_known_bases: WeakKeyDictionary[Any, tuple[Any, dict[int, LayerBases]]] = WeakKeyDictionary()
_take_codes: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _bases(net: Any, model: CachedModel) -> dict[int, LayerBases]:
    weights = [
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version) for parameter in net.parameters()
    ]
    known, bases = _known_bases.get(net, (None, {}))
    if known != weights:
        bases = model_bases(net, model)
        _known_bases[net] = weights, bases
    return bases


def _attend_on_codes(net: Any, model: CachedModel) -> bool:
    """Let a model attend on codes if it does so right; return whether it does.

    A few tokens are read to see that the attention takes the packed keys and values of every layer: some models change
    them on the way.
    """
    if not may_attend_on_codes(net, model):
        return False
    before = net.config._attn_implementation
    net.set_attn_implementation(ON_CODES)
    if net not in _take_codes:
        _take_codes[net] = _takes_codes(net, model)
    if not _take_codes[net]:
        net.set_attn_implementation(before)
    return _take_codes[net]


def _takes_codes(net: Any, model: CachedModel) -> bool:
    # Of the methods with kernels the first needs no more than a token, the second takes more sizes of heads.
    scheme = PolarRope(values=UNQUANTIZED, residual=0) if model.size % VALUE_UNIT else Hadamard(centred=0)
    cache = KVCache(model, scheme, {})
    for layer in cache.packed_layers:
        layer.on_codes = True
    tokens = torch.zeros(1, TOKENS_TOGETHER if scheme.needs_rope else 1, dtype=torch.int64, device=net.device)
    try:
        with torch.inference_mode():
            for ids in (tokens, tokens[:, :1]):
                net(ids, past_key_values=cache, use_cache=True)
    except (RuntimeError, ValueError, TypeError, IndexError, OptionError):
        return False
    return all(layer.took_codes for layer in cache.packed_layers)


def _layer(model: CachedModel, scheme: Scheme, number: int, bases: LayerBases | None) -> Any:
    layer_type, options = model.layers[number], model.options[number]
    if layer_type == FULL:
        return PackedLayer(scheme, model, bases)
    return DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**options)
