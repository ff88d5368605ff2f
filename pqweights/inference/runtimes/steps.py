"""Generation: a model reads a prompt and continues it, a token at a time, with the sampling of its own library.

What a model has read stays for the next call, so that a conversation is not read again.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from pqweights.errors import GenerationError
from pqweights.inference.runtimes.packages import is_out_of_memory, package, silent
from pqweights.inference.runtimes.texts import Ids

OnToken = Callable[[int], object]
NOTHING: Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class TokenChoice:
    """How a token is chosen from the logits.

    temperature: 0 for the likeliest token; otherwise logits are divided by it.
    top_p: the probability of the likeliest tokens that are chosen from; 1 for all tokens.
    top_k: how many tokens are chosen from at most; 0 for all.
    repetition_penalty: by what logits of tokens that occurred are divided, or multiplied where they are negative.
    seed: of the random choices; None if there are none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What is generated.

    most: how many tokens at most, 1 or more
    ends: tokens of which each ends the text
    choice: how each token is chosen
    """

    most: int
    ends: frozenset[int] = frozenset()
    choice: TokenChoice = TokenChoice()


class Stepper(ABC):
    """What makes a model generate.

    read_tokens: how many tokens of the prompt the last call had to read, because the one before had not left them
    """

    def __init__(self) -> None:
        self.read_tokens = 0
        self._ids = NOTHING  # the tokens that the cache holds

    def run(self, ids: Ids, wanted: Continuation, on_token: OnToken) -> None:
        """Read tokens [tokens], then choose one after another, and give each to `on_token`.

        Raises GenerationError if there is not enough memory or logits are NaN, and what `on_token` raises.
        """
        common = _common_tokens(self._ids, ids)
        surplus, self._ids = len(self._ids) - common, NOTHING
        with _memory():
            room = len(ids) + wanted.most
            if not (common and self._has_room(room) and (not surplus or self._cut(surplus))):
                common = 0
                self._begin(room)
            self.read_tokens = len(ids) - common
            self._ids = self._generate(ids, common, wanted, on_token)

    def forget(self) -> None:
        """Let the next call read all of its prompt."""
        self._ids = NOTHING

    def _has_room(self, tokens: int) -> bool:
        """Whether the cache takes so many tokens."""
        return True

    @abstractmethod
    def _begin(self, tokens: int) -> None:
        """Make an empty cache that takes so many tokens."""

    @abstractmethod
    def _cut(self, count: int) -> bool:
        """Take the last tokens off the cache, and return whether that is possible."""

    @abstractmethod
    def _generate(self, ids: Ids, kept: int, wanted: Continuation, on_token: OnToken) -> Ids:
        """Generate; return the tokens that the cache holds, none if it cannot be continued.

        kept: how many of the tokens `ids` the cache holds
        """


class TorchStepper(Stepper):
    """A model of transformers.

    model: with a head for the next token, in evaluation mode
    new_cache: makes its caches; by default they are those of transformers
    cache: the cache after the last call; None before the first, after one that was broken off, and where transformers
        makes one of its own
    """

    def __init__(self, model: Any, new_cache: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._model = model
        dynamic = package("transformers", "transformers").DynamicCache
        self._new_cache = new_cache or (lambda: dynamic(config=model.config.get_text_config(decoder=True)))
        self._keeps = _keeps_cache(model, self._new_cache)
        self._takes = self._keeps or new_cache is not None
        self.cache: Any = None

    def _begin(self, tokens: int) -> None:
        self.cache = self._new_cache() if self._takes else None

    def _cut(self, count: int) -> bool:
        caches = package("transformers.cache_utils", "transformers")
        sliding = caches.DynamicSlidingWindowLayer  # has dropped the tokens before
        can_be_cut = all(layer.is_croppable and not isinstance(layer, sliding) for layer in self.cache.layers)
        if can_be_cut:
            self.cache.crop(-count)
        return can_be_cut

    def _generate(self, ids: Ids, kept: int, wanted: Continuation, on_token: OnToken) -> Ids:
        torch, transformers = package("torch", "transformers"), package("transformers", "transformers")
        given = torch.tensor([ids.tolist()], device=self._model.device)
        cache, self.cache = self.cache, None
        with torch.inference_mode(), silent(), contextlib.ExitStack() as stack:
            if wanted.choice.seed is not None:
                stack.enter_context(torch.random.fork_rng([given.device] if given.is_cuda else []))
                torch.manual_seed(wanted.choice.seed)
            tokens = self._model.generate(
                given,
                past_key_values=cache,
                attention_mask=torch.ones_like(given),
                generation_config=_generation_config(wanted),
                logits_processor=transformers.LogitsProcessorList([_numbers]),
                custom_generate=partial(_decode, on_token) if self._keeps else None,
                # Gets the prompt first, [1, tokens], and then tokens, [1].
                streamer=SimpleNamespace(put=lambda new: new.dim() > 1 or on_token(int(new)), end=lambda: None),
            )
        self.cache = cache
        return tokens[0, :-1].cpu().numpy() if self._keeps else NOTHING  # the last token is not read


def _decode(
    on_token: OnToken, model: Any, ids: Any, *, logits_processor: Any, stopping_criteria: Any, **inputs: Any
) -> Any:
    """Continue tokens, [1, tokens], with what `generate` has prepared; return all.

    Its own loop takes 0.2 ms more per token, for batches and for models whose inputs are not just tokens and a cache.
    """
    torch, new = package("torch", "transformers"), ids[:, inputs["past_key_values"].get_seq_length() :]
    samples = inputs.pop("generation_config").do_sample
    inputs.pop("position_ids", None)  # which the cache tells
    while True:
        scores = model(input_ids=new, return_dict=True, **inputs).logits[:, -1].float()
        for process in logits_processor:
            scores = process(ids, scores)
        # Two draws, because torch makes a single one with a random number for each token of the vocabulary.
        new = scores.softmax(-1).multinomial(2, replacement=True)[:, :1] if samples else scores.argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], dim=-1)
        on_token(new.item())
        if any(stops(ids, None) for stops in stopping_criteria):
            return ids


def _numbers(_: Any, scores: Any) -> Any:
    """Return logits, as a processor of `generate`. Raises GenerationError if they are NaN."""
    if math.isnan(scores.max()):
        raise nan_error()
    return scores


def nan_error() -> GenerationError:
    """Return the error for logits that are NaN."""
    return GenerationError("the logits are NaN: the model is damaged, or overflows in this dtype (`dtype`)")


def _keeps_cache(model: Any, new_cache: Callable[[], Any]) -> bool:
    """Whether a model prepares inputs in the usual way, and has a cache of nothing but keys and values."""
    transformers = package("transformers", "transformers")
    caches = package("transformers.cache_utils", "transformers")
    usual = type(model).prepare_inputs_for_generation is transformers.GenerationMixin.prepare_inputs_for_generation
    takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
    if not usual or not takes_cache or not model._supports_default_dynamic_cache():
        return False
    recurrent, layers = caches.LinearAttentionCacheLayerMixin, new_cache().layers
    return bool(layers) and all(
        isinstance(layer, caches.DynamicLayer) and not isinstance(layer, recurrent) for layer in layers
    )


def last_logits_only(model: Any) -> dict[str, int]:
    """Return the argument by which a model of transformers computes the logits of the last token only; if it can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _generation_config(wanted: Continuation) -> Any:
    """Return the settings of `generate`; it takes those that are not named here from generation_config.json."""
    choice = wanted.choice
    sampling = {"temperature": choice.temperature, "top_p": choice.top_p, "top_k": choice.top_k}
    return package("transformers", "transformers").GenerationConfig(
        max_new_tokens=wanted.most,
        do_sample=choice.temperature > 0,
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=choice.repetition_penalty,
        use_cache=True,
        eos_token_id=sorted(wanted.ends) or -1,
        pad_token_id=0,
        **(sampling if choice.temperature > 0 else {}),
    )


