"""The Python API: the functions that `import pqweights` offers, one for each command of the same name.

They take what the commands take, with the same defaults (planning/options.py), print nothing and return a report.
docs/python.md has examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.checkpoint.gguf.sources import open_local_source
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.common.parameters import takes
from pqweights.errors import OptionError
from pqweights.exports import get_target
from pqweights.exports.exporting import MasterFolder
from pqweights.exports.exporting import export as export_master
from pqweights.inference.options import GenerateArguments
from pqweights.planning.calibration import check_calibration
from pqweights.planning.choice import choose_recipe
from pqweights.planning.options import (
    CalibrateOptions,
    ExportArguments,
    InspectArguments,
    MemoryOptions,
    PlanArguments,
    QuantizeArguments,
    VerifyArguments,
    located,
)
from pqweights.rewrite.distributed.engine import engine_of
from pqweights.rewrite.quantizing import quantize as quantize_source
from pqweights.rewrite.results.inspect import Inspection
from pqweights.rewrite.results.inspect import inspect as inspect_folder
from pqweights.rewrite.results.plan_report import PlanReport, report_plan
from pqweights.rewrite.results.verify import Verification
from pqweights.rewrite.results.verify import verify as verify_folder
from pqweights.rewrite.task import RewriteReport, RunOptions, usable_cores
from pqweights.storage import Store, open_store
from pqweights.storage.sources import find_original, find_result, local_folder

if TYPE_CHECKING:
    from pqweights.inference.report import Generation
    from pqweights.quality.sampled_inputs import SampledInputs


@takes(PlanArguments)
def plan(asked: PlanArguments) -> PlanReport:
    """Decide what `quantize` would do with each tensor, from the headers of a checkpoint alone.

    Raises SourceError, RecipeError, OptionError or HubError.
    """
    chosen = choose_recipe(asked.recipe, asked)
    threads = asked.threads or usable_cores()
    room, calibrate = asked.part(MemoryOptions), asked.part(CalibrateOptions)
    return report_plan(located(asked.source), chosen, asked, threads, memory=room, calibrate=calibrate)


@takes(QuantizeArguments)
def quantize(asked: QuantizeArguments) -> RewriteReport:
    """Quantize a checkpoint into a master, continuing an interrupted run of the same call.

    Raises SourceError, RecipeError, OptionError, OutputError or HubError.
    """
    recipe, store = choose_recipe(asked.recipe, asked), open_store(located(asked.out))
    if asked.calibrate is None:
        with _run(asked) as run:
            return quantize_source(located(asked.source), store, recipe, options=asked, run=run)
    from pqweights.quality.calibrated_master import calibrated_codes

    check_calibration(asked)
    with _run(asked) as run:
        source = local_folder(located(asked.source), asked.access, progress=run.progress)
        if source.origin is not None:  # the branch may move while the model is calibrated
            asked = replace(asked, revision=source.origin.revision)
        with calibrated_codes(source.path, store, recipe, asked, run=run) as (ready, checked):
            return quantize_source(located(asked.source), store, recipe, options=asked, run=checked, ready=ready)


@takes(ExportArguments)
def export(asked: ExportArguments) -> RewriteReport:
    """Export a master to a checkpoint that a runtime loads, continuing an interrupted run of the same call.

    Raises SourceError, MasterError, ExportError, OptionError, OutputError, HubError or MissingDependencyError.
    """
    get_target(asked.target).settings(asked)  # refuses wrong options before anything is fetched
    if asked.ray is not None and asked.calibrate is not None:
        raise OptionError("`ray`: the inputs of weights are learned on one machine; leave out `ray` or `calibrate`")
    store = open_store(located(asked.out))
    with _run(asked) as run:
        result = find_result(located(asked.master), asked.access, ours=True, progress=run.progress)
        original = None
        if asked.source is not None:
            original = find_original(located(asked.source), asked.access_to_main, run.progress)
        master = MasterFolder(result.where, result.origin, original)
        shard_bytes = asked.max_shard_bytes
        with _inputs(master, store, asked, run) as known:
            checked = run if known is None else replace(run, check=known.check_source)
            return export_master(
                master,
                store,
                asked.target,
                options=asked,
                max_shard_bytes=shard_bytes,
                run=checked,
                inputs=known,
                leave_out=asked.leave_out,
            )


@contextmanager
def _inputs(
    master: MasterFolder, store: Store, asked: ExportArguments, run: RunOptions
) -> Iterator[SampledInputs | None]:
    """Yield what is learned of the inputs of the weights that are rounded, if `calibrate` is given."""
    if asked.calibrate is None:
        yield None
        return
    from pqweights.quality.sampled_inputs import inputs_of

    where = master.folder if master.original is None else master.original
    if not isinstance(where, Path):
        raise OptionError(f"`calibrate`: expected a model on this machine, found {where}; copy it here first")
    checkpoint = master.opened[0] if master.original is None else open_local_source(where)
    store.check_apart(where)
    with inputs_of(where, checkpoint, store, asked, run.threads) as inputs:
        yield inputs


@takes(VerifyArguments)
def verify(asked: VerifyArguments) -> Verification:
    """Check every stored byte of a master or an export against its manifest.

    Raises MasterError if the folder has no readable manifest, SourceError or HubError; every other problem is a line
    of the result.
    """
    show = asked.progress or _ignore
    result = find_result(located(asked.folder), asked.access, ours=True, progress=show)
    return verify_folder(
        result.where, threads=asked.threads or usable_cores(), beside=result.not_fetched, progress=show
    )


@takes(InspectArguments)
def inspect(asked: InspectArguments) -> Inspection:
    """Return what a master or an export holds according to its manifest: tensors, bits, errors and sizes.

    Of a folder on the Hub or in object storage, only the manifest is fetched. For a GGUF file that has no manifest
    beside it, see pqweights.rewrite.results.inspect.

    Raises MasterError, SourceError or HubError.
    """
    return inspect_folder(find_result(located(asked.folder), asked.access, only=[MANIFEST_FILE]).where)


@takes(GenerateArguments)
def generate(asked: GenerateArguments) -> Generation:
    """Load a model, and let it answer or continue one prompt.

    Raises SourceError, MasterError, GenerationError, EvaluationError, OptionError, DeviceError, HubError or
    MissingDependencyError.
    """
    from pqweights.inference.generator import Generator
    from pqweights.inference.report import INTERRUPTED
    from pqweights.inference.runtimes.cached import check_spec

    if asked.kv_cache is not None:
        check_spec(asked.kv_cache)
    model = local_folder(located(asked.model), asked.access, progress=asked.progress or _ignore)
    opened = Generator(model.path, asked, name=str(asked.model), tell=asked.tell or _say_nothing)
    done = opened.reply(asked.prompt, asked.on_text or (lambda piece: None))
    if done.stop == INTERRUPTED:
        raise KeyboardInterrupt
    return done


def _ignore(done: int, total: int, name: str) -> None:
    """Show no progress."""


def _say_nothing(line: str) -> None:
    """Report no wait."""


@contextmanager
def _run(asked: QuantizeArguments | ExportArguments) -> Iterator[RunOptions]:
    """Yield how a task is carried out."""
    with engine_of(asked.ray, asked.threads, asked.tell or _say_nothing) as engine:
        yield RunOptions(
            threads=asked.threads or usable_cores(),
            overwrite=asked.overwrite,
            progress=asked.progress or _ignore,
            engine=engine,
        )
