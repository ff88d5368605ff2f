"""The command `pqweights sensitivity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.quality.options import SensitivityArguments

from . import options, output

if TYPE_CHECKING:
    from pqweights.planning.sensitivity_file import Sensitivity


@options.taking(SensitivityArguments)
def command(asked: SensitivityArguments, *, json: options.JsonOption = False) -> None:
    """Measure how much the loss rises with the error of each group of weights, for --sensitivity of quantize.

    The model runs with noise in one group at a time (HIGGS, arXiv:2411.17525, algorithm 3): four runs over the tokens
    for each group, and about four groups for each layer. The same file serves every target.
    """
    from pqweights.checkpoint.writer import check_free
    from pqweights.inference.runtimes.texts import read_text
    from pqweights.planning.choice import choose_recipe
    from pqweights.planning.options import RecipeOptions
    from pqweights.planning.sensitivity_file import read_sensitivity
    from pqweights.quality.sensitivity import measure_sensitivity

    recipe = choose_recipe(asked.recipe, asked.part(RecipeOptions))
    check_free(asked.out, asked.overwrite, kind="sensitivities", read=read_sensitivity)
    model = options.fetched(str(asked.source), asked.access).path
    text = None if asked.text is None else read_text(asked.text)
    with output.progress("measuring", unit="groups") as progress:
        done = measure_sensitivity(model, recipe, asked, text=text, out=asked.out, progress=progress)
    if json:
        output.print_json({"output": str(asked.out)} | done.to_json())
    else:
        output.summary(*_lines(done, str(asked.source), asked.out))


def _lines(done: Sensitivity, source: str, out: Path) -> list[str]:
    levels = [f"KL at {t2:g}" for t2, _ in done.groups[0].points]
    columns = ["group", "#tensors", "#alpha", *(f"#{level}" for level in levels)]
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
