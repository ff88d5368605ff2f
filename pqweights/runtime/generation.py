"""Text from a model of transformers: a prompt, in the chat template if there is one, and the stream of `generate`."""

from __future__ import annotations

import math
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.checkpoint.gguf.file import gguf_models
from pqweights.checkpoint.names import GENERATION_CONFIG
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import Storage, read_json_object
from pqweights.common.options import GenerationOptions
from pqweights.common.strict_json import is_utf8
from pqweights.errors import GenerationError
from pqweights.formats.lloyd_max import LloydMax
from pqweights.runtime.cached import CachedRun, CacheFigures
from pqweights.runtime.folders import LLAMA_CPP, MASTER, Folder, read_model
from pqweights.runtime.models import check_options, check_packed, choose_device, open_model
from pqweights.runtime.packages import Refused, package, silent
from pqweights.runtime.texts import Ids, check_vocabulary, load_tokenizer
from pqweights.targets.target import MLX

Show = Callable[[str, bool], None]
# What generates with the formats that transformers does not load.
COMMANDS = {MLX: "mlx_lm.generate --model", LLAMA_CPP: "llama-cli -m"}


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A text that a model generated.

    model: its folder, or its name on the Hub
    text: what was generated, without special tokens
    token_ids: all tokens that were chosen
    prompt_tokens: how many tokens came before them
    seconds: how long it took to read the prompt and to choose them
    runtime, dtype: what computed
    packed: whether the weights stayed packed
    kv_cache: what the quantized cache of keys and values took; None without one
    """

    model: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    seconds: float
    runtime: str
    dtype: str
    packed: bool
    kv_cache: CacheFigures | None

    @property
    def generated_tokens_per_second(self) -> float:
        """How many tokens were chosen in a second, with the time that the prompt took."""
        return len(self.token_ids) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return what `generate --json` prints."""
        cache = None if self.kv_cache is None else self.kv_cache.to_json()
        rate = self.generated_tokens_per_second
        return vars(self) | {
            "token_ids": list(self.token_ids),
            "generated_tokens_per_second": rate,
            "kv_cache": cache,
        }


def continued(
    path: Path, prompt: str, options: GenerationOptions, *, name: str, on_text: Callable[[str], None]
) -> Generation:
    """Load a model, and let it answer or continue a prompt.

    name: what the result calls the model
    on_text: called with each piece of the text as it comes

    Raises GenerationError for a prompt that the model cannot take, OptionError, SourceError, MasterError,
    EvaluationError, DeviceError or MissingDependencyError.
    """
    folder = read_model(path)
    if folder.runtime in COMMANDS:
        is_folder_of_gguf = folder.runtime == LLAMA_CPP and path.is_dir()
        given = shlex.quote(str(path / gguf_models(Storage(path))[0] if is_folder_of_gguf else path))
        raise GenerationError(f"{path}: transformers does not load it; run `{COMMANDS[folder.runtime]} {given}`")
    check_options([folder], device=options.device)
    if options.packed:
        check_packed(folder)
    if GENERATION_CONFIG in (storage := Storage(path)).files():
        read_json_object(storage, GENERATION_CONFIG)  # transformers ignores one that it cannot read
    device, tokenizer = choose_device(options.device, [folder]), load_tokenizer(path)
    ids = _prompt_ids(folder, tokenizer, prompt, chat=not options.no_chat)
    packed = device == "cpu" and _is_scalar(folder) if options.packed is None else options.packed
    model = open_model(path, device=device, dtype=options.dtype, packed=packed, threads=options.threads)
    run = None if options.kv_cache is None else CachedRun(model.net, options.kv_cache)
    cache = None if run is None else run.new_cache(on_codes=True)
    pieces: list[str] = []

    def show(piece: str, stream_end: bool = False) -> None:
        if piece:
            pieces.append(piece)
            on_text(piece)

    settings = {
        "past_key_values": cache,
        "max_new_tokens": min(options.max_tokens, (folder.context or math.inf) - len(ids)),
    }
    if options.temperature is not None:
        settings |= {"do_sample": options.temperature > 0, "temperature": options.temperature or None}
    start = time.perf_counter()
    with Refused(f"{path}: transformers cannot generate as {GENERATION_CONFIG} says", own=show):
        tokens = _continue(model.net, tokenizer, ids, options.seed, show, **settings)
    return Generation(
        model=name,
        text="".join(pieces),
        token_ids=tokens,
        prompt_tokens=len(ids),
        seconds=time.perf_counter() - start,
        runtime=model.runtime,
        dtype=model.dtype,
        packed=packed,
        kv_cache=None if run is None else run.figures(cache),
    )


