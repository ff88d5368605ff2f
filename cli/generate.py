"""The command `pqweights generate`: the text on stdout as it comes, and what it took on stderr."""

from __future__ import annotations

import contextlib
import sys

import typer

from pqweights.common.options import DEFAULT_MAX_TOKENS

from . import options, output


def command(
    ctx: typer.Context,
    model: options.Model,
    prompt: options.Prompt = None,
    no_chat: options.NoChat = False,
    max_tokens: options.MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    packed: options.Packed = None,
    kv_cache: options.KvCache = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Generate text with a model that transformers loads, as a chat answer or a continuation, and stream it.

    Without --prompt, the prompt is read from stdin. Ctrl-C ends the text.
    """
    shown = ["\n"]
    with output.errors(quiet=quiet), contextlib.ExitStack() as waiting:
        from pqweights.api import generate
        from pqweights.runtime.texts import decoded

        text = prompt
        if text is None:
            text = decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
        progress = waiting.enter_context(output.progress("fetching"))

        def show(piece: str) -> None:
            waiting.close()
            output.write_text(piece)
            shown.append(piece)

        try:
            arguments = options.given(ctx) | {"prompt": text}
            done = generate(**arguments, progress=progress, on_text=None if json else show)
        finally:
            if not shown[-1].endswith("\n"):
                output.write_text("\n")
        if json:
            output.print_json(done.to_json())
            return
        cache = "" if done.kv_cache is None else f", KV cache at {done.kv_cache.bits_per_coordinate:.2f} bits"
        output.note(
            f"{done.prompt_tokens} tokens read and {len(done.token_ids)} chosen in {done.seconds:.1f} s "
            f"({done.generated_tokens_per_second:.1f}/s); {done.dtype}, {done.runtime}{cache}"
        )
