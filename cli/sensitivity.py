"""The command `pqweights sensitivity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import flags, options, output, text_options

if TYPE_CHECKING:
    from pqweights.planning.sensitivity_file import Sensitivity


FileArgument = Annotated[Path, typer.Argument(metavar="OUT.json", help="File for the sensitivities.")]
TokensOption = Annotated[
    int, typer.Option("--tokens", min=2, help="Number of tokens that the model reads for each measurement.")
]
TextOption = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="UTF-8 text for the model to read.", show_default="random tokens"),
]
WindowOption = Annotated[
    int | None,
    typer.Option("--window", min=2, help="Tokens per window.", show_default="256, or the model's limit if smaller"),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file of sensitivities.")]


def command(
    source: options.FetchedSourceArgument,
    out: FileArgument,
    tokens: TokensOption = 2048,
    text: TextOption = None,
    window: WindowOption = None,
    recipe: options.RecipeOption = "q5",
    keep: options.KeepOption = None,
    set_bits: options.SetOption = None,
    tokenizer: text_options.TokenizerOption = None,
    no_bos: text_options.NoBosOption = False,
    dtype: text_options.ModelDtypeOption = text_options.ModelDtype.FLOAT32,
    device_map: text_options.DeviceMapOption = None,
    overwrite: OverwriteOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure how much the loss rises with the error of each group of weights, for --sensitivity of quantize.

    The model runs with noise in one group at a time (HIGGS, arXiv:2411.17525, algorithm 3): four runs over the tokens
    for each group, and about four groups for each layer. The same file serves every target. The same command continues
    an interrupted run.
    """
    with output.errors(kept=lambda: options.measurement_continues(source, out), quiet=quiet):
        from pqweights.inference.runtimes.texts import read_text
        from pqweights.options import RecipeOptions
        from pqweights.planning.choice import choose_recipe
        from pqweights.quality.measure.sensitivity import SensitivityOptions, measure_sensitivity

        chosen = choose_recipe(recipe, RecipeOptions(keep=tuple(keep or ()), set_bits=flags.bits_by_pattern(set_bits)))
        _check_free(out, overwrite)
        found = options.fetched(source, options.access(revision, token))
        asked = SensitivityOptions(
            text=None if text is None else read_text(text),
            tokens=tokens,
            window=window,
            tokenizer=tokenizer,
            bos=not no_bos,
            dtype=dtype.value,
            device_map=device_map,
            overwrite=overwrite,
        )
        with output.progress("measuring", unit="groups") as progress:
            done = measure_sensitivity(found.path, chosen, asked, out=out, progress=progress)
        if json:
            output.print_json({"output": str(out)} | done.to_json())
        else:
            output.summary(*_lines(done, source, out))


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuse to replace a file that holds no sensitivities, or any file without --overwrite."""
    from pqweights.checkpoint.writer import check_free
    from pqweights.planning.sensitivity_file import read_sensitivity

    check_free(out, overwrite, kind="sensitivities", read=read_sensitivity)


def _lines(done: Sensitivity, source: str, out: Path) -> list[str]:
    levels = [f"KL at {t2:g}" for t2, _ in done.groups[0].points]
    columns = [("group", False), ("tensors", True), ("alpha", True), *((level, True) for level in levels)]
    rows = [
        [group.name, str(len(group.weights)), f"{group.alpha:.4f}", *(f"{kl:.6f}" for _, kl in group.points)]
        for group in done.groups
    ]
    return [
        *output.table(columns, rows),
        "",
        f"KL at x: KL divergence in nats per token on {done.method['tokens']} tokens ({done.method['kind']}), "
        "with a relative squared error of x in the weights of the group; alpha: the slope",
        f"{source} -> {out}. Next: pqweights quantize {source} OUT --target-size SIZE --sensitivity {out}",
    ]
