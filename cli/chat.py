"""`pqweights generate` on a terminal: one prompt after another, until the end of the input."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from . import interrupts, output, replies

if TYPE_CHECKING:
    from pqweights.inference.generation.generator import Generator
    from pqweights.inference.generation.report import Generation

PROMPT = "> "
HINT = "Ctrl-C ends a reply; Ctrl-D, or Ctrl-C at the prompt, leaves"


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
        output.note(replies.setting_line(last))


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
            done = replies.replied(generator, prompt)
    except GenerationError as error:
        output.complain(str(error))
    except KeyboardInterrupt:
        output.note("interrupted")
    interrupts.answered()
    if done is not None:
        output.note(replies.speed_line(done))
    return done
