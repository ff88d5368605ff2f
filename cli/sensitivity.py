"""The command `pqweights sensitivity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.quality.options import SensitivityArguments

from . import options, output

if TYPE_CHECKING:
    from pqweights.planning.sensitivity_file import Sensitivity


@options.taking(SensitivityArguments, continues=lambda asked: options.work_beside(asked.out))
def command(asked: SensitivityArguments, *, json: options.JsonOption = False) -> None:
    """Measure how much the loss rises with the error of each group of weights, for --sensitivity of quantize.

    The model reads a text layer by layer, and gradients come back the same way, with one layer in memory. The same
    file serves every target.
    """
    from pqweights.checkpoint.writer import check_free
    from pqweights.planning.choice import choose_recipe
    from pqweights.planning.options import RecipeOptions
    from pqweights.planning.sensitivity_file import read_sensitivity
    from pqweights.quality.sensitivity import measure_sensitivity

    recipe = choose_recipe(asked.recipe, asked.part(RecipeOptions))
    check_free(asked.out, asked.overwrite, kind="sensitivities", read=read_sensitivity)
    model = options.fetched(str(asked.source), asked.access).path
    with output.progress("measuring", unit="steps") as progress:
        done = measure_sensitivity(model, recipe, asked, out=asked.out, progress=progress)
    if json:
        output.print_json({"output": str(asked.out)} | done.to_json())
    else:
        output.summary(*_lines(done, str(asked.source), asked.out))


def _lines(done: Sensitivity, source: str, out: Path) -> list[str]:
    return [
        *output.table(["weight", "#alpha"], [[group.name, f"{group.alpha:.4f}"] for group in done.groups]),
        "",
        f"alpha: KL divergence in nats per token for a relative squared error of 1, on {done.method['tokens']} tokens",
        f"{source} -> {out}. Next: pqweights quantize {source} OUT --target-size SIZE --sensitivity {out}",
    ]
