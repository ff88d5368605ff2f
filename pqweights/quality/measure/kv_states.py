"""The keys and values that a model computes for a text, as its cache gets them: keys after RoPE."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.common.notices import slow_step
from pqweights.errors import EvaluationError
from pqweights.exports.target import MLX
from pqweights.inference.runtimes.folders import Folder, read_folder, transformers_config
from pqweights.inference.runtimes.models import Model, choose_device, open_model
from pqweights.inference.runtimes.packages import Refused, package, quiet
from pqweights.inference.runtimes.steps import last_logits_only
from pqweights.inference.runtimes.texts import EncodedText, Ids, check_vocabulary, encode, with_bos
from pqweights.options import path_of
from pqweights.quality.options import StatesOptions

if TYPE_CHECKING:
    from torch import Tensor

    from pqweights.inference.kv.polar_rope import RopePairs

WHY = "inspect --kv"
DEFAULT_TOKENS = 2048
# With fewer tokens, the figures of a channel say nothing.
FEWEST_TOKENS = 16
# Keys and values of a layer, by its number.
Recorded = dict[int, "tuple[Tensor, Tensor]"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerStates:
    """The keys and values of one layer.

    layer: its number
    keys, values: [heads, tokens, size] f32
    pairs: the coordinates of keys that RoPE rotates together; None without RoPE
    """

    layer: int
    keys: Tensor
    values: Tensor
    pairs: RopePairs | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelStates:
    """The keys and values of all layers that have some.

    tokens: how many tokens of the text the model read
    bos: whether the first of them was BOS
    runtime: which library computed, in words
    """

    tokens: int
    bos: bool
    runtime: str
    layers: tuple[LayerStates, ...]


def read_states(path: Path, text: str, options: StatesOptions) -> ModelStates:
    """Run a model in float32 over the first tokens of a text, in one pass, and return its keys and values.

    path: a checkpoint, a master or an export that torch can run

    Raises EvaluationError if the model has no keys and values of heads, or if the text does not fit it, and what
    open_model raises.
    """
    package("torch", "transformers", WHY)
    folder = read_folder(path)
    if folder.runtime == MLX:
        raise EvaluationError(f"{path}: `kv`: expected a model that transformers computes, found an export for mlx-lm; "
                              "give the checkpoint or the master")  # fmt: skip
    device = choose_device(options.device, [folder])
    config = transformers_config(path)
    _check_attention(folder, config)
    ids, bos = _encoded(folder, text, options)
    with slow_step(f"loading {path}"):
        model = open_model(path, device=device)
    if "past_key_values" not in inspect.signature(model.net.forward).parameters:
        raise EvaluationError(_without_states(folder, config))
    with slow_step(f"running {path}"):
        recorded = _recorded(folder, model, ids)
    return ModelStates(
        tokens=len(ids), bos=bos is not None, runtime=model.runtime, layers=_layers(folder, config, recorded)
    )


def _check_attention(folder: Folder, config: Any) -> None:
    """Raise EvaluationError for a model that keeps no keys and values of heads."""
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "kv_lora_rank", None) is not None:
        raise EvaluationError(
            f"{folder.path}: `kv`: {decoder.model_type} has multi-head latent attention, which keeps one compressed "
            "vector for each token; expected a model that keeps keys and values of heads"
        )
    if not getattr(decoder, "num_attention_heads", None):
        raise EvaluationError(_without_states(folder, config))


def _without_states(folder: Folder, config: Any) -> str:
    return (
        f"{folder.path}: `kv`: expected a model with attention, found {config.model_type}, which has no keys and values"
    )


def _encoded(folder: Folder, text: str, options: StatesOptions) -> EncodedText:
    """Return the tokens that the model reads, [tokens], and the one that they begin with."""
    limit = folder.context
    asked = options.max_tokens or min(DEFAULT_TOKENS, limit or DEFAULT_TOKENS)
    if limit is not None and asked > limit:
        raise EvaluationError(f"`max_tokens` {asked}: {folder.path} takes at most {limit} tokens (by its config.json)")
    encoded = encode(path_of(options.tokenizer) or folder.path, text, asked, bos=not options.no_bos)
    ids = encoded.ids
    if len(ids) < FEWEST_TOKENS:
        remedy = "raise `max_tokens`" if len(ids) == asked else "give a longer text"
        raise EvaluationError(f"the text: expected at least {FEWEST_TOKENS} tokens, found {len(ids)}; {remedy}")
    check_vocabulary(folder, *encoded)
    return EncodedText(with_bos(ids, encoded.bos), encoded.bos)


def _recorded(folder: Folder, model: Model, ids: Ids) -> Recorded:
    """Run the model, and return what it gave its cache: all tokens, even where a layer soon forgets them."""
    torch = package("torch", "transformers", WHY)
    transformers = package("transformers", "transformers", WHY)
    recorded: Recorded = {}
    cache = transformers.DynamicCache(config=model.net.config)
    update: Callable[..., Any] = cache.update

    def recording(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        recorded[layer] = keys, values
        return update(keys, values, layer, *args, **kwargs)

    cache.update = recording
    given = torch.from_numpy(ids)[None].to(model.net.device)
    with Refused(f"{folder.path}: transformers cannot run this model"), torch.inference_mode(), quiet():
        model.net(given, past_key_values=cache, use_cache=True, **last_logits_only(model.net))
    return recorded


def _layers(folder: Folder, config: Any, recorded: Recorded) -> tuple[LayerStates, ...]:
    from pqweights.inference.kv.polar_rope import rope_pairs

    decoder = config.get_text_config(decoder=True)
    layers = []
    for layer, states in sorted(recorded.items()):
        for name, tensor in zip(("keys", "values"), states, strict=True):
            if not tensor.isfinite().all():
                raise EvaluationError(f"{folder.path}: `kv`: expected finite {name}, found a NaN or an infinity in "
                                      f"layer {layer}; check the weights")  # fmt: skip
        keys, values = (tensor[0].float().cpu() for tensor in states)
        layers.append(LayerStates(layer=layer, keys=keys, values=values, pairs=rope_pairs(decoder, keys.shape[-1])))
    if not layers:
        raise EvaluationError(_without_states(folder, config))
    return tuple(layers)
