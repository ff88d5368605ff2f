"""The command `pqweights inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, report
from .report_errors import integer_form_lines, quality_lines
from .report_gguf import gguf_lines
from .report_kv import kv_lines
from .report_summary import action_text, is_summarized, summary_table
from .tables import table

if TYPE_CHECKING:
    from pqweights.checkpoint.storage import Storage
    from pqweights.planning.plan import TensorPlan
    from pqweights.quality.measure.distribution import Distribution, Normality
    from pqweights.rewrite.manifest import Manifest
    from pqweights.rewrite.records import TensorRecord
    from pqweights.rewrite.results.inspect import Inspection

FolderOrSource = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Master or export written by pqweights: a folder, ORG/NAME on the Hub, or an address such as "
        "s3://BUCKET/FOLDER. Also any GGUF file. With "
        "--distribution, any checkpoint; with --kv, any of a language model.",
    ),
]
DistributionOption = Annotated[
    bool,
    typer.Option(
        "--distribution",
        help="Measure instead how close the weights of a checkpoint are to Gaussian, before and after the rotation.",
    ),
]
KVOption = Annotated[
    bool,
    typer.Option(
        "--kv",
        help="Measure instead the keys and values that a language model computes for --text: how Gaussian they are, "
        "before and after preconditioning, and the outlier channels of keys.",
    ),
]
TextOption = Annotated[
    Path | None, typer.Option("--text", metavar="FILE", help="With --kv: UTF-8 text for the model to read.")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=2,
        help="With --kv: number of tokens to read from the start of the text.",
        show_default="2048, or the model's limit if smaller",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="DIR", help="With --kv: folder of the tokenizer.", show_default="the model's own"
    ),
]
NoBosOption = Annotated[
    bool,
    typer.Option("--no-bos", help="With --kv: do not begin with BOS, even if the tokenizer puts it before a text."),
]
DeviceOption = Annotated[
    options.Device | None,
    typer.Option(
        "--device",
        help="With --kv: device to run the model on; auto uses a GPU if there is one.",
        show_default="cpu",
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also plot the errors, or the distributions, to FILE, a .png or .svg."),
]


def command(
    folder: FolderOrSource,
    distribution: DistributionOption = False,
    kv: KVOption = False,
    text: TextOption = None,
    max_tokens: MaxTokensOption = None,
    tokenizer: TokenizerOption = None,
    no_bos: NoBosOption = False,
    device: DeviceOption = None,
    summary: options.SummaryOption = None,
    plot: PlotOption = None,
    threads: options.ThreadsOption = None,
    allow_pickle: options.PickleOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Show what a finished folder holds: tensors, bits, relative errors, sizes and totals.

    Of a GGUF file, whoever wrote it, show the tensors, their types and sizes, and the metadata.
    """
    with output.errors(quiet=quiet):
        from pqweights.checkpoint.names import MANIFEST_FILE

        of_kv = {"--text": text, "--max-tokens": max_tokens, "--tokenizer": tokenizer, "--device": device}
        of_kv |= {"--no-bos": no_bos or None}
        others = {"--distribution": distribution or None, "--summary": summary, "--threads": threads}
        _check_kv(kv, of_kv, others | {"--allow-pickle": allow_pickle or None})
        if kv:
            assert text is not None
            found = options.fetched(folder, options.access(revision, token))
            reading = _KeysAndValues(
                text=text,
                max_tokens=max_tokens,
                tokenizer=tokenizer,
                bos=not no_bos,
                device=device,
                plot=plot,
                json=json,
            )
            _show_kv(found.path, reading)
        elif distribution:
            found = options.fetched(folder, options.access(revision, token))
            asked = _Distributions(
                threads=options.thread_count(threads), allow_pickle=allow_pickle, plot=plot, json=json
            )
            _show_distribution(found.path, asked)
        else:
            result = options.found_result(folder, options.access(revision, token), only=[MANIFEST_FILE])
            if isinstance(result.where, Path) and _is_foreign_gguf(result.where):
                _show_gguf(result.where, plot, summary=summary, json=json)
                return
            shown = _show_folder(result.where, plot, summary=summary, json=json)
            if result.origin is None:
                report.warn_of_broken_files(result.where, shown.manifest)


