"""The Python API: the functions that `import pqweights` offers, one for each command of the same name.

They take what the commands take, with the same defaults, print nothing and return a report. docs/python.md has
examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike

from pqweights import arguments
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.distributed.engine import engine_of
from pqweights.exporting import MasterFolder
from pqweights.exporting import export as export_master
from pqweights.exports import get_target
from pqweights.exports.options import ExportOptions
from pqweights.generation.generator import Generator
from pqweights.generation.options import DEFAULT_MAX_TOKENS, GenerationOptions
from pqweights.generation.report import INTERRUPTED, Generation
from pqweights.hub.sources import Access, find_original, find_result, local_folder
from pqweights.planning.plan import DEFAULT_MAX_SHARD_BYTES
from pqweights.planning.recipe import Recipe
from pqweights.quantizing import QuantizeOptions
from pqweights.quantizing import quantize as quantize_source
from pqweights.results.inspect import Inspection
from pqweights.results.inspect import inspect as inspect_folder
from pqweights.results.plan_report import PlanReport, report_plan
from pqweights.results.shard_checks import ShardChecks
from pqweights.results.verify import Verification
from pqweights.results.verify import verify as verify_folder
from pqweights.rewrite.task import RewriteReport, RunOptions

Progress = Callable[[int, int, str], None]


def plan(
    source: str | PathLike[str],
    recipe: str | PathLike[str] | Recipe = "q5",
    *,
    codec: str | None = None,
    bits: float | None = None,
    effort: int | None = None,
    keep: str | Sequence[str] = (),
    set_bits: Mapping[str, float] | None = None,
    target_size: int | str | None = None,
    target_bpw: float | None = None,
    bpw_of: str | None = None,
    sensitivity: str | PathLike[str] | None = None,
    awq: str | PathLike[str] | None = None,
    awq_any_codec: bool = False,
    fold: str | None = None,
    calibration: str | PathLike[str] | None = None,
    include_files: str | Sequence[str] = (),
    max_shard_size: int | str = DEFAULT_MAX_SHARD_BYTES,
    allow_pickle: bool = False,
    threads: int | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> PlanReport:
    """Decide what `quantize` would do with each tensor, from the headers of a checkpoint alone.

    threads: the number of threads for which the memory is estimated
    The other arguments are those of `quantize`.

    Raises SourceError, RecipeError, OptionError or HubError.
    """
    chosen = arguments.chosen_recipe(
        recipe,
        codec=codec,
        bits=bits,
        effort=effort,
        keep=keep,
        set_bits=set_bits,
        target_size=target_size,
        target_bpw=target_bpw,
        bpw_of=bpw_of,
        sensitivity=sensitivity,
    )
    options = QuantizeOptions(
        access=Access(revision, token),
        awq=None if awq is None else arguments.local("awq", awq),
        awq_any_codec=awq_any_codec,
        fold=fold,
        calibration=None if calibration is None else arguments.local("calibration", calibration),
        include_files=arguments.patterns("include_files", include_files),
        max_shard_bytes=arguments.byte_size("max_shard_size", max_shard_size),
        allow_pickle=allow_pickle,
    )
    return report_plan(arguments.local_or_hub("source", source), chosen, options, arguments.threads(threads))


def quantize(
    source: str | PathLike[str],
    out: str | PathLike[str],
    recipe: str | PathLike[str] | Recipe = "q5",
    *,
    codec: str | None = None,
    bits: float | None = None,
    effort: int | None = None,
    keep: str | Sequence[str] = (),
    set_bits: Mapping[str, float] | None = None,
    target_size: int | str | None = None,
    target_bpw: float | None = None,
    bpw_of: str | None = None,
    sensitivity: str | PathLike[str] | None = None,
    awq: str | PathLike[str] | None = None,
    awq_any_codec: bool = False,
    fold: str | None = None,
    calibration: str | PathLike[str] | None = None,
    strict: bool = False,
    include_files: str | Sequence[str] = (),
    max_shard_size: int | str = DEFAULT_MAX_SHARD_BYTES,
    allow_pickle: bool = False,
    low_disk: bool = False,
    threads: int | None = None,
    ray: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> RewriteReport:
    """Quantize a checkpoint into a master, continuing an interrupted run of the same call.

    source: a folder of safetensors files, one such file, ORG/MODEL on the Hub, or an address such as s3://BUCKET/FOLDER
    out: the folder for the master, or an address: new, empty, or that of an earlier run
    recipe: the name of a built-in recipe, a YAML file, or a pqweights.planning.recipe.Recipe
    codec: another default codec
    bits: another default bit width
    effort: how much work codecs that have a choice put into encoding, such as 64
    keep: a name pattern of tensors that are kept, or several
    set_bits: bit widths by name pattern
    target_size: choose bit widths so that the safetensors files take at most this many bytes; "9GB" is 9 * 10**9
    target_bpw: choose bit widths so that the mean is at most this many bits per weight
    bpw_of: the weights of that mean: "quantized" (the default) or "checkpoint"
    sensitivity: what widths for a target are chosen by: "heuristic", or a file that `pqweights sensitivity` wrote
    awq: a file of scales that `pqweights calibrate` wrote
    awq_any_codec: whether to use scales that were searched for another codec or bit width
    fold: "equalize" to move factors between neighbouring layers, so that channels become alike
    calibration: for the fold, a file that `pqweights calibrate --moments` wrote
    strict: whether to refuse a weight whose error exceeds what its codec promises
    include_files: a name pattern of files to copy besides those that loading the model needs, or several
    max_shard_size: the largest size of an output file, in bytes or as a text such as "5GB"
    allow_pickle: whether to read pickled weights, with torch's restricted loader
    low_disk: whether to keep at most two files of a source on the Hub at a time
    threads: by default one for each core
    ray: "HOST:PORT" of a Ray cluster whose nodes do the work, "auto" for that of this machine, "local" for a new one
    overwrite: whether to replace an earlier result in `out`
    progress: called with the bytes done, the bytes in all, and the name of a tensor
    revision, token: those of a source on the Hub

    Raises SourceError, RecipeError, OptionError, OutputError or HubError.
    """
    chosen = arguments.chosen_recipe(
        recipe,
        codec=codec,
        bits=bits,
        effort=effort,
        keep=keep,
        set_bits=set_bits,
        target_size=target_size,
        target_bpw=target_bpw,
        bpw_of=bpw_of,
        sensitivity=sensitivity,
    )
    options = QuantizeOptions(
        access=Access(revision, token),
        awq=None if awq is None else arguments.local("awq", awq),
        awq_any_codec=awq_any_codec,
        fold=fold,
        calibration=None if calibration is None else arguments.local("calibration", calibration),
        strict=strict,
        include_files=arguments.patterns("include_files", include_files),
        max_shard_bytes=arguments.byte_size("max_shard_size", max_shard_size),
        allow_pickle=allow_pickle,
        low_disk=low_disk,
    )
    found, place = arguments.local_or_hub("source", source), arguments.place("out", out)
    with _run(threads=threads, ray=ray, overwrite=overwrite, progress=progress) as run:
        return quantize_source(found, place, chosen, options=options, run=run)


def export(
    master: str | PathLike[str],
    out: str | PathLike[str],
    target: str,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    qparams: str | None = None,
    source: str | PathLike[str] | None = None,
    fold: str | None = None,
    rounding: str | None = None,
    calibration: str | PathLike[str] | None = None,
    packing: str | None = None,
    mode: str | None = None,
    dtype: str | None = None,
    type: str | None = None,
    pure: bool = False,
    set_type: Mapping[str, str] | None = None,
    recipe: str | PathLike[str] | None = None,
    target_size: int | str | None = None,
    sensitivity: str | PathLike[str] | None = None,
    imatrix: bool = False,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_BYTES,
    threads: int | None = None,
    ray: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> RewriteReport:
    """Export a master to a checkpoint that a runtime loads, continuing an interrupted run of the same call.

    master: the folder of a master, ORG/NAME on the Hub, or an address such as s3://BUCKET/FOLDER
    out: the folder for the export, or an address: new, empty, or that of an earlier run
    target: "bf16", "torchao-int4", "mlx", "gguf" or "vllm"
    bits, group_size, qparams: bits of the integers, weights that share a scale, and how scales are chosen
    source: the original checkpoint, from which integers are then made
    fold: "equalize" to move factors between neighbouring layers before rounding
    rounding: "plain", "gptq" to round with a view to the error of the outputs, or "importance" to weigh errors by the
        inputs (gguf); by default not plain with a calibration
    calibration: for the rounding and for the fold, a file that `pqweights calibrate --moments` wrote
    packing: how codes are packed (torchao-int4)
    mode: "affine", or a float format of MLX (mlx)
    dtype: "bf16", or "source" for the dtypes of the source (bf16)
    type, pure: the mix or type of the tensors, such as "q4_k_m", and whether all get its type (gguf)
    set_type, recipe: types by pattern of names, and a recipe of types (gguf)
    target_size, sensitivity: the largest size, for which types are then chosen, and by what (gguf)
    imatrix: whether llama.cpp's importance matrix is written as well (gguf)
    The other arguments are those of `quantize`.

    Raises SourceError, MasterError, ExportError, OptionError, OutputError, HubError or MissingDependencyError.
    """
    asked = ExportOptions(
        dtype=dtype,
        bits=bits,
        group_size=group_size,
        mode=mode,
        packing=packing,
        qparams=qparams,
        fold=fold,
        rounding=rounding,
        calibration=None if calibration is None else arguments.local("calibration", calibration),
        type=type,
        pure=pure or None,
        set_type=arguments.types_by_pattern(set_type),
        recipe=None if recipe is None else arguments.local("recipe", recipe),
        target_size=None if target_size is None else arguments.byte_size("target_size", target_size),
        sensitivity=None if sensitivity is None else str(sensitivity),
        imatrix=imatrix or None,
    )
    get_target(target).settings(asked)  # refuses wrong options before anything is fetched
    place, shard_bytes = arguments.place("out", out), arguments.byte_size("max_shard_size", max_shard_size)
    given = arguments.local_or_hub("folder", master)
    given_source = None if source is None else arguments.local_or_hub("folder", source)
    with _run(threads=threads, ray=ray, overwrite=overwrite, progress=progress) as run:
        found = find_result(given, Access(revision, token), ours=True, progress=run.progress)
        original = None if given_source is None else find_original(given_source, Access(None, token), run.progress)
        folder = MasterFolder(found.where, found.origin, original)
        return export_master(folder, place, target, options=asked, max_shard_bytes=shard_bytes, run=run)


def verify(
    folder: str | PathLike[str],
    *,
    threads: int | None = None,
    ray: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Verification:
    """Check every stored byte of a master or an export against its manifest.

    folder: a folder, ORG/NAME on the Hub, or an address such as s3://BUCKET/FOLDER
    The other arguments are those of `quantize`.

    Raises MasterError if the folder has no readable manifest, SourceError or HubError; every other problem is a line
    of the result.
    """
    show = progress or _ignore
    found = find_result(arguments.local_or_hub("folder", folder), Access(revision, token), ours=True, progress=show)
    used = arguments.threads(threads)
    with engine_of(ray, threads) as engine:
        run = ShardChecks.run if engine is None else engine.run_checks
        return verify_folder(found.where, threads=used, beside=found.not_fetched, progress=show, run=run)


def inspect(folder: str | PathLike[str], *, revision: str | None = None, token: str | None = None) -> Inspection:
    """Return what a master or an export holds according to its manifest: tensors, bits, errors and sizes.

    folder: a folder, or ORG/NAME on the Hub or an address, of which only the manifest is fetched
    revision, token: those of a repository on the Hub

    For a GGUF file that has no manifest beside it, see pqweights.results.inspect_gguf.

    Raises MasterError, SourceError or HubError.
    """
    found = find_result(arguments.local_or_hub("folder", folder), Access(revision, token), only=[MANIFEST_FILE])
    return inspect_folder(found.where)


def generate(
    model: str | PathLike[str],
    prompt: str,
    *,
    system: str | None = None,
    no_chat: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    packed: bool | None = None,
    kv_cache: str | None = None,
    tokenizer: str | PathLike[str] | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    on_text: Callable[[str], None] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Generation:
    """Load a model, and let it answer or continue one prompt.

    model: a master, an export or any checkpoint of a language model: a folder, or ORG/NAME on the Hub
    prompt: the text to answer, or to continue if the model has no chat template
    system: a system message, for models with a chat template
    no_chat: whether to continue the prompt as it is, also if there is a chat template
    max_tokens: the most tokens to generate
    temperature: 0 for the likeliest token; by default that of generation_config.json if the model samples, else 0
    top_p: the probability of the likeliest tokens that are chosen from; by default that of generation_config.json
    seed: of the random choices; by default a random one, which the report names
    packed: whether the weights of a master stay packed; by default those of scalar codecs do
    kv_cache: how keys and values are quantized, such as "klt:3" or "hadamard:4"; by default they stay as they are
    tokenizer: the folder of the tokenizer; by default the model's own
    dtype: "auto" for the model's own, "float32", "bfloat16" or "float16"
    device: "cpu", "cuda", or "auto" for a GPU if there is one
    on_text: called with each piece of the text as it comes
    The other arguments are those of `quantize`.

    Raises SourceError, MasterError, GenerationError, EvaluationError, OptionError, DeviceError, HubError or
    MissingDependencyError.
    """
    asked = GenerationOptions(
        system=system,
        chat=not no_chat,
        max_tokens=max_tokens,
        temperature=arguments.number("temperature", temperature),
        top_p=arguments.number("top_p", top_p),
        seed=arguments.whole("seed", seed),
        packed=packed,
        kv_cache=kv_cache,
        tokenizer=None if tokenizer is None else arguments.local("tokenizer", tokenizer),
        dtype=dtype,
        device=device,
    )
    asked.check()
    place = arguments.local_or_hub("model", model)
    found = local_folder(place, Access(revision, token), progress=progress or _ignore)
    opened = Generator(found.path, asked, name=str(model), tell=lambda line: None)
    done = opened.reply(prompt, on_text or (lambda piece: None))
    if done.stop == INTERRUPTED:
        raise KeyboardInterrupt
    return done


def _ignore(done: int, total: int, name: str) -> None:
    """Show no progress."""


@contextmanager
def _run(*, threads: int | None, ray: str | None, overwrite: bool, progress: Progress | None) -> Iterator[RunOptions]:
    used = arguments.threads(threads)
    with engine_of(ray, threads) as engine:
        yield RunOptions(threads=used, overwrite=overwrite, progress=progress or _ignore, engine=engine)
