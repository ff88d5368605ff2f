"""What a model's configuration says of its cache: which layers hold keys and values, and of which size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from pqweights.errors import OptionError
from pqweights.inference.kv.polar_rope import RopePairs, rope_pairs
from pqweights.inference.kv.schemes import Scheme

FULL = "full_attention"  # layers with keys and values of all tokens


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A model, as its cache sees it.

    config: of the decoder, a PreTrainedConfig
    layers: the type of each layer, in the words of transformers
    options: what the cache of each layer is made with
    size: the coordinates of a key
    """

    config: Any
    layers: tuple[str, ...]
    options: tuple[dict[str, Any], ...]
    size: int

    @property
    def pairs(self) -> RopePairs | None:
        """The pairs of coordinates that RoPE rotates; None without RoPE."""
        return self.pairs_of(self.size)

    def pairs_of(self, size: int) -> RopePairs | None:
        """Return the pairs of keys of another size, which single layers may have."""
        return rope_pairs(self.config, size)


def cached_model(config: Any, scheme: Scheme) -> CachedModel:
    """Return what a cache has to know of a model.

    config: the configuration of the model, a PreTrainedConfig

    Raises OptionError for a model whose cache the method cannot quantize.
    """
    decoder = config.get_text_config(decoder=True)
    subject = f"KV cache {scheme.name}: {decoder.model_type}"
    if getattr(decoder, "kv_lora_rank", None) is not None:
        raise OptionError(f"{subject} has multi-head latent attention, whose cache is compressed already; leave the KV "
                          "cache as it is")  # fmt: skip
    if getattr(config, "is_encoder_decoder", False) or not getattr(decoder, "num_attention_heads", None):
        raise OptionError(
            f"{subject}: expected a decoder with attention, found a model without keys and values to keep"
        )
    layers, options = get_layer_types_and_kwargs(decoder)
    if FULL not in layers:
        raise OptionError(f"{subject}: expected layers with full attention, found {', '.join(sorted(set(layers)))}")
    size = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    scheme.check_size(size)
    model = CachedModel(config=decoder, layers=tuple(layers), options=tuple(options), size=size)
    if scheme.needs_rope and model.pairs is None:
        raise OptionError(f"{subject} has no rotary position embedding, on which the method rests; take hadamard")
    return model