def check_prompt(prompt: str | None) -> None:
    """Raise GenerationError if a prompt is empty or cannot be written as UTF-8."""
    if not prompt or not prompt.strip() or not is_utf8(prompt):
        raise GenerationError(f"`prompt`: expected a text in UTF-8, found {prompt!r}")


def _prompt_ids(folder: Folder, tokenizer: Any, prompt: str, *, chat: bool) -> Ids:
    """Return the tokens of a prompt. chat: as the user's turn, if the tokenizer has a chat template"""
    if not (chat and tokenizer.chat_template):
        with silent():
            given = tokenizer(prompt)
    else:
        refusal = package("jinja2", "transformers", "a chat template").TemplateError
        turns = [{"role": "user", "content": prompt}]
        try:
            with Refused(f"{folder.path}: transformers cannot apply the chat template"), silent():
                given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        except refusal as error:
            said = " ".join(str(error).split())[:200]
            raise GenerationError(
                f"{folder.path}: its chat template refuses the prompt: {said}; continue the text without it: `no_chat`"
            ) from None
    ids: Ids = np.array(given["input_ids"], dtype=np.int64)
    if not 0 < len(ids) < (folder.context or math.inf):
        room = "" if folder.context is None else f" and fewer than the {folder.context} that the model takes"
        raise GenerationError(f"{folder.path}: the prompt has {len(ids)} tokens; expected at least 1{room}")
    check_vocabulary(folder, ids)
    return ids


def _is_scalar(folder: Folder) -> bool:
    """Whether a master has scalar codes alone, which are multiplied without being decoded: packed is then faster."""
    tensors = open_local(folder.path).tensors if folder.runtime == MASTER else []
    codecs = {type(tensor.format) for tensor in tensors if isinstance(tensor, EncodedTensor)}
    return bool(codecs) and all(issubclass(codec, LloydMax) for codec in codecs)


def _continue(model: Any, tokenizer: Any, ids: Ids, seed: int | None, show: Show, **settings: Any) -> tuple[int, ...]:
    """Return the tokens that the `generate` of transformers chooses. settings: go before generation_config.json"""
    torch, transformers = package("torch", "transformers"), package("transformers", "transformers")
    own = model.generation_config.eos_token_id
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
    streamer = transformers.TextStreamer(
        tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    streamer.on_finalized_text = show
    prompt = torch.tensor(ids[None], device=model.device)
    with silent(), torch.inference_mode(), torch.random.fork_rng([prompt.device] if prompt.is_cuda else []):
        torch.manual_seed(secrets.randbits(32) if seed is None else seed)
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            logits_processor=transformers.LogitsProcessorList([_numbers]),
            eos_token_id=sorted(ends) or None,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            streamer=streamer,
            **settings,
        )
    return tuple(whole[0, len(ids) :].tolist())


def _numbers(_: Any, scores: Any) -> Any:
    """Return logits, as a processor of `generate`. Raises GenerationError if they are NaN."""
    if math.isnan(scores.max()):
        raise GenerationError("the logits are NaN: the model is damaged, or overflows in this dtype (`dtype`)")
    return scores
