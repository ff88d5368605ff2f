"""A model of transformers that computes with a quantized cache of keys and values, and what that cache takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.runtime.packages import package, quiet
from pqweights.runtime.texts import Ids

Floats = npt.NDArray[np.float32]

# Windows that are read together take at most about this much memory, beside the model; one is always read.
BATCH_BYTES = 512_000_000


@dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """What a quantized cache is and takes.

    spec: the method and its options, in the shortest form
    tokens: how many tokens it held
    bits_per_coordinate: see KVCache.bits_per_coordinate
    bytes_per_token: of all packed layers together, for one sequence
    """

    spec: str
    tokens: int
    bits_per_coordinate: float
    bytes_per_token: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures as eval --json and generate --json print them."""
        return dict(vars(self))


def check_spec(spec: str) -> None:
    """Raise OptionError for a spec of a quantized cache that names no method, or an option that it does not have.

    Raises MissingDependencyError without torch and transformers.
    """
    for name in ("torch", "transformers"):
        package(name, "transformers", "`kv_cache`")
    from pqweights.runtime.kv.schemes import parse_spec

    parse_spec(spec)


class CachedRun:
    """A model with a quantized cache.

    net: a PreTrainedModel with a head for the next token, in evaluation mode
    spec: the method and its options

    Raises OptionError for a spec that names no method, and for a model whose cache the method cannot quantize.
    """

    def __init__(self, net: Any, spec: str) -> None:
        self._net, self._spec = net, spec
        takes_count = "logits_to_keep" in inspect.signature(net.forward).parameters
        self._keep = {"logits_to_keep": 1} if takes_count else {}
        self._last = self.new_cache()

    def new_cache(self, *, on_codes: bool = False) -> Any:
        """Return an empty cache. on_codes: see kv_cache"""
        from pqweights.runtime.kv.cache import kv_cache

        return kv_cache(self._net, self._spec, on_codes=on_codes)

    def logits(self, ids: Ids, last: int) -> Floats:
        """Return the predictions after each of the last tokens of one window, see logits_of."""
        (logits,) = self.logits_of([ids], last)
        return logits

    def logits_of(self, windows: Sequence[Ids], last: int) -> Iterator[Floats]:
        """Yield the predictions after each of the last tokens of each window, as they come when a text is generated.

        The model reads what is before them at once, and then one token after another, of as many windows as fit into
        BATCH_BYTES together; of one alone, if the method would fit to all of them what it fits to each.

        windows: of one size, [tokens]; last: how many. Yields f32 [last, vocabulary].
        """
        fitting = BATCH_BYTES // self._window_bytes(len(windows[0]), last)
        together = 1 if self._last.scheme.mixes_sequences else max(1, fitting)
        for first in range(0, len(windows), together):
            yield from self._batch(np.stack(windows[first : first + together]), last)

    def _window_bytes(self, tokens: int, last: int) -> int:
        """Return about how much memory a window takes: logits, keys and values twice, and one layer's activations."""
        config = self._net.config.get_text_config(decoder=True)
        hidden, layers = (int(getattr(config, name, 0) or 1) for name in ("hidden_size", "num_hidden_layers"))
        return 4 * (last * int(config.vocab_size) + tokens * hidden * (4 * layers + 16))

    def _batch(self, ids: Ids, last: int) -> Iterator[Floats]:
        """Yield the predictions of windows that are read together, [windows, tokens]."""
        torch = package("torch", "transformers")
        cache, logits = self.new_cache(), []
        given = torch.from_numpy(ids).to(self._net.device)
        start = max(1, ids.shape[1] - last + 1)
        with torch.inference_mode(), quiet():
            for piece in (given[:, :start], *(given[:, at : at + 1] for at in range(start, ids.shape[1]))):
                result = self._net(piece, past_key_values=cache, use_cache=True, **self._keep)
                logits.append(result.logits[:, -1].clone())
            for layer in cache.packed_layers:
                layer.batch_select_indices(torch.tensor([len(ids) - 1]))  # figures are of one window
        self._last = cache
        for number in range(len(ids)):
            yield torch.stack([of_token[number] for of_token in logits]).float().cpu().numpy()

    def figures(self, cache: Any = None) -> CacheFigures:
        """Return what a cache takes. cache: by default that of the last call of `logits`."""
        cache = self._last if cache is None else cache
        return CacheFigures(
            spec=cache.spec,
            tokens=cache.get_seq_length(),
            bits_per_coordinate=cache.bits_per_coordinate(),
            bytes_per_token=cache.bits_per_coordinate() / 8 * cache.coordinates_per_token(),
        )
