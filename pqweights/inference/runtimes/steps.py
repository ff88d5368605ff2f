"""Generation one token at a time: a model reads a prompt, and the caller chooses each next token from its logits.

The loop over a model of transformers is ours where the model prepares its inputs in no way of its own. Beside
`generate` it takes about 0.2 ms less per token on a CPU, and the cache of keys and values stays for the next call, so
that a conversation is not read again. All other models (recurrent ones, mixtures of attention and recurrence, those
with positions of images) go through `generate`, which then takes the tokens that the caller chooses.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.errors import GenerationError
from pqweights.inference.runtimes.packages import package, silent
from pqweights.inference.runtimes.texts import Ids

# Takes the logits after the last token, [vocabulary] f32, and returns the next token, or None to end.
Step = Callable[[npt.NDArray[np.float32]], int | None]

NOTHING: Ids = np.empty(0, dtype=np.int64)
# How messages of torch and MLX say that there is no memory.
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
# Tokens of a prompt that MLX reads at a time, as mlx-lm does.
MLX_PREFILL_TOKENS = 2048


class Stepper(Protocol):
    """What makes a model generate."""

    def kept(self, ids: Ids) -> int:
        """Return how many tokens, from the first on, need not be read again because the last call left them."""
        ...

    def run(self, ids: Ids, step: Step) -> None:
        """Read tokens [tokens], then let `step` choose one after another until it returns None.

        Raises GenerationError if there is not enough memory, and what `step` raises.
        """
        ...


class TorchStepper:
    """A model of transformers.

    model: with a head for the next token, in evaluation mode
    new_cache: makes its caches; by default they are those of transformers
    """

    def __init__(self, model: Any, new_cache: Callable[[], Any] | None = None) -> None:
        self._model = model
        self._new_cache = new_cache or partial(_new_cache, model)
        self._is_quantized = new_cache is not None
        self._keep = last_logits_only(model)
        self._takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
        self._ids = NOTHING
        self._cache: Any = None

    @property
    def cache(self) -> Any:
        """The cache after the last call; None before the first, and where `generate` makes one of transformers."""
        return self._cache

    def kept(self, ids: Ids) -> int:
        """See Stepper."""
        common = common_tokens(self._ids, ids)
        return common if common == len(self._ids) or self._can_be_cut() else 0

    def _can_be_cut(self) -> bool:
        """Whether tokens can be taken off the end of the cache: a sliding window has dropped those before."""
        caches = package("transformers.cache_utils", "transformers")
        fixed = (caches.DynamicSlidingWindowLayer, caches.LinearAttentionCacheLayerMixin)
        return all(layer.is_croppable and not isinstance(layer, fixed) for layer in self._cache.layers)

    def run(self, ids: Ids, step: Step) -> None:
        """See Stepper."""
        torch = package("torch", "transformers")
        with torch.inference_mode(), silent(), _memory():
            if self._takes_cache and _is_plain(self._model, self._new_cache()):
                self._loop(torch, ids, step)
            else:
                self._generate(torch, ids, step)

    def _loop(self, torch: Any, ids: Ids, step: Step) -> None:
        """Generate with a cache that stays for the next call, unless this one is broken off."""
        kept, cache, fed = self.kept(ids), self._cache, ids.tolist()
        if not kept:
            cache = self._new_cache()
        elif kept < len(self._ids):
            cache.crop(kept - len(self._ids))
        self._ids, self._cache = NOTHING, None
        model, device = self._model, self._model.device
        tokens = torch.tensor([fed[kept:]], device=device)
        while True:
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True, **self._keep)
            token = step(output.logits[0, -1].float().cpu().numpy())
            if token is None:
                break
            fed.append(token)
            tokens = torch.tensor([[token]], device=device)
        self._ids, self._cache = np.array(fed, dtype=np.int64), cache

    def _generate(self, torch: Any, ids: Ids, step: Step) -> None:
        """Generate with transformers' generate, whose processor of logits leaves the chosen token alone."""
        transformers = package("transformers", "transformers")
        ended = False

        def choose(_: Any, scores: Any) -> Any:
            nonlocal ended
            token = step(scores[0].float().cpu().numpy())
            ended = token is None
            chosen = torch.full_like(scores, -torch.inf)
            chosen[0, 0 if token is None else token] = 0
            return chosen

        def has_ended(ids_so_far: Any, _: Any) -> Any:
            return torch.full((len(ids_so_far),), ended, device=ids_so_far.device)

        given = torch.tensor([ids.tolist()], device=self._model.device)
        self._cache = self._new_cache() if self._is_quantized else None
        self._model.generate(
            given,
            past_key_values=self._cache,
            attention_mask=torch.ones_like(given),
            generation_config=greedy_config(1 << 30),
            logits_processor=transformers.LogitsProcessorList([_called(transformers.LogitsProcessor, choose)]),
            stopping_criteria=transformers.StoppingCriteriaList([_called(transformers.StoppingCriteria, has_ended)]),
        )


