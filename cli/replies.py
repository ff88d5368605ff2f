"""Replies of a model on the screen: the text as it comes, and afterwards what it took; and one prompt after another."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from pqweights.common.units import counted, size_text

from . import interrupts, output

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


def reply_once(generator: Generator, prompt: str, *, json: bool) -> None:
    """Answer a prompt on stdout, as text or as a JSON document; an interrupt then counts as that of the command."""
    from pqweights.inference.report import INTERRUPTED

    done = replied(generator, prompt, quietly=json)
    if json:
        output.print_json(done.to_json())
    else:
        output.note(speed_line(done), setting_line(done))
    if done.stop == INTERRUPTED:
        raise KeyboardInterrupt


def replied(generator: Generator, prompt: str, *, quietly: bool = False) -> Generation:
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


def speed_line(done: Generation) -> str:
    """Return the tokens of a prompt and a reply, how fast they were, and how the reply ended."""
    read = counted(done.prompt_tokens, "token")
    if done.read_tokens < done.prompt_tokens:
        read += f" ({done.read_tokens} new)"
    first = "" if done.first_token_seconds is None else f", first token after {done.first_token_seconds:.2g} s"
    said = counted(len(done.token_ids), "token")
    return f"prompt: {read}{_rate(done.prompt_rate)}; reply: {said}{_rate(done.rate)}{first}; {STOPS[done.stop]}"


def setting_line(done: Generation) -> str:
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


def converse(generator: Generator) -> None:
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
        output.note(setting_line(last))


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
            done = replied(generator, prompt)
    except GenerationError as error:
        output.complain(str(error))
    except KeyboardInterrupt:
        output.note("interrupted")
    interrupts.answered()
    if done is not None:
        output.note(speed_line(done))
    return done
