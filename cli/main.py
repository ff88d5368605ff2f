"""The Typer app with its commands."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import interrupts, output
from .printable import printable

# The first line of the help of each command; the module of its name is imported when it is run.
COMMANDS = {
    "quantize": "Quantize a checkpoint into a master: packed codes and block norms, by default 5.125 bits per weight.",
    "plan": "Show what quantize would do with each tensor: action, codec, bits, bytes and reason.",
    "recipes": "List the built-in recipes, or print one, to use it or to begin a recipe of your own.",
    "inspect": "Show what a finished folder holds: tensors, bits, relative errors, sizes and totals.",
    "verify": "Check every stored byte of a finished folder against its manifest.",
    "rebuild": "Make a result again from its manifest, and compare every byte with what the manifest states.",
    "export": "Export a checkpoint or a master to what a runtime loads.",
    "generate": "Generate text with a model that transformers loads, as a chat answer or a continuation, and stream "
    "it.",
    "card": "Write or update the model card, DIR/README.md, from the manifest and the recorded evaluations.",
    "push": "Push a master or an export to the Hub, with a model card made from its manifest; a broken folder is "
    "refused.",
    "eval": "Evaluate models on a text: perplexity, and how far each model is from a reference.",
}


class Commands(TyperGroup):
    """The commands, whose usage errors quote what they were given with escapes: it may be the names of files."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parse the arguments of the group."""
        with _printable_usage_errors():
            return super().make_context(*args, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, whose flags messages then have."""
        name, command, rest = super().resolve_command(ctx, args)
        options = [param for param in command.params if param.param_type_name == "option"] if command else []
        output.flags = {param.name: max(param.opts, key=len) for param in options}
        if name == "export" and command:
            module = importlib.import_module(".export", __package__)
            command.help = module.with_targets(_help(module.command))
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments of a command, and run it."""
        with _printable_usage_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _printable_usage_errors() -> Iterator[None]:
    try:
        yield
    except typer.TyperException as error:
        if isinstance(error, typer.BadParameter) and error.param and error.param.name == "target" and not error.message:
            from pqweights.targets import EXPORTS

            error.message = f"Expected one of {', '.join(EXPORTS)}"
        text = "\n".join(printable(line) for line in error.format_message().expandtabs().split("\n"))
        error.format_message = lambda: text  # type: ignore[method-assign]
        raise


def _version(shown: bool) -> None:
    if shown:
        from pqweights import __version__

        output.show(f"pqweights {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


def _made(*names: str) -> typer.Typer:
    """Return the app with some of its commands; of the others, it knows only what its own help says."""
    made = typer.Typer(
        cls=Commands,
        name="pqweights",
        help="Quantize a checkpoint into what runtimes load, or into a master of 5.125 bits per weight.",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,  # they may include a token
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_root,
    )
    for name, help_line in COMMANDS.items():
        if name in names:
            module = importlib.import_module(f".{name}", __package__)
            made.command(name, help=_help(module.command))(module.command)
        else:
            made.command(name, help=help_line)(lambda: None)
    return made


def _help(command: Callable[..., None]) -> str:
    """Return the docstring of a command with each paragraph on one line, because Typer keeps the line breaks."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def __getattr__(name: str) -> typer.Typer:
    """Make `app`, with all commands, when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["app"] = _made(*COMMANDS)
    return made


def main() -> None:
    """Run the command line, as the console script does."""
    # The official client of the Hub is not to show what this package does.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # At exit Python would search all live objects for reference cycles once more. The plan of a large model is half a
    # million objects without a cycle, and searching them after every 700 new ones takes a quarter of the time.
    atexit.register(gc.freeze)
    if sys.argv[1:2] == ["plan"]:
        gc.disable()
    interrupts.answer_at_once()
    try:
        _made(*sys.argv[1:2])()
    except SystemExit as end:
        if end.code == interrupts.EXIT_CODE:
            interrupts.leave()
        output.leave(end.code)
    except OSError as error:
        output.leave(None, error)


if __name__ == "__main__":
    main()