def _check_kv(kv: bool, of_kv: Mapping[str, object], others: Mapping[str, object]) -> None:
    """Raise OptionError for options that mean nothing with --kv, or without it; an option that is None was not given.

    of_kv: the options of --kv, of which --text is needed
    others: the options of the other forms of the command
    """
    from pqweights.errors import OptionError

    wrong = next((name for name, value in (others if kv else of_kv).items() if value is not None), None)
    if wrong is not None:
        raise OptionError(f"{wrong}: means nothing {'with' if kv else 'without'} --kv; leave it out"
                          f"{'' if kv else ', or add --kv'}")  # fmt: skip
    if kv and of_kv["--text"] is None:
        raise OptionError("--kv: expected --text FILE, a text for the model to read")


@dataclass(frozen=True, kw_only=True)
class _KeysAndValues:
    """How keys and values are measured and shown.

    text: what the model reads
    max_tokens, tokenizer, bos, device: as in StatesOptions; None for its defaults
    plot: where to plot the distributions, if anywhere
    json: whether to print JSON
    """

    text: Path
    max_tokens: int | None
    tokenizer: Path | None
    bos: bool
    device: options.Device | None
    plot: Path | None
    json: bool


def _show_kv(model: Path, asked: _KeysAndValues) -> None:
    from pqweights.inference.runtimes.texts import read_text
    from pqweights.quality.measure.kv_distribution import distribution_of
    from pqweights.quality.measure.kv_states import StatesOptions, read_states

    options.check_plot(asked.plot)
    words = read_text(asked.text)
    device = (asked.device or options.Device.CPU).value
    reading = StatesOptions(max_tokens=asked.max_tokens, tokenizer=asked.tokenizer, bos=asked.bos, device=device)
    with output.progress("measuring", unit="layers") as progress:
        found = distribution_of(read_states(model, words, reading), progress=progress)
    if asked.plot is not None:
        from pqweights.quality.plots.kv import plot_kv

        plot_kv(found, asked.plot)
    if asked.json:
        output.print_json(found.to_json())
    else:
        output.show(*kv_lines(found))


def _show_folder(folder: Path | Storage, plot: Path | None, *, summary: bool | None, json: bool) -> Inspection:
    from pqweights.rewrite.results.inspect import inspect

    found = inspect(folder)
    if plot is not None:
        from pqweights.quality.plots.layers import plot_inspection

        plot_inspection(found, plot)
    if json:
        output.print_json(found.to_json())
    else:
        tensors = _tensor_lines(found.manifest, summary)
        output.show(*tensors, "", *_totals_lines(found), *_error_lines(found.manifest))
    return found


def _is_foreign_gguf(path: Path) -> bool:
    """Whether a path is GGUF without the manifest of an export: a file, or a folder that somebody else filled."""
    from pqweights.checkpoint.interrupted import is_interrupted
    from pqweights.checkpoint.names import MANIFEST_FILE
    from pqweights.gguf.file import is_gguf

    return is_gguf(path) and not (path / MANIFEST_FILE).is_file() and not is_interrupted(path)


def _show_gguf(path: Path, plot: Path | None, *, summary: bool | None, json: bool) -> None:
    from pqweights.errors import OptionError
    from pqweights.rewrite.results.inspect_gguf import inspect_gguf

    if plot is not None:
        raise OptionError("--plot: a GGUF file does not say how large the errors of its weights are; leave it out")
    found = inspect_gguf(path)
    if json:
        output.print_json(found.to_json())
    else:
        output.show(*gguf_lines(found, summary))


def _tensor_lines(manifest: Manifest, summary: bool | None) -> list[str]:
    if not is_summarized(summary, len(manifest.tensors)):
        return _tensor_table(manifest)
    note = [] if summary else [f"--no-summary lists all {len(manifest.tensors)} tensors"]
    return [*summary_table(manifest.tensors, manifest.records), *note]


def _tensor_table(manifest: Manifest) -> list[str]:
    """Return a table with a line for each tensor; a column that only mixed codecs need is not shown for one codec."""
    columns = [
        ("tensor", False),
        ("shape", False),
        ("dtype", False),
        ("action", False),
        ("codec", False),
        ("bits", True),
        ("bytes", True),
        ("relative MSE", True),
        ("coded", False),
    ]
    mixed = len({tensor.codec for tensor in manifest.tensors if tensor.codec}) > 1
    shown = [(title, numeric) for title, numeric in columns if mixed or title != "codec"]
    rows = [_row(tensor, record) for tensor, record in manifest.pairs]
    return table(shown, [[row[title] for title, _ in shown] for row in rows], drop=["action", "dtype"])


