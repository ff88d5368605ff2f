"""A model that generates: opened once, asked once or in a conversation."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.checkpoint.models import text_config
from pqweights.checkpoint.storage import Storage, read_file
from pqweights.common.strict_json import is_number, parse_json
from pqweights.errors import GenerationError, SourceError
from pqweights.inference.options import GenerationOptions
from pqweights.inference.packing import check_fits, choose_packed, peak_bytes, read_needs
from pqweights.inference.prompts import (
    ASSISTANT,
    CONTEXT_TOKENS,
    SYSTEM,
    USER,
    Message,
    TextStream,
    chat_ids,
    check_ids,
    check_prompt,
    has_chat_template,
    text_ids,
)
from pqweights.inference.report import CONTEXT, END, INTERRUPTED, LENGTH, Generation, GenerationSettings
from pqweights.inference.runtimes.cached import CachedRun, CacheFigures, check_spec
from pqweights.inference.runtimes.folders import LLAMA_CPP, Folder, read_model
from pqweights.inference.runtimes.llama_library import GgufTokenizer
from pqweights.inference.runtimes.models import Model, check_options, check_packed, choose_device, open_model
from pqweights.inference.runtimes.steps import Continuation, TokenChoice, TorchStepper
from pqweights.inference.runtimes.texts import Ids, load_tokenizer

# Called with each piece of the text as it comes.
OnText = Callable[[str], None]
# Called with a line about what is done in another way than the caller may expect.
Tell = Callable[[str], None]


# What part of the tokens that a model takes a conversation leaves for the reply.
PART_FOR_REPLY = 4


class Generator:
    """A model with its tokenizer, and the conversation so far.

    The model itself is loaded by `load`, or by the first reply, after the prompt was checked.

    chats: whether prompts are turns of a conversation
    """

    def __init__(self, path: Path, options: GenerationOptions, *, name: str | None = None, tell: Tell) -> None:
        """Open the folder of a model and its tokenizer.

        name: what the report calls the model; by default its folder

        Raises OptionError, SourceError, MasterError, EvaluationError, DeviceError or MissingDependencyError.
        """
        start = time.perf_counter()
        if options.kv_cache is not None:
            check_spec(options.kv_cache)
        self._folder, self._options, self._tell = read_model(path), options, tell
        self._name = name or str(path)
        if options.packed:
            check_packed(self._folder)
        has_kv_cache = options.kv_cache is not None
        check_options([self._folder], device=options.device, dtype=options.dtype, has_kv_cache=has_kv_cache)
        self._device = choose_device(options.device, [self._folder])
        ends, own = read_settings(self._folder)
        self._choice = choose_tokens(options, own)
        self._replies = 0
        self._tokenizer_place = Path(options.tokenizer or path)
        self._tokenizer = load_tokenizer(self._tokenizer_place)
        self._ends = ends | ({self._tokenizer.eos_token_id} - {None})
        if isinstance(self._tokenizer, GgufTokenizer):
            self._ends |= self._tokenizer.ends
        self.chats = not options.no_chat and has_chat_template(self._tokenizer)
        if options.system is not None and not self.chats:
            raise GenerationError(f"{path}: `system`: the model has no chat template; put the text into the prompt")
        if options.system is not None:
            check_prompt(options.system, "`system`")
        self._turns = [] if options.system is None else [Message(SYSTEM, options.system)]
        self._reserved = min(options.max_tokens, (self._folder.context or 0) // PART_FOR_REPLY)
        self._packed = False
        self._model: Model | None = None
        self._run: CachedRun | None = None
        self._load_seconds = time.perf_counter() - start

    def load(self) -> None:
        """Load the model, unless it is loaded.

        Raises GenerationError if it does not fit into memory, and what open_model raises.
        """
        if self._model is not None:
            return
        start = time.perf_counter()
        needs = read_needs(self._folder, self._options.dtype)
        self._packed, why = choose_packed(self._options.packed, needs)
        check_fits(self._folder, needs, packed=self._packed)
        if why is not None:
            self._tell(why)
        self._model = open_model(
            self._folder.path,
            device=self._device,
            dtype=self._options.dtype,
            packed=self._packed,
            threads=self._options.threads,
        )
        if self._options.kv_cache is not None:
            self._run = CachedRun(self._model.net, self._options.kv_cache)
            self._model = replace(self._model, stepper=self._run.stepper())
        self._load_seconds += time.perf_counter() - start
        if not self._options.no_chat and not self.chats:
            self._tell("the model has no chat template: it continues the text as it is")

    def check(self, prompt: str, name: str = "`prompt`") -> Ids:
        """Return the tokens of a prompt, or of the conversation with it as the last turn.

        The oldest turns of a conversation are left out if they leave too little room for a reply.

        Raises GenerationError if the model cannot take it.
        """
        check_prompt(prompt, name)
        if not self.chats:
            ids = text_ids(self._tokenizer, prompt)
            check_ids(self._folder, ids)
            return ids
        kept, turns = [turn for turn in self._turns if turn.role == SYSTEM], self._turns
        dialogue, left_out = [turn for turn in turns if turn.role != SYSTEM], 0
        while True:
            asked = [*kept, *dialogue[left_out:], Message(USER, prompt)]
            ids = chat_ids(self._tokenizer, asked, self._tokenizer_place)
            if len(ids) + self._reserved <= (self._folder.context or math.inf) or left_out == len(dialogue):
                break
            left_out += 2  # a question and its answer
        check_ids(self._folder, ids)
        if left_out:
            self._tell(f"the conversation is too long for the model: its first {left_out} turns are left out")
            self._turns = [*kept, *dialogue[left_out:]]
        return ids

    def reply(self, prompt: str, on_text: OnText) -> Generation:
        """Generate a text, and add it to the conversation if there is one.

        KeyboardInterrupt ends the text, and is not raised again: stop is then INTERRUPTED.

        on_text: called with each piece of the text as it comes

        Raises GenerationError if the model cannot take the prompt, MasterError for a weight that cannot be decoded, and
        what `load` raises.
        """
        ids = self.check(prompt)
        self.load()
        assert self._model is not None
        room = self._options.max_tokens
        if self._folder.context is not None:
            room = min(room, self._folder.context - len(ids))
        before = () if self.chats else ids[-CONTEXT_TOKENS:].tolist()
        reply = _Reply(TextStream(self._tokenizer, before), on_text)
        wanted = Continuation(most=room, ends=self._ends, choice=self._choice_of_reply())
        reply.follow(self._model, ids, wanted)
        if self.chats and reply.text:
            self._turns = [*self._turns, Message(USER, prompt), Message(ASSISTANT, reply.text)]
        return self._report(reply, ids)

    def _choice_of_reply(self) -> TokenChoice:
        """Return how the tokens of a reply are chosen: each has a seed of its own."""
        self._replies += 1
        if self._choice.seed is None:
            return self._choice
        seeds = np.random.SeedSequence([self._choice.seed, self._replies])
        return replace(self._choice, seed=int(seeds.generate_state(1)[0]))

    def _report(self, reply: _Reply, ids: Ids) -> Generation:
        assert self._model is not None
        is_full = reply.stop == LENGTH and len(reply.tokens) < self._options.max_tokens
        settings = GenerationSettings(
            runtime=self._model.runtime,
            device=self._device,
            dtype=self._model.dtype,
            packed=self._packed,
            chat=self.chats,
            max_tokens=self._options.max_tokens,
            choice=self._choice,
        )
        return Generation(
            model=self._name,
            text=reply.text,
            token_ids=tuple(reply.tokens),
            prompt_tokens=len(ids),
            read_tokens=self._model.stepper.read_tokens,
            stop=CONTEXT if is_full else reply.stop,
            load_seconds=self._load_seconds,
            first_token_seconds=reply.first_token_seconds,
            generation_seconds=reply.generation_seconds,
            peak_bytes=peak_bytes(self._device),
            kv_cache=self._cache_figures(),
            settings=settings,
        )

    def _cache_figures(self) -> CacheFigures | None:
        """Return what the quantized cache takes; None without one, and after a reply that was broken off."""
        if self._run is None or self._model is None:
            return None
        assert isinstance(self._model.stepper, TorchStepper)
        cache = self._model.stepper.cache
        return None if cache is None else self._run.figures(cache)


class _Reply:
    """A text while it is generated.

    stream: turns tokens into text
    on_text: called with each piece of the text
    """

    def __init__(self, stream: TextStream, on_text: OnText) -> None:
        self._stream, self._on_text = stream, on_text
        self.tokens: list[int] = []
        self.text, self.stop = "", LENGTH
        self._start = self._first = self._last = 0.0

    def follow(self, model: Model, ids: Ids, wanted: Continuation) -> None:
        """Let a model read the prompt and continue it, until the text ends or the user breaks it off."""

        def take(token: int) -> None:
            self._last = time.perf_counter()
            if not self.tokens:
                self._first = self._last
            self.tokens.append(token)
            if token in wanted.ends:
                self.stop = END
            else:
                self._give(self._stream.add(token))

        self._start = time.perf_counter()
        try:
            model.stepper.run(ids, wanted, take)
        except KeyboardInterrupt:
            self.stop = INTERRUPTED
        self._give(self._stream.end())

    @property
    def first_token_seconds(self) -> float | None:
        """How long the first token took; None if there was none."""
        return self._first - self._start if self.tokens else None

    @property
    def generation_seconds(self) -> float:
        """How long the tokens after the first took."""
        return self._last - self._first

    def _give(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._on_text(piece)


# --- settings ---

GENERATION_CONFIG = "generation_config.json"
# The numbers that are read of it, and which of them transformers takes.
NUMBERS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0 and value == int(value),
    "repetition_penalty": lambda value: 1e-6 <= value <= 1e6,
}


def choose_tokens(options: GenerationOptions, own: TokenChoice) -> TokenChoice:
    """Return how tokens are chosen: as asked, else as the model's files say. own: what they say"""
    temperature = own.temperature if options.temperature is None else options.temperature
    if not temperature:
        return TokenChoice(repetition_penalty=own.repetition_penalty)
    return TokenChoice(
        temperature=temperature,
        top_p=own.top_p if options.top_p is None else options.top_p,
        top_k=own.top_k,
        repetition_penalty=own.repetition_penalty,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
    )


