"""The command `pqweights sensitivity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.planning.options import DEFAULT_SAMPLE_TOKENS, SELF

from . import options, output

if TYPE_CHECKING:
    from pqweights.planning.sensitivity_file import Sensitivity


def command(
    source: options.Source,
    out: options.OutFile,
    recipe: options.Recipe = "q5",
    keep: options.Keep = None,
    set_bits: options.SetBits = None,
    text: options.SampleText = SELF,
    tokens: options.CalibrationTokens = DEFAULT_SAMPLE_TOKENS,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how much the loss rises with the error of each group of weights, for --sensitivity of quantize.

    The model reads a text layer by layer, and gradients come back the same way, with one layer in memory. The same
    file serves every target.
    """
    with output.errors(quiet=quiet, kept=lambda: options.work_beside(out)):
        from pqweights.checkpoint.writer import check_free
        from pqweights.planning.choice import choose_recipe
        from pqweights.planning.options import RecipeOptions
        from pqweights.planning.sensitivity_file import read_sensitivity
        from pqweights.quality.options import SamplingOptions
        from pqweights.quality.sensitivity import measure_sensitivity

        chosen = choose_recipe(recipe, RecipeOptions(keep=keep or (), set_bits=set_bits))
        asked = SamplingOptions(text=text, tokens=tokens, threads=threads, overwrite=overwrite)
        check_free(out, overwrite, kind="sensitivities", read=read_sensitivity)
        model = options.fetched(source, options.access(revision, token)).path
        with output.progress("measuring", unit="steps") as progress:
            done = measure_sensitivity(model, chosen, asked, out=out, progress=progress)
        if json:
            output.print_json({"output": str(out)} | done.to_json())
        else:
            output.summary(*_lines(done, source, out))


def _lines(done: Sensitivity, source: str, out: Path) -> list[str]:
    return [
        *output.table(["weight", "#alpha"], [[group.name, f"{group.alpha:.4f}"] for group in done.groups]),
        "",
        f"alpha: KL divergence in nats per token for a relative squared error of 1, on {done.method['tokens']} tokens",
        f"{source} -> {out}. Next: pqweights quantize {source} OUT --target-size SIZE --sensitivity {out}",
    ]