def _row(tensor: TensorPlan, record: TensorRecord) -> dict[str, str]:
    """Return the cells of a tensor by column.

    coded: the state in which its codec encoded it, without zeros, and whether its input channels were scaled
    """
    state = [
        value if isinstance(value, str) else f"{key} {value}" for key, value in (record.state or {}).items() if value
    ]
    return {
        "tensor": tensor.name,
        "shape": "x".join(map(str, tensor.shape)),
        "dtype": tensor.dtype,
        "action": action_text(tensor),
        "codec": tensor.codec or "",
        "bits": str(tensor.bits or ""),
        "bytes": str(tensor.bytes),
        "relative MSE": "" if record.relative_mse is None else f"{record.relative_mse:.6f}",
        "coded": ", ".join([*state, *(["scaled"] if tensor.is_scaled else [])]),
    }


def _totals_lines(found: Inspection) -> list[str]:
    totals = found.totals
    return [
        f"{found.manifest.kind}: {output.size(totals.output_bytes)} in {_files(found.manifest)} files, "
        f"{totals.weights} weights, {totals.coverage:.4%} of them quantized",
        f"bits, all overhead counted: {report.bits_text(totals)}",
    ]


def _files(manifest: Manifest) -> str:
    """Return the format of the files that hold the weights."""
    return "GGUF" if manifest.identity.container else "safetensors"


def _error_lines(manifest: Manifest) -> list[str]:
    if any(tensor.action == "integer" for tensor in manifest.tensors):
        return integer_form_lines(manifest.pairs, measured="original_fingerprint" in manifest.made_by)
    return quality_lines(manifest.pairs)


@dataclass(frozen=True, kw_only=True)
class _Distributions:
    """How distributions are measured and shown.

    threads: number of threads
    allow_pickle: whether to read pickled weights
    plot: where to plot them, if anywhere
    json: whether to print JSON
    """

    threads: int
    allow_pickle: bool
    plot: Path | None
    json: bool


def _show_distribution(source: Path, asked: _Distributions) -> None:
    from pqweights.quality.measure.distribution import measure_distribution

    options.check_plot(asked.plot)
    with output.progress("measuring") as progress:
        found = measure_distribution(source, threads=asked.threads, allow_pickle=asked.allow_pickle, progress=progress)
    if asked.plot is not None:
        from pqweights.quality.plots.distribution import plot_distribution

        plot_distribution(found, asked.plot)
    if asked.json:
        output.print_json(found.to_json())
    else:
        output.show(*_distribution_lines(found))


def _distribution_lines(found: Distribution) -> list[str]:
    from pqweights.quality.measure.distribution import MAX_WEIGHTS

    columns = [("tensor", False), ("role", False), ("weights", True), ("measured", True)]
    columns += [(f"{what} {when}", True) for what in ("KS", "kurtosis") for when in ("before", "after")]
    rows = [[t.name, t.role, str(t.weights), str(t.sampled_weights), *_cells(t.before, t.after)] for t in found.tensors]
    rows.append(
        ["all together", "", str(found.weights), str(found.sampled_weights), *_cells(found.before, found.after)]
    )
    return [
        *output.table(columns, rows),
        "",
        "measured: coordinates of whole blocks of 128 weights, before and after the rotation, divided by the norm of "
        "the block / sqrt(128)",
        "KS: Kolmogorov-Smirnov distance to N(0, 1), to within 0.00002; kurtosis: fourth moment around zero, 3 for "
        "N(0, 1)",
        "Gaussian weights have a KS of 0.00108 and a kurtosis of 2.954, because each block is divided by its own norm",
        f"the tensors are those that the recipe {found.recipe} quantizes; at most {MAX_WEIGHTS} weights of each are "
        "measured, evenly spread",
    ]


def _cells(before: Normality | None, after: Normality | None) -> list[str]:
    fits = (before, after)
    return ["" if f is None else f"{f.ks:.5f}" for f in fits] + ["" if f is None else f"{f.kurtosis:.3f}" for f in fits]
