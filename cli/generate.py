"""The command `pqweights generate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pqweights.options import GenerateArguments, ModelArguments

from . import options, output, replies
from .flags import option, taking

PromptOption = Annotated[str | None, option(GenerateArguments, "prompt")]


@taking(ModelArguments)
def command(asked: ModelArguments, *, prompt: PromptOption = None, json: options.JsonOption = False) -> None:
    """Generate text with a model, as an answer in a chat or as a continuation, and show it as it comes.

    Without --prompt, the prompt is read from stdin; on a terminal, the command asks for one after another and keeps the
    conversation. Ctrl-C ends a reply. The speed and the memory are printed at the end.
    """
    from pqweights.inference.generator import Generator
    from pqweights.inference.runtimes.cached import check_spec
    from pqweights.storage.hub.sources import repository_id

    if asked.kv_cache is not None:
        check_spec(asked.kv_cache)
    interactive = prompt is None and sys.stdin.isatty()
    text = "" if interactive else _checked(prompt)
    if interactive and json:
        raise typer.BadParameter("--json: expected --prompt TEXT, or a text on stdin")
    if asked.revision is not None and repository_id(str(asked.model)) is None:
        raise typer.BadParameter("--revision: expected a repository on the Hub as MODEL")
    model = options.fetched(str(asked.model), asked.access)
    with output.status(f"loading {asked.model}"):
        generator = Generator(model.path, asked, name=str(asked.model), tell=output.note)
        if not interactive:
            generator.check(text, _name(prompt))
        generator.load()
    if interactive:
        replies.converse(generator)
    else:
        replies.reply_once(generator, text, json=json)


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