class MlxStepper(Stepper):
    """A model of mlx-lm."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._cache: Any = None

    def _begin(self, tokens: int) -> None:
        self._cache = package("mlx_lm.models.cache", "mlx").make_prompt_cache(self._model)

    def _cut(self, count: int) -> bool:
        caches = package("mlx_lm.models.cache", "mlx")
        can_be_cut = bool(caches.can_trim_prompt_cache(self._cache))
        if can_be_cut:
            caches.trim_prompt_cache(self._cache, count)
        return can_be_cut

    def _generate(self, ids: Ids, kept: int, wanted: Continuation, on_token: OnToken) -> Ids:
        mx, steps = package("mlx.core", "mlx"), package("mlx_lm.generate", "mlx")
        samples, choice, held = package("mlx_lm.sample_utils", "mlx"), wanted.choice, ids.tolist()
        if choice.seed is not None:
            mx.random.seed(choice.seed)
        # Of all tokens that are read or chosen now; mlx-lm does not know those before.
        processors = samples.make_logits_processors(
            repetition_penalty=None if choice.repetition_penalty == 1 else choice.repetition_penalty,
            repetition_context_size=len(ids) + wanted.most,
        )
        for token, likelihoods in steps.generate_step(
            mx.array(ids[kept:]),
            self._model,
            max_tokens=wanted.most,
            sampler=samples.make_sampler(choice.temperature, choice.top_p, top_k=choice.top_k),
            logits_processors=processors,
            prompt_cache=self._cache,
        ):
            if mx.isnan(likelihoods).any().item():
                raise nan_error()
            held.append(token)  # mlx-lm reads a token while the caller takes it
            on_token(token)
            if token in wanted.ends:
                break
        return np.array(held, dtype=np.int64)


def _common_tokens(known: Ids, ids: Ids) -> int:
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
        if not is_out_of_memory(error):
            raise
        said = " ".join(str(error).split())
        raise GenerationError(
            f"not enough memory to generate ({said[:200] or 'MemoryError'}); give a shorter prompt, or run a master "
            "with `packed`"
        ) from None
