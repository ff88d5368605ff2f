"""The quantized cache of a model, as transformers takes it for `past_key_values`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer

from pqweights.errors import OptionError
from pqweights.runtime.kv.bases import model_bases
from pqweights.runtime.kv.klt import LayerBases
from pqweights.runtime.kv.on_codes import NAME as ON_CODES
from pqweights.runtime.kv.on_codes import PAST, VALUE_UNIT, PastOfLayer, has_kernels, may_attend_on_codes
from pqweights.runtime.kv.schemes import (
    FULL,
    UNQUANTIZED,
    CachedModel,
    Hadamard,
    LayerModel,
    PolarRope,
    Scheme,
    cached_model,
    parse_spec,
)
from pqweights.runtime.kv.states import TOKENS_TOGETHER, PackedStates, tensor_bytes


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
        return sum(tensor_bytes(tensor) for states, _ in self._states() for tensor in states.tensors())

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
        (_address(parameter), 0 if parameter.is_inference() else parameter._version) for parameter in net.parameters()
    ]
    known, bases = _known_bases.get(net, (None, {}))
    if known != weights:
        bases = model_bases(net, model)
        _known_bases[net] = weights, bases
    return bases


def _address(parameter: Any) -> int:
    """Return where the values of a parameter are; packed ones have no storage of their own."""
    packed = getattr(parameter, "matrices", None)
    return int(parameter.data_ptr()) if packed is None else id(packed)


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


class PackedLayer(DynamicLayer):
    """The keys and values of a layer with full attention.

    The tokens of an `update` are seen as they came in that call, and packed when they leave the window of recent
    tokens; what is packed is never packed again.

    on_codes: whether single tokens attend on codes, through the attention of on_codes.py, where there are kernels
    """

    def __init__(self, scheme: Scheme, model: CachedModel, bases: LayerBases | None) -> None:
        super().__init__()
        self._scheme, self._model, self._bases = scheme, model, bases
        self.packed_keys: PackedStates | None = None
        self.packed_values: PackedStates | None = None
        self.on_codes = False
        self._past: PastOfLayer | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make both stores, for the sizes that this layer really has."""
        scheme, sizes = self._scheme, (key_states.shape[-1], value_states.shape[-1])
        for size in sizes:
            scheme.check_size(size)
        pairs = self._model.pairs_of(sizes[0])
        layer = LayerModel(key_size=sizes[0], value_size=sizes[1], pairs=pairs, bases=self._bases)
        self.packed_keys, self.packed_values = (
            PackedStates(quantizer, scheme.residual) for quantizer in scheme.quantizers(layer)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, [batch, heads, tokens, size], and return all, those of before as they are decoded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.states
        is_one = key_states.shape[2] == 1
        # The model's attention may have been set to another one since.
        takes_codes = self.on_codes and self._model.config._attn_implementation == ON_CODES
        if not (takes_codes and is_one and keys.chunks and has_kernels(keys, values)):
            return keys.extended(key_states), values.extended(value_states)
        if self._past is not None and not self._past.used:
            raise OptionError("KV cache: this model's attention does not take packed keys; leave out on_codes")
        self._past = PastOfLayer(keys, values)
        keys.append(key_states)
        values.append(value_states)
        # Objects of their own, which the model's other parts do not have.
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        for states in (key_states, value_states):
            setattr(states, PAST, self._past)
        return key_states, value_states

    @property
    def took_codes(self) -> bool:
        """Whether the attention took the packed keys and values of the last token."""
        return self._past is not None and self._past.used

    @property
    def states(self) -> tuple[PackedStates, PackedStates]:
        """Keys and values, once the layer has any."""
        if self.packed_keys is None or self.packed_values is None:
            raise OptionError("KV cache: this layer has no keys and values yet")
        return self.packed_keys, self.packed_values

    @property
    def batch_size(self) -> int:
        """How many sequences the layer holds. Raises AttributeError for an empty layer, as transformers expects."""
        window = None if self.packed_keys is None else self.packed_keys.window
        if window is None:
            raise AttributeError("an empty layer has no batch size")
        return window.shape[0]

    def get_seq_length(self) -> int:
        """Return how many tokens the layer holds."""
        return self.states[0].tokens if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end; their number is negative, as everywhere in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a negative number of tokens to remove, found {tokens_to_remove}")
        if self.is_initialized:
            self._past = None  # of a call that may have been broken off
            kept = max(0, self.get_seq_length() + tokens_to_remove)
            for states in self.states:
                states.crop(kept)

    def reset(self) -> None:
        """Forget all tokens."""
        self.packed_keys = self.packed_values = self._past = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i become sequence beam_idx[i]."""
        self._replace_tensors(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of these numbers only."""
        self._replace_tensors(lambda part: part.index_select(0, indices.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._replace_tensors(lambda part: part.repeat_interleave(repeats, dim=0))

    def _replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            for states in self.states:
                states.replace_tensors(change)
