"""The Typer app with its commands."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import (
    calibrate,
    card,
    export,
    generate,
    inspect,
    interrupts,
    output,
    plan,
    push,
    quantize,
    recipes,
    sensitivity,
    verify,
)
from . import eval as evaluate
from .printable import printable


class Commands(TyperGroup):
    """The commands, whose usage errors quote what they were given with escapes: it may be the names of files."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """See click.Group."""
        with _printable_usage_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """See click.Group."""
        with _printable_usage_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _printable_usage_errors() -> Iterator[None]:
    try:
        yield
    except typer.TyperException as error:
        text = "\n".join(printable(line) for line in error.format_message().expandtabs().split("\n"))
        error.format_message = lambda: text  # type: ignore[method-assign]
        raise


app = typer.Typer(
    cls=Commands,
    name="pqweights",
    help="Quantize a checkpoint into a nearly lossless 5.125-bit master, and export it to what runtimes load.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # they may include a token
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(shown: bool) -> None:
    if shown:
        from pqweights import __version__

        output.show(f"pqweights {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


COMMANDS: dict[str, Callable[..., None]] = {
    "quantize": quantize.command,
    "plan": plan.command,
    "recipes": recipes.command,
    "inspect": inspect.command,
    "verify": verify.command,
    "export": export.command,
    "generate": generate.command,
    "card": card.command,
    "push": push.command,
    "sensitivity": sensitivity.command,
    "calibrate": calibrate.command,
    "eval": evaluate.command,
}


def _help(command: Callable[..., None]) -> str:
    """Return the docstring of a command with each paragraph on one line, because Typer keeps the line breaks."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for name, command in COMMANDS.items():
    app.command(name, cls=export.ExportCommand if name == "export" else None, help=_help(command))(command)


def _flag_names() -> dict[str, str]:
    """Return the flags of all commands by the name of the parameter."""
    group: Any = typer.main.get_group(app)
    params = [param for command in group.commands.values() for param in command.params]
    return {str(param.name): max(param.opts, key=len) for param in params if param.param_type_name == "option"}


output.flag_names = _flag_names


def main() -> None:
    """Run the command line, as the console script does."""
    # At exit Python would search all live objects for reference cycles once more.
    atexit.register(gc.freeze)
    interrupts.answer_at_once()
    try:
        app()
    except SystemExit as end:
        if end.code == interrupts.EXIT_CODE:
            interrupts.leave()
        output.leave(end.code)
    except OSError as error:
        output.leave(None, error)


if __name__ == "__main__":
    main()
