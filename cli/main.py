"""The app: its name, its commands, and what holds for all of them."""

from __future__ import annotations

import atexit
import gc
import os
from typing import Annotated

import typer

from . import ablate, calibrate, card, export, inspect, plan, push, quantize, sensitivity, verify
from . import eval as evaluate

app = typer.Typer(
    name="pqweights",
    help="Quantize a checkpoint into a nearly lossless 5.125-bit master, and turn the master into what runtimes load.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a token may be among them
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(shown: bool) -> None:
    if shown:
        from pqweights import __version__

        typer.echo(f"pqweights {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""


app.command("quantize")(quantize.command)
app.command("plan")(plan.command)
app.command("inspect")(inspect.command)
app.command("verify")(verify.command)
app.command("export", cls=export.ExportCommand)(export.command)
app.command("card")(card.command)
app.command("push")(push.command)
app.command("sensitivity")(sensitivity.command)
app.command("calibrate")(calibrate.command)
app.command("ablate")(ablate.command)
app.command("eval")(evaluate.command)


def main() -> None:
    """The console script."""
    # A third of the start-up otherwise: numpy's BLAS would start a thread for every core, and none of our work needs it;
    # at the end, Python would search all that is alive once more for cycles.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    atexit.register(gc.freeze)
    app()


if __name__ == "__main__":
    main()
