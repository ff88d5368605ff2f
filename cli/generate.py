"""The command `pqweights generate`: replies on the screen as they come, what they took, one prompt after another."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pqweights.common.units import counted, size_text
from pqweights.inference.options import DEFAULT_MAX_TOKENS, GenerationOptions

from . import interrupts, options, output

if TYPE_CHECKING:
    from pqweights.inference.generator import Generator
    from pqweights.inference.report import Generation

PROMPT = "> "
HINT = "Ctrl-C ends a reply; Ctrl-D, or Ctrl-C at the prompt, leaves"
STOPS = {
    "end": "ended by the model",
    "length": "ended at --max-tokens",
    "context": "ended at the model's limit",
    "interrupted": "interrupted",
}


def command(
    model: options.Model,
    prompt: options.Prompt = None,
    system: options.System = None,
    no_chat: options.NoChat = False,
    max_tokens: options.MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    packed: options.Packed = None,
    kv_cache: options.KvCache = None,
    tokenizer: options.Tokenizer = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Generate text with a model, as an answer in a chat or as a continuation, and show it as it comes.

    Without --prompt, the prompt is read from stdin; on a terminal, the command asks for one after another and keeps the
    conversation. Ctrl-C ends a reply. The speed and the memory are printed at the end.
    """
    with output.errors(quiet=quiet):
        from pqweights.inference.generator import Generator
        from pqweights.inference.runtimes.cached import check_spec

        asked = GenerationOptions(
            system=system,
            no_chat=no_chat,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            packed=packed,
            kv_cache=kv_cache,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            threads=threads,
        )
        if kv_cache is not None:
            check_spec(kv_cache)
        interactive = prompt is None and sys.stdin.isatty()
        text = "" if interactive else _checked(prompt)
        if interactive and json:
            raise typer.BadParameter("--json: expected --prompt TEXT, or a text on stdin")
        folder = _fetched(model, revision, token)
        with output.status(f"loading {model}"):
            generator = Generator(folder, asked, name=model, tell=output.note)
            if not interactive:
                generator.check(text, _name(prompt))
            generator.load()
        if interactive:
            _converse(generator)
        else:
            _reply_once(generator, text, json=json)


def _fetched(model: str, revision: str | None, token: str | None) -> Path:
    """Return the local folder of a model."""
    from pqweights.storage.addresses import repository_id

    if revision is not None and repository_id(model) is None:
        raise typer.BadParameter("--revision: expected a repository on the Hub as MODEL")
    return options.fetched(model, options.access(revision, token)).path


def _checked(prompt: str | None) -> str:
    """Return the prompt, or what is on stdin.

    Raises GenerationError if it is empty, EvaluationError if it is not UTF-8.
    """
    from pqweights.inference.prompts import check_prompt
    from pqweights.inference.runtimes.texts import decoded

    text = prompt
    if text is None:
        text = decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
    check_prompt(text, _name(prompt))
    return text


def _name(prompt: str | None) -> str:
    return "stdin" if prompt is None else "--prompt"


def _reply_once(generator: Generator, prompt: str, *, json: bool) -> None:
    """Answer a prompt on stdout, as text or as a JSON document; an interrupt then counts as that of the command."""
    from pqweights.inference.report import INTERRUPTED

    done = _replied(generator, prompt, quietly=json)
    if json:
        output.print_json(done.to_json())
    else:
        output.note(_speed_line(done), _setting_line(done))
    if done.stop == INTERRUPTED:
        raise KeyboardInterrupt


def _replied(generator: Generator, prompt: str, *, quietly: bool = False) -> Generation:
    """Generate a reply. quietly: whether to write no text on stdout"""
    last = "\n"
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(output.status("reading the prompt"))

        def show(piece: str) -> None:
            nonlocal last
            waiting.close()
            if not quietly:
                output.write_text(piece)
                last = piece

        try:
            return generator.reply(prompt, show)
        finally:
            if not last.endswith("\n"):
                output.write_text("\n")


def _speed_line(done: Generation) -> str:
    """Return the tokens of a prompt and a reply, how fast they were, and how the reply ended."""
    read = counted(done.prompt_tokens, "token")
    if done.read_tokens < done.prompt_tokens:
        read += f" ({done.read_tokens} new)"
    first = "" if done.first_token_seconds is None else f", first token after {done.first_token_seconds:.2g} s"
    said = counted(len(done.token_ids), "token")
    return f"prompt: {read}{_rate(done.prompt_rate)}; reply: {said}{_rate(done.rate)}{first}; {STOPS[done.stop]}"


def _setting_line(done: Generation) -> str:
    """Return how long loading took, the peak memory, and what the model computed in."""
    settings, choice = done.settings, done.settings.choice
    weights = ", weights packed" if settings.packed else ""
    cache = ""
    if done.kv_cache is not None:
        taken = f"{done.kv_cache.bits_per_coordinate:.2f} bits per coordinate"
        cache = f", KV cache {done.kv_cache.spec} at {taken}"
    chosen = "greedy" if choice.seed is None else f"temperature {choice.temperature:g}, seed {choice.seed}"
    return (
        f"loaded in {done.load_seconds:.1f} s, peak memory {size_text(done.peak_bytes)}; {settings.dtype} on "
        f"{settings.device}{weights}{cache}; {chosen}"
    )


def _rate(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f" at {tokens_per_second:.1f}/s"


def _converse(generator: Generator) -> None:
    """Answer prompts from the terminal; the model's memory of the conversation is the generator's."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # the prompt is checked, and refused with a line
    output.note(HINT)
    last: Generation | None = None
    while True:
        try:
            prompt = _ask()
        except EOFError:
            output.ask("\n")
            break
        if prompt.strip():
            last = _answer(generator, prompt) or last
    if last is not None:
        output.note(_setting_line(last))


def _ask() -> str:
    """Ask for a line, which can be edited; what is asked does not go into a file that stdout is."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input edits lines with it
        return input(PROMPT)
    output.ask(PROMPT)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _answer(generator: Generator, prompt: str) -> Generation | None:
    """Answer one prompt; errors that concern only it, and an interrupt, lead back to the next one."""
    from pqweights.errors import GenerationError

    done = None
    try:
        with interrupts.Raised():
            done = _replied(generator, prompt)
    except GenerationError as error:
        output.complain(str(error))
    except KeyboardInterrupt:
        output.note("interrupted")
    interrupts.answered()
    if done is not None:
        output.note(_speed_line(done))
    return done