def last_logits_only(model: Any) -> dict[str, int]:
    """Return the argument by which a model of transformers computes the logits of the last token only; if it can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _is_plain(model: Any, cache: Any) -> bool:
    """Whether a model has the usual preparation of inputs, and a cache of nothing but keys and values."""
    transformers = package("transformers", "transformers")
    caches = package("transformers.cache_utils", "transformers")
    usual = type(model).prepare_inputs_for_generation is transformers.GenerationMixin.prepare_inputs_for_generation
    if not usual or not model._supports_default_dynamic_cache():
        return False
    recurrent = caches.LinearAttentionCacheLayerMixin
    layers = cache.layers
    return bool(layers) and all(
        isinstance(layer, caches.DynamicLayer) and not isinstance(layer, recurrent) for layer in layers
    )


def _new_cache(model: Any) -> Any:
    """Return an empty cache, as generate of transformers makes it."""
    cache = package("transformers", "transformers").DynamicCache
    return cache(config=model.config.get_text_config(decoder=True))


def greedy_config(most: int) -> Any:
    """Return settings of generate that never end a text; all that generation_config.json could change are named.

    most: how many tokens are generated
    """
    return package("transformers", "transformers").GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        use_cache=True,
        eos_token_id=-1,
        pad_token_id=0,
    )


def _called(base: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return an object of a class of transformers that calls a function; `generate` takes nothing else."""
    return type("Called", (base,), {"__call__": lambda self, ids, scores: function(ids, scores)})()


class MlxStepper:
    """A model of mlx-lm."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ids = NOTHING
        self._cache: Any = None

    def kept(self, ids: Ids) -> int:
        """See Stepper."""
        common = common_tokens(self._ids, ids)
        caches = package("mlx_lm.models.cache", "mlx")
        return common if common == len(self._ids) or caches.can_trim_prompt_cache(self._cache) else 0

    def run(self, ids: Ids, step: Step) -> None:
        """See Stepper."""
        mx = package("mlx.core", "mlx")
        caches = package("mlx_lm.models.cache", "mlx")
        kept, cache, fed = self.kept(ids), self._cache, ids.tolist()
        if not kept:
            cache = caches.make_prompt_cache(self._model)
        elif kept < len(self._ids):
            caches.trim_prompt_cache(cache, len(self._ids) - kept)
        self._ids, self._cache = NOTHING, None
        with _memory():
            for start in range(kept, len(ids) - MLX_PREFILL_TOKENS, MLX_PREFILL_TOKENS):
                kept = start + MLX_PREFILL_TOKENS
                self._model(mx.array(fed[start:kept])[None], cache=cache)
                mx.eval([layer.state for layer in cache])
            tokens = fed[kept:]
            while True:
                logits = self._model(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)
                token = step(np.array(logits))
                if token is None:
                    break
                fed.append(token)
                tokens = [token]
        self._ids, self._cache = np.array(fed, dtype=np.int64), cache


def common_tokens(known: Ids, ids: Ids) -> int:
    """Return with how many known tokens `ids` begin; at least the last one of `ids` must be read."""
    count = min(len(known), len(ids) - 1)
    differ = np.flatnonzero(known[:count] != ids[:count])
    return int(differ[0]) if len(differ) else count


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Turn what torch and MLX raise without memory into GenerationError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and not any(words in said.lower() for words in OUT_OF_MEMORY):
            raise
        raise GenerationError(
            f"not enough memory to generate ({said[:200] or 'MemoryError'}); give a shorter prompt, or run a master "
            "with `packed`"
        ) from None
