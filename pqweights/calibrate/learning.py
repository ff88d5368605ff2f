"""What is learned of a source before it is quantized: codes, scales of channels, or sensitivities, as options ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pqweights.calibrate.calibrated_master import calibrated_codes
from pqweights.calibrate.scale_finding import found_scales
from pqweights.calibrate.sensitivity import measured, sensitivity_for
from pqweights.checkpoint.gguf.file import is_gguf
from pqweights.common.options import Options
from pqweights.common.threads import Progress
from pqweights.errors import OptionError, SourceError
from pqweights.planning.calibration import measures
from pqweights.planning.recipe import Recipe
from pqweights.storage import Store
from pqweights.storage.sources import local_folder
from pqweights.targets.master import Learned


@contextlib.contextmanager
def learned(
    source: Path, out: Store, recipe: Recipe, options: Options, *, progress: Progress
) -> Iterator[tuple[Learned, Options]]:
    """Yield what is learned of a checkpoint, continuing what was interrupted.

    With it come the options with which it is used: the source must then be as it was.

    source: the local folder of the original checkpoint
    out: where the result is made; what a finished result says of itself is not learned again
    options: `calibrate`, `awq` and the options beside them
    progress: called with the steps that are done, those in all, and the next one

    What it worked on goes when the context is left without an error. Raises SourceError, RecipeError, OptionError,
    EvaluationError, OutputError or MissingDependencyError.
    """
    name = "calibrate" if options.awq is None else "awq"
    if source.is_file() and not is_gguf(source):
        raise SourceError(f"{source}: expected the folder of a model for `{name}`, found a file")
    if options.engine is not None and out.is_elsewhere:
        raise OptionError(f"`ray`: expected a folder that all nodes share for a calibrated master, found {out}")
    out.check_apart(source)
    if options.awq is not None:
        with found_scales(source, out, recipe, options, progress=progress) as (scales, checked):
            yield Learned(awq=scales), checked
    elif measures(recipe, options):
        with sensitivity_for(source, out, recipe, options, progress=progress) as (sensitivity, checked):
            yield Learned(sensitivity=sensitivity), checked
    else:
        with calibrated_codes(source, out, recipe, options, progress=progress) as (codes, checked):
            yield codes, checked


def learned_for_plan(source: str | Path, recipe: Recipe, options: Options, show: Progress) -> Learned:
    """Return the sensitivities by which a plan chooses bit widths. show: called with steps, as progress is"""
    fetched = local_folder(source, options)
    with TemporaryDirectory() as work:
        return Learned(sensitivity=measured(fetched.path, Path(work), recipe, options, progress=show))
