"""The quantized cache of a model, as transformers takes it for `past_key_values`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache

from pqweights.errors import OptionError
from pqweights.kv.bases import model_bases
from pqweights.kv.klt import LayerBases
from pqweights.kv.layer import PackedHybridLayer, PackedLayer
from pqweights.kv.model import FULL, HYBRID, CachedModel, cached_model
from pqweights.kv.on_codes import attend_on_codes
from pqweights.kv.schemes import Scheme
from pqweights.kv.spec import parse_spec
from pqweights.kv.states import tensor_bytes


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
        for layer in self.packed_layers:
            for states in layer.states if layer.is_initialized else ():
                window = states.window
                if window is None:
                    continue
                bits += 8 * states.packed_bytes() + 16 * window.numel()
                batch, heads, _, size = window.shape
                count += batch * heads * states.tokens * size
        return bits / count if count else 0.0

    def coordinates_per_token(self) -> int:
        """Return how many coordinates the keys and values of one token have in all packed layers that hold any."""
        count = 0
        for layer in self.packed_layers:
            for states in layer.states if layer.is_initialized else ():
                if states.window is not None:
                    count += states.window.shape[1] * states.window.shape[3]
        return count

    def _tensors(self) -> Iterator[Tensor]:
        for layer in self.packed_layers:
            if layer.is_initialized:
                for states in layer.states:
                    yield from states.tensors()


def kv_cache(model: Any, spec: str, *, on_codes: bool = False) -> KVCache:
    """Return an empty quantized cache for a model, for `past_key_values` of its `generate` or of its forward pass.

    model: a PreTrainedModel, or its configuration, from which all methods but klt can be made
    spec: the method and its options, such as "klt:3", "hadamard:3", "polar" or "polar-rope:m4n2,values=2,residual=64"
    on_codes: whether tokens that are generated one by one attend on the codes, without restoring keys and values, where
        there are kernels for it: on CPUs, for hadamard and polar-rope. The model's attention is set to one that can
        (`set_attn_implementation`), also for other caches, with which it computes what it did.

    Raises OptionError for a spec that names no method, and for a model whose cache the method cannot quantize.
    """
    scheme = parse_spec(spec)
    config = getattr(model, "config", model)
    cached = cached_model(config, scheme)
    if on_codes and config is not model and attend_on_codes(model):
        cache = KVCache(cached, scheme, _bases(model, cached) if scheme.needs_weights else {})
        for layer in cache.packed_layers:
            layer.on_codes = True
        return cache
    if not scheme.needs_weights:
        return KVCache(cached, scheme, {})
    if config is model:
        raise OptionError(f"KV cache {scheme.name}: expected the model itself, as its weights give the transform, "
                          "found its configuration only")  # fmt: skip
    return KVCache(cached, scheme, _bases(model, cached))


# The bases of models that are still there, as making them takes a while.
_known_bases: WeakKeyDictionary[Any, dict[int, LayerBases]] = WeakKeyDictionary()


def _bases(net: Any, model: CachedModel) -> dict[int, LayerBases]:
    if net not in _known_bases:
        _known_bases[net] = model_bases(net, model)
    return _known_bases[net]


def _layer(model: CachedModel, scheme: Scheme, number: int, bases: LayerBases | None) -> Any:
    kind, options = model.layers[number], model.options[number]
    if kind == FULL:
        return PackedLayer(scheme, model, bases)
    if kind == HYBRID:
        return PackedHybridLayer(scheme, model, bases, **options)
    return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)