def read_settings(folder: Folder) -> tuple[frozenset[int], TokenChoice]:
    """Read which tokens end a text by the files of a model, and how tokens are chosen, greedily if they do not say.

    Raises SourceError for a file that cannot be read, or for a value that means nothing.
    """
    stated = {} if folder.runtime == LLAMA_CPP else _read(folder)
    places = (stated, text_config(folder.config), folder.config)
    ends = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
    ids = ends if isinstance(ends, list) else [ends]
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    if stated.get("do_sample") is not True:
        stated, sampling = {"repetition_penalty": stated.get("repetition_penalty")}, {}
    for name, holds in NUMBERS.items():
        value = stated.get(name)
        if value is None:
            continue
        if not is_number(value) or not holds(value):
            raise SourceError(
                f"{folder.path / GENERATION_CONFIG}: {name}: expected a number that transformers takes, found {value!r}"
            )
        sampling[name] = int(value) if name == "top_k" else float(value)
    return frozenset(token for token in ids if isinstance(token, int)), TokenChoice(**sampling)


def _read(folder: Folder) -> dict[str, Any]:
    """Return the content of generation_config.json; an empty one if there is none."""
    storage = Storage(folder.path)
    if GENERATION_CONFIG not in storage.files():
        return {}
    try:
        value = parse_json(read_file(storage, GENERATION_CONFIG))
    except ValueError as error:
        raise SourceError(f"{folder.path / GENERATION_CONFIG}: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{folder.path / GENERATION_CONFIG}: expected a JSON object, found {type(value).__name__}")
    return value
