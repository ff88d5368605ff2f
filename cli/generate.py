"""The command `pqweights generate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import chat, options, output, replies, text_options

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Master, export or any checkpoint of a language model: a folder, or ORG/NAME on the Hub; or a GGUF file.",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="Text to answer or continue.",
        show_default="what comes on stdin; on a terminal, ask for one prompt after another",
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message, for models with a chat template that takes one."),
]
NoChatOption = Annotated[
    bool, typer.Option("--no-chat", help="Continue the prompt as it is, even if the model has a chat template.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Maximum number of tokens of a reply.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="T",
        help="Choose tokens at random, with logits divided by T; 0 always takes the likeliest.",
        show_default="the model's generation_config.json, else 0",
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Choose from the likeliest tokens that together have probability P.",
        show_default="the model's generation_config.json, else 1",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Seed of the random choices.", show_default="a random one, printed"),
]
PackedOption = Annotated[
    bool | None,
    typer.Option(
        "--packed/--no-packed",
        help="Keep the weights of a master packed in memory.",
        show_default="packed for scalar codecs; for others only if the decoded model does not fit into memory",
    ),
]
KvCacheOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        metavar="SPEC",
        help="Quantize keys and values: klt, hadamard, polar or polar-rope, with options as in klt:3.",
        show_default="as the model computes them",
    ),
]
DeviceOption = Annotated[
    options.Device, typer.Option("--device", help="Device to compute on; auto uses a GPU if there is one.")
]


def command(
    model: ModelArgument,
    prompt: PromptOption = None,
    system: SystemOption = None,
    no_chat: NoChatOption = False,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    packed: PackedOption = None,
    kv_cache: KvCacheOption = None,
    tokenizer: text_options.TokenizerOption = None,
    dtype: text_options.ModelDtypeOption = text_options.ModelDtype.AUTO,
    device: DeviceOption = options.Device.CPU,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Generate text with a model, as an answer in a chat or as a continuation, and show it as it comes.

    Without --prompt, the prompt is read from stdin; on a terminal, the command asks for one after another and keeps the
    conversation. Ctrl-C ends a reply. The speed and the memory are printed at the end.
    """
    with output.errors(quiet=quiet):
        from pqweights.generation.generator import Generator
        from pqweights.generation.options import GenerationOptions
        from pqweights.hub.sources import repository_id

        asked = GenerationOptions(
            system=system,
            chat=not no_chat,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            packed=packed,
            kv_cache=kv_cache,
            tokenizer=tokenizer,
            dtype=dtype.value,
            device=device.value,
        )
        asked.check()
        interactive = prompt is None and sys.stdin.isatty()
        text = "" if interactive else _checked(prompt)
        if interactive and json:
            raise typer.BadParameter("--json: expected --prompt TEXT, or a text on stdin")
        if revision is not None and repository_id(model) is None:
            raise typer.BadParameter("--revision: expected a repository on the Hub as MODEL")
        found = options.fetched(model, options.access(revision, token))
        with output.status(f"loading {model}"):
            generator = Generator(found.path, asked, name=model, tell=output.note)
            if not interactive:
                generator.check(text, _name(prompt))
            generator.load()
        if interactive:
            chat.converse(generator)
        else:
            replies.reply_once(generator, text, json=json)


def _checked(prompt: str | None) -> str:
    """Return the prompt, or what is on stdin.

    Raises GenerationError if it is empty, EvaluationError if it is not UTF-8.
    """
    from pqweights.generation.prompts import check_prompt
    from pqweights.runtimes.texts import decoded

    text = prompt
    if text is None:
        text = decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
    check_prompt(text, _name(prompt))
    return text


def _name(prompt: str | None) -> str:
    return "stdin" if prompt is None else "--prompt"
