"""pqweights sensitivity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options, output


def command(
    source: options.SourceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.json", help="New file for the sensitivities.")],
    tokens: Annotated[
        int, typer.Option("--tokens", min=2, help="How many tokens are read for each measurement.")
    ] = 2048,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Read this text.", show_default="tokens drawn at random: no data"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", min=2, help="Tokens that are read together.", show_default="256, or the model's limit"
        ),
    ] = None,
    recipe: options.RecipeOption = "q5",
    tokenizer: options.TokenizerOption = None,
    dtype: Annotated[
        options.ModelDtype, typer.Option("--dtype", help="Run the model in this dtype; auto: its own.")
    ] = options.ModelDtype.FLOAT32,
    device_map: Annotated[
        str | None,
        typer.Option("--device-map", help="As in transformers: auto spreads a large model (needs accelerate)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file of sensitivities.")] = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Measure how much the loss rises with the error of each group of weights, for quantize --target-size.

    The model is run with noise in one group after the other (HIGGS, arXiv:2411.17525, algorithm 3): four runs over the
    tokens for each group, some four groups a layer. The file serves every target.
    """
    with output.errors():
        from pqweights.measure.sensitivity import measure_sensitivity
        from pqweights.planning.recipe import load_recipe
        from pqweights.planning.sensitivity_file import check_free, write_sensitivity
        from pqweights.runtimes.texts import read_text

        chosen = load_recipe(recipe)
        check_free(out, overwrite)
        found = options.fetched(source, options.access(revision, token))
        with output.progress("measuring", unit="groups") as progress:
            done = measure_sensitivity(
                found.path, chosen, text=None if text is None else read_text(text), tokens=tokens, window=window,
                tokenizer=tokenizer, dtype=dtype.value, device_map=device_map, progress=progress,
            )  # fmt: skip
        write_sensitivity(out, done)
        if json:
            output.print_json({"output": str(out)} | done.to_json())
            return
        levels = [f"KL at {t2:g}" for t2, _ in done.groups[0].points]
        columns = [("group", False), ("weights", True), ("alpha", True), *((level, True) for level in levels)]
        rows = [
            [g.name, str(len(g.weights)), f"{g.alpha:.4f}", *(f"{kl:.6f}" for _, kl in g.points)] for g in done.groups
        ]
        method = done.method
        typer.echo(output.table(columns, rows))
        typer.echo(
            f"\nKL divergence in nats per token on {method['tokens']} tokens ({method['kind']}), by the relative squared error of the "
            f"group's weights; alpha: the slope\n{source} -> {out}; now: pqweights quantize {source} OUT --target-size SIZE "
            f"--sensitivity {out}"
        )
