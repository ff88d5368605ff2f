"""The cache of one layer in transformers, with packed keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from pqweights.errors import OptionError
from pqweights.inference.kv.klt import LayerBases
from pqweights.inference.kv.model import CachedModel
from pqweights.inference.kv.on_codes import PAST, PastOfLayer, attends_on_codes, has_kernels
from pqweights.inference.kv.schemes import LayerModel, Scheme
from pqweights.inference.kv.states import PackedStates


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
        if not (self._takes_codes() and is_one and keys.chunks and has_kernels(keys, values)):
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

    def _takes_codes(self) -> bool:
        return self.on_codes and attends_on_codes(self._model.config)

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
