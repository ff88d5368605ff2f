"""The Python API: the functions that `import pqweights` offers, one for each command of the same name.

They take what the commands take, with the same defaults, print nothing and return a report. docs/python.md has
examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.common.options import (
    BY_MODEL,
    DEFAULT_MAX_SHARD_SIZE,
    DEFAULT_MAX_TOKENS,
    DEFAULT_SAMPLE_TOKENS,
    FormatsByPattern,
    GenerationOptions,
    Options,
    StrPath,
    Tell,
    location,
    options_in,
    path_of,
    text,
)
from pqweights.common.threads import Progress, no_progress
from pqweights.convert.convert import convert, unmeasured
from pqweights.convert.distributed.engine import engine_of
from pqweights.convert.manifest import Manifest, parse_manifest, read_manifest
from pqweights.convert.plan import MASTER, Plan
from pqweights.convert.report import RewriteReport
from pqweights.errors import OptionError
from pqweights.planning.calibration import check_calibration, measures
from pqweights.planning.choice import choose_recipe
from pqweights.planning.inputs import KnownInputs
from pqweights.results.inspect import Inspection
from pqweights.results.inspect import inspect as inspect_folder
from pqweights.results.plan_report import PlanReport, report_plan
from pqweights.results.rebuild import Rebuilt, differences, made_again, options_of, unkept_store
from pqweights.results.verify import Verification
from pqweights.results.verify import verify as verify_folder
from pqweights.storage import Store, open_store
from pqweights.storage.addresses import repository_id
from pqweights.storage.sources import find_result, local_folder
from pqweights.targets import get_target
from pqweights.targets.exporting import open_exported, plan_export, readable, settings_of
from pqweights.targets.master import Learned, plan_quantize

if TYPE_CHECKING:
    from pqweights.calibrate.sampled_inputs import SampledInputs
    from pqweights.checkpoint.source import Checkpoint
    from pqweights.planning.recipe import Recipe
    from pqweights.planning.sensitivity import Sensitivity
    from pqweights.runtime.generation import Generation


def plan(
    source: StrPath,
    recipe: StrPath | Recipe | None = None,
    *,
    codec: str | None = None,
    bits: float | None = None,
    effort: int | None = None,
    keep: str | Sequence[str] = (),
    set_format: FormatsByPattern | None = None,
    target_size: int | str | None = None,
    target_bpw: float | None = None,
    max_kl: float | None = None,
    adapter: str | Sequence[str] = (),
    leave_out: str | Sequence[str] = (),
    awq: StrPath | None = None,
    calibrate: StrPath | None = None,
    calibration_tokens: int = DEFAULT_SAMPLE_TOKENS,
    rate: Literal["model", "tensor"] = BY_MODEL,
    allow_pickle: bool = False,
    include_files: str | Sequence[str] = (),
    lossless: bool = False,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    memory: int | str | None = None,
    context: int | str | None = None,
    runtime: Literal["llama.cpp", "mlx", "vllm", "transformers"] | None = None,
    threads: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    calibration_progress: Progress | None = None,
    tell: Tell | None = None,
) -> PlanReport:
    """Decide what `quantize` would do with each tensor.

    The arguments are those of `quantize`, and:

    memory: propose targets and formats with which the model fits into so many bytes, or a text such as "16GB"
    context: for `memory`: how many tokens the model keeps, a number or a text such as "32k"
    runtime: for `memory`: propose what this runtime loads, and nothing else

    With `calibrate` and a target, the model runs, as it does in `quantize`; otherwise only headers are read.

    Raises SourceError, RecipeError, OptionError or HubError.
    """
    options = options_in(Options, locals())
    return planned(location("source", source), options, progress=calibration_progress or no_progress)


def planned(source: str | Path, options: Options, out: Store | None = None, *, progress: Progress) -> PlanReport:
    """Plan what quantizing a source would do, with sensitivities that are measured if it depends on them.

    out: where the result is to be written; by default a local folder
    progress: called with the steps of a measurement that are done, those in all, and the next one
    """
    recipe, known = choose_recipe(options.recipe, options), Learned()
    if measures(recipe, options):
        from pqweights.calibrate.learning import learned_for_plan

        check_calibration(options)
        known = learned_for_plan(source, recipe, options, progress)
    return report_plan(source, recipe, options, out, learned=known)


def quantize(
    source: StrPath,
    out: StrPath,
    recipe: StrPath | Recipe | None = None,
    *,
    codec: str | None = None,
    bits: float | None = None,
    effort: int | None = None,
    keep: str | Sequence[str] = (),
    set_format: FormatsByPattern | None = None,
    target_size: int | str | None = None,
    target_bpw: float | None = None,
    max_kl: float | None = None,
    eval: StrPath | None = None,
    adapter: str | Sequence[str] = (),
    leave_out: str | Sequence[str] = (),
    strict: bool = False,
    awq: StrPath | None = None,
    calibrate: StrPath | None = None,
    calibration_tokens: int = DEFAULT_SAMPLE_TOKENS,
    save_sample: StrPath | None = None,
    rate: Literal["model", "tensor"] = BY_MODEL,
    allow_pickle: bool = False,
    include_files: str | Sequence[str] = (),
    lossless: bool = False,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    low_disk: bool = False,
    ray: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    calibration_progress: Progress | None = None,
    tell: Tell | None = None,
) -> RewriteReport:
    """Quantize a checkpoint into a master, continuing an interrupted run of the same call.

    source: a folder of safetensors files or one of them, ORG/MODEL on the Hub, or an address such as s3://BUCKET/FOLDER
    out: a folder for the result, new or empty, or an address
    recipe: the name of a built-in recipe, a YAML file, or a Recipe; by default q5
    codec, bits, effort: what the recipe gives where no rule does: codec, bit width, work that goes into encoding
    keep: shell-style patterns of the tensors that are kept; they come before set_format and before all rules
    set_format: bit widths by pattern; the first that matches decides, before the rules of the recipe. Patterns are of
        names, or of a role or layers as in "role:expert" and "layers:0-3"
    target_size: the most bytes that the safetensors files may take, or "9GB"; bit widths are chosen to fit
    target_bpw: the most bits that a weight may take on average, all overhead counted; likewise
    max_kl: the most divergence from the original, in nats per token of the sample of `calibrate`; the bit widths are
        chosen with which the result is smallest
    eval: for `max_kl`: the file of a text on which the divergence is measured in place of such tokens
    adapter: adapters of PEFT or mlx-lm that are merged into the source in turn: folders, repositories or addresses,
        each perhaps with a colon and by how much it is multiplied
    leave_out: patterns of the names of tensors that the result does not get
    strict: fail if the error of a tensor is above the limit of its codec, even after it is rescued
    awq: scale input channels before quantizing, with scales that are searched on a sample of text, as for `calibrate`
    calibrate: calibrate the weights of the trellis, on "self", "mixture", a text file or folder, a file.safetensors of
        `save_sample`, or a data set; for a target with other codecs, measure there how much each weight matters
    calibration_tokens: the number of tokens of that sample
    save_sample: a file.safetensors for that sample, which `calibrate` then takes for other results of the model
    rate: whether weights that matter more get more bits (model), or what the recipe gives each (tensor)
    allow_pickle: also read pickled weights, with torch's restricted loader
    include_files: patterns of further files of the source that are copied
    lossless: round nothing; the source is read twice
    max_shard_size: the most bytes of an output file, or a text such as "5GB"
    low_disk: of a source on the Hub, keep at most two files at a time
    ray: the Ray cluster that does the work: HOST:PORT of its head node, auto or local
    threads: how many threads compute; by default one for each core
    overwrite: replace an earlier result of pqweights in `out`
    revision: branch, tag or commit of a repository on the Hub; by default main
    token: access token for the Hub; by default the one of hf auth login
    progress: called with the bytes done, the bytes in all, and the name of a tensor or a file
    calibration_progress: called with the steps of a calibration that are done, those in all, and the next one
    tell: called with a line about every wait

    Raises SourceError, RecipeError, OptionError, OutputError or HubError.
    """
    options = options_in(Options, locals())
    store, show = open_store(location("out", out)), calibration_progress or no_progress
    with (
        _with_engine(options, ray) as engaged,
        _quantized(location("source", source), store, engaged, show) as (plan, checked),
    ):
        return convert(plan, store, checked)


@contextlib.contextmanager
def _quantized(source: str | Path, store: Store, options: Options, show: Progress) -> Iterator[tuple[Plan, Options]]:
    """Learn what options ask for, and yield what is to be made of it. show: called with the steps of what is learned"""
    chosen, known = choose_recipe(options.recipe, options), Learned()
    learns = options.calibrate is not None or options.awq is not None
    if learns:
        check_calibration(options)
    with contextlib.ExitStack() as kept:
        if learns:
            from pqweights.calibrate.learning import learned

            folder, options = _fetched(source, options)
            if chosen.goal is not None and chosen.goal.divergence is None:
                plan_quantize(folder, chosen, options)  # refuses a size before anything runs for it
            known, options = kept.enter_context(learned(folder, store, chosen, options, progress=show))
        yield plan_quantize(source, chosen, options, known, out=store), options


def export(
    source: StrPath,
    out: StrPath,
    target: str,
    *,
    bits: int | str | None = None,
    group_size: int | None = None,
    qparams: Literal["best", "minmax"] | None = None,
    rounding: Literal["plain", "gptq", "importance"] | None = None,
    calibrate: StrPath | None = None,
    calibration_tokens: int = DEFAULT_SAMPLE_TOKENS,
    save_sample: StrPath | None = None,
    imatrix: StrPath | None = None,
    save_imatrix: StrPath | None = None,
    packing: str | None = None,
    mode: str | None = None,
    format: str | None = None,
    dtype: Literal["bf16", "source"] | None = None,
    type: str | None = None,
    pure: bool = False,
    without_tokenizer: bool = False,
    name: str | None = None,
    recipe: StrPath | Recipe | None = None,
    keep: str | Sequence[str] = (),
    set_format: FormatsByPattern | None = None,
    target_size: int | str | None = None,
    target_bpw: float | None = None,
    max_kl: float | None = None,
    eval: StrPath | None = None,
    adapter: str | Sequence[str] = (),
    leave_out: str | Sequence[str] = (),
    allow_pickle: bool = False,
    include_files: str | Sequence[str] = (),
    low_disk: bool = False,
    max_shard_size: int | str | None = None,
    push: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    ray: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> RewriteReport:
    """Export a checkpoint or a master to what a runtime loads, continuing an interrupted run of the same call.

    source: a checkpoint or a master: a folder, a file, ORG/NAME on the Hub, or an address
    out, adapter, leave_out, allow_pickle, include_files, low_disk, ray, threads, overwrite, revision, token, progress,
        tell:
        those of `quantize`
    max_shard_size: as in `quantize`, but for gguf by default what makes one file of nearly every model, 45 GB
    push: ORG/NAME on the Hub, to which each file is sent once it is whole, and removed here; with `low_disk`, the disk
        holds one file of the source and one of the result at a time, and the source is fetched once for each file
    private: with `push`: create the repository as private; one that exists must be private
    dry_run: plan from headers alone, and write nothing; the report has all names and sizes, and no errors
    target: "bf16", "torchao", "mlx", "gguf", "vllm" or "comfyui"; each takes some of the options below
    bits, group_size: of integers: bits of a code, by default 4, and weights that share a scale, by default 128 or 64
    qparams: how scales and offsets are chosen: by a weighted squared error (best), or as the runtime's converter does
        (minmax)
    rounding: to the nearest codes (plain), so that errors cancel in the outputs (gptq), or by importance
    calibrate, calibration_tokens, save_sample: the sample from which the inputs of weights are learned, as in
        `quantize`
    imatrix: a file of importances of llama.cpp, in place of a sample
    save_imatrix: where to write the importances that a sample gave, for llama.cpp's quantizer
    packing: for torchao in INT4: the layout of codes
    mode: for mlx: affine integers, or a float format of MLX
    format: the format of weights, of those that the target has; several with commas between them, "int4,int8", make a
        folder of each in `out`, in one reading of the source, and so do several `bits`
    dtype: for bf16: BF16 for all, or what each weight had in the source
    type: for gguf: a mix or type of llama.cpp, such as "q4_k_m", or several with commas between them
    pure: for gguf: all matrices in the type of the mix
    without_tokenizer: for gguf: write the file although the model has no tokenizer
    name: for gguf: the name of the model
    recipe, keep, set_format, target_size, target_bpw, max_kl, eval: as in `quantize`, with formats of the target in
        place of codecs and bit widths; a size is met by a rule of thumb, or with `calibrate` by how much each weight
        matters there

    Raises SourceError, MasterError, ExportError, OptionError, OutputError, HubError or MissingDependencyError.
    """
    options = options_in(Options, locals())
    _check_export(target, options, push=push, private=private, dry_run=dry_run, ray=ray)
    given, store = location("source", source), open_store(location("out", out))
    if dry_run:
        opened = open_exported(given, options)
        return unmeasured(plan_export(given, opened, store, target, options=options))
    if push is not None and store.is_elsewhere:
        raise OptionError("`push`: expected a folder on this machine as OUT")
    with (
        _with_engine(options, ray) as engaged,
        _exported(given, store, target, engaged) as (plan, checked),
    ):
        if push is None:
            return convert(plan, store, checked)
        return _sent(push, plan, store, checked, private=private)


def _check_export(
    target: str, options: Options, *, push: str | None, private: bool, dry_run: bool, ray: str | None
) -> None:
    """Raise OptionError for wrong values of `export`, and for those that contradict each other."""
    goal = settings_of(get_target(target), options).recipe.goal
    if ray is not None and options.calibrate is not None:
        raise OptionError("`ray`: the inputs of weights are learned on one machine; leave out `ray` or `calibrate`")
    if push is not None and ray is not None:
        raise OptionError("`push`: files are sent by one machine; leave out `ray` or `push`")
    if private and push is None:
        raise OptionError("`private`: says how `push` creates a repository; give `push`, or leave it out")
    if dry_run and options.calibrate is not None and goal is not None:
        raise OptionError(
            "`dry_run`: the formats for a goal depend on what `calibrate` measures; leave out one of them"
        )


def _sent(repository: str, plan: Plan, store: Store, options: Options, *, private: bool) -> RewriteReport:
    """Make a result, and send each of its files to a repository once it is whole. private: see `export`"""
    from pqweights.publish.card import PublishOptions
    from pqweights.publish.push import begin_sending, push

    hub, read = Options(token=options.token, tell=options.tell), plan.checkpoint.storage
    read.frees = min(1, read.frees)
    sending = begin_sending(repository, hub, plan.manifest, private=private)
    report = convert(plan, replace(store, sending=sending), options)
    how = PublishOptions(threads=options.thread_count, private=private)
    return replace(report, pushed=push(store.path, repository, hub, options=how, sent=sending.files))


@contextlib.contextmanager
def _exported(source: str | Path, store: Store, target: str, options: Options) -> Iterator[tuple[Plan, Options]]:
    """Learn what options ask for, and yield what is to be made of it."""
    to = get_target(target)
    options = to.with_recipe(options)
    goal = None if options.calibrate is None else settings_of(to, options).recipe.goal
    known: SampledInputs | None = None
    with contextlib.ExitStack() as kept:
        if options.calibrate is not None:
            from pqweights.calibrate.sampled_inputs import inputs_of

            folder, options = _fetched(source, options)
            store.check_apart(folder)
            local = replace(options, revision=None, include_files=(), low_disk=False)
            of_folder, wanted = open_exported(folder, local), None if goal is None else goal.divergence
            if goal is not None and wanted is None:
                plan_export(folder, of_folder, store, target, options=options)  # refuses a size before anything runs
            known = kept.enter_context(inputs_of(folder, of_folder[0], store, options, options.thread_count, wanted))
            options = replace(options, check=known.check_source)
        opened = open_exported(source, options)
        inputs: KnownInputs | None = known

        def exported_by(sensitivity: Sensitivity, tried: Store) -> Checkpoint:
            own = replace(readable(to, options), sensitivity=sensitivity, overwrite=True)
            convert(plan_export(source, opened, tried, target, options=own, inputs=inputs), tried, own)
            return open_exported(tried.path)[0]

        if known is not None and goal is not None:
            options = replace(options, sensitivity=known.sensitivity(store, exported_by, overwrite=options.overwrite))
        elif known is None and (file := path_of(options.imatrix)) is not None:
            from pqweights.calibrate.imatrix import FileInputs

            inputs = FileInputs.of(file, opened[0])
        yield plan_export(source, opened, store, target, options=options, inputs=inputs), options
        if known is not None and (file := path_of(options.save_imatrix)) is not None:
            from pqweights.calibrate.imatrix import write_imatrix

            known.prepare(options.progress)
            write_imatrix(file, known, opened[0], str(options.calibrate))


def _fetched(source: str | Path, options: Options) -> tuple[Path, Options]:
    """Fetch a model that is to be run, and return its folder, and the options with the commit that was fetched."""
    fetched = local_folder(source, options, progress=options.progress)
    if fetched.origin is None:
        return fetched.path, options
    return fetched.path, replace(options, revision=fetched.origin.revision)  # the branch may move meanwhile


def verify(
    folder: StrPath,
    *,
    source: StrPath | None = None,
    adapter: str | Sequence[str] = (),
    calibrate: StrPath | None = None,
    imatrix: StrPath | None = None,
    eval: StrPath | None = None,
    allow_pickle: bool = False,
    include_files: str | Sequence[str] = (),
    low_disk: bool = False,
    threads: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    making_progress: Progress | None = None,
    calibration_progress: Progress | None = None,
    tell: Tell | None = None,
) -> Verification:
    """Check every stored byte of a master or an export against its manifest.

    folder: a folder, ORG/NAME on the Hub, or an address
    source: what it was made of, or a master without loss of that: every tensor is made again, and compared by its
        hash; nothing of it is kept
    adapter, calibrate, imatrix, eval, allow_pickle, include_files, low_disk: with `source`, those of `rebuild`
    threads, revision, token, progress, calibration_progress, tell: those of `quantize`; the revision is the folder's
    making_progress: called as `progress` is while the result is made again

    Raises MasterError if the folder has no readable manifest, SourceError or HubError; every other problem is a line
    of the result.
    """
    options = options_in(Options, locals() | {"revision": None, "progress": making_progress})
    show = progress or no_progress
    access = Options(revision=revision, token=token, tell=tell)
    result = find_result(location("folder", folder), access, ours=True, progress=show)
    verified = verify_folder(result.where, threads=options.thread_count, beside=result.not_fetched, progress=show)
    if source is None:
        return verified
    manifest = read_manifest(result.where)
    learning = calibration_progress or no_progress
    with (
        unkept_store() as store,
        _as_stated(manifest, location("source", source), store, options, learning) as (plan, checked),
    ):
        again = made_again(plan, store, checked)
    return replace(verified, problems=(*verified.problems, *differences(manifest, again)))


def rebuild(
    manifest: StrPath,
    source: StrPath,
    out: StrPath,
    *,
    type: str | None = None,
    adapter: str | Sequence[str] = (),
    calibrate: StrPath | None = None,
    imatrix: StrPath | None = None,
    eval: StrPath | None = None,
    allow_pickle: bool = False,
    include_files: str | Sequence[str] = (),
    low_disk: bool = False,
    ray: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    calibration_progress: Progress | None = None,
    tell: Tell | None = None,
) -> Rebuilt:
    """Make a result again from its manifest, and compare every byte with what that states.

    manifest: a pqweights.json, or the folder, repository or address of a result that has one
    source: what it was made of, or a master without loss of that; of the repository that the manifest names, its commit
        is taken
    out: a folder for the result, new or empty, or an address
    type: of several GGUF files, the types of those that are made
    calibrate: the text of the sample, if the manifest has only its digest
    imatrix, eval: the file of importances, and the text on which `max_kl` was measured, likewise
    adapter, allow_pickle, include_files, low_disk, ray, threads, overwrite, revision, token, progress,
        calibration_progress, tell: those of `quantize`

    Raises MasterError for what is no manifest; and what `quantize` and `export` raise.
    """
    options = options_in(Options, locals())
    stated = _read_manifest(location("manifest", manifest), Options(token=token, tell=tell))
    store, learning = open_store(location("out", out)), calibration_progress or no_progress
    with (
        _with_engine(options, ray) as engaged,
        _as_stated(stated, location("source", source), store, engaged, learning) as (plan, checked),
    ):
        report = convert(plan, store, checked)
    made = parse_manifest(store.read(MANIFEST_FILE) or b"")
    return Rebuilt(report=report, differences=tuple(differences(stated, made, some=type is not None)))


def _read_manifest(given: str | Path, access: Options) -> Manifest:
    if (path := Path(given)).is_file():
        return parse_manifest(path.read_bytes())
    return read_manifest(find_result(given, access, only=[MANIFEST_FILE]).where)


def _as_stated(
    manifest: Manifest, source: str | Path, store: Store, given: Options, show: Progress
) -> contextlib.AbstractContextManager[tuple[Plan, Options]]:
    """Return what makes a result as its manifest states it."""
    options = options_of(manifest, source, given)
    if manifest.kind == MASTER:
        return _quantized(source, store, options, show)
    return _exported(source, store, str(manifest.made_by["target"]), options)


def inspect(
    folder: StrPath, *, revision: str | None = None, token: str | None = None, tell: Tell | None = None
) -> Inspection:
    """Return what a master or an export holds according to its manifest: tensors, bits, errors and sizes.

    Of a folder on the Hub or in object storage, only the manifest is fetched. For a GGUF file that has no manifest
    beside it, see pqweights.results.inspect.

    folder: a folder, ORG/NAME on the Hub, or an address
    revision, token, tell: those of `quantize`

    Raises MasterError, SourceError or HubError.
    """
    hub = Options(revision=revision, token=token, tell=tell)
    return inspect_folder(find_result(location("folder", folder), hub, only=[MANIFEST_FILE]).where)


def generate(
    model: StrPath,
    prompt: str,
    *,
    no_chat: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    temperature: float | None = None,
    seed: int | None = None,
    packed: bool | None = None,
    kv_cache: str | None = None,
    device: Literal["cpu", "cuda", "auto"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    threads: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    on_text: Callable[[str], None] | None = None,
    tell: Tell | None = None,
) -> Generation:
    """Load a model, and let it answer or continue one prompt.

    model: a master, or any checkpoint of a language model that transformers loads: a folder, or ORG/NAME on the Hub
    prompt: the text to answer or continue
    no_chat: continue the prompt as it is, even if the model has a chat template
    max_tokens: the most tokens of the text
    temperature: choose tokens at random, with logits divided by it; 0 takes the likeliest; by default as the model says
    seed: of the random choices; by default a random one
    packed: keep the weights of a master packed in memory; by default where that is faster
    kv_cache: how keys and values are quantized, such as "klt:3"
    device, dtype: what computes, and in what; auto is a GPU if there is one, and the model's own dtype
    threads, revision, token, progress, tell: those of `quantize`
    on_text: called with each piece of the text as it comes

    Raises SourceError, MasterError, GenerationError, EvaluationError, OptionError, DeviceError, HubError or
    MissingDependencyError.
    """
    from pqweights.runtime.cached import check_spec
    from pqweights.runtime.generation import check_prompt, continued

    options = options_in(GenerationOptions, locals())
    check_prompt(text("prompt", prompt))
    if kv_cache is not None:
        check_spec(kv_cache)
    if revision is not None and repository_id(str(model)) is None:
        raise OptionError("`revision`: expected a repository on the Hub as MODEL")
    fetched = local_folder(
        location("model", model), Options(revision=revision, token=token, tell=tell), progress=progress or no_progress
    )
    return continued(fetched.path, prompt, options, name=str(model), on_text=on_text or _say_nothing)


def _say_nothing(line: str) -> None:
    """Report no wait."""


@contextlib.contextmanager
def _with_engine(options: Options, ray: str | None) -> Iterator[Options]:
    """Yield options with the engine that makes shards on a Ray cluster, if there is an address of one."""
    with engine_of(ray, options.threads, options.tell or _say_nothing) as engine:
        yield replace(options, engine=engine)
