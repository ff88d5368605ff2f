"""What every export of a language model is worth: bits, error of the weights, perplexity in the runtime it is meant for.

    python benchmarks/exports.py MODEL_DIR [MODEL_DIR...] [--text TEXT] [--generate 20]
    python benchmarks/exports.py --weights minilm|heavy

Per model, in a temporary folder: the masters (through their BF16 export), then every integer export, each with the least
squares and with the runtime's own min-max rule, from a master and from the original weights. Perplexity: the first windows of
the text (MODEL_DIR/eval.txt by default) as docs/evaluation.md defines them, the first one scored whole, in float32; the change
of log-perplexity against the original is paired over windows, +- its standard error. Bits per weight: over the quantized weights, with all
that is stored for them (torchao pads rows to 1024 weights), and over the whole model. Relative MSE: ||W - W'||^2 / ||W||^2
against the original, decoded from the files, over all weights that the master quantizes.

The last rows, `all 2-D weights`, are no exports of ours: INT4 with an integer zero point, min-max, groups of 128, on every
matrix, embeddings and lm_head too, by a few lines of numpy here. An integer zero point keeps 0 where it is; torchao's rule
has a float one and moves it, which costs perplexity, though not squared error, where a group has an outlier.

With --weights: no model, but the linear weights of all-MiniLM-L6-v2, or heavy-tailed ones (peers.py has both), through the
same commands; and each error over that of torchao's min-max INT4 made directly from the original.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peers
from harness import Cell, Document, argument_parser, gigabytes, machine, now, publish, table, usable_cores
from safetensors.numpy import save_file

from pqweights.errors import MissingDependencyError, SourceError
from pqweights.evaluate.protocol import Loss, Windows, change, perplexity, window_losses
from pqweights.evaluate.weight_errors import relative_mse
from pqweights.exports import EXPORTS, export
from pqweights.exports.options import ExportOptions
from pqweights.planning.recipe import load_recipe
from pqweights.quantize import quantize
from pqweights.results.inspect import inspect
from pqweights.rewrite.manifest import read_manifest
from pqweights.runtimes.decoders import export_weight
from pqweights.runtimes.models import continuation, open_model
from pqweights.runtimes.texts import Ids, tokenize

SOURCE = "original"
WINDOWS = Windows(256, 128, score_first=True, count=40)
WIDTHS = (6, 5, 4)
# what is asked of a target, and how the row calls it
TARGETS = (
    ("torchao-int4", None, "torchao-int4"),
    ("mlx-q4", None, "mlx-q4"),
    ("vllm-int4", None, "vllm-int4"),
    ("vllm-int4", "rotated", "vllm-int4 rotated"),
)
# from what, and by which rule
WAYS = (("q5", "minmax"), ("q5", "best"), ("q6", "best"), (SOURCE, "minmax"), (SOURCE, "best"))
# relative MSE over that of torchao's rule on the original, at most
GOALS = {
    ("minilm", "torchao-int4", SOURCE): 0.84,
    ("minilm", "torchao-int4", "q6"): 0.90,
    ("minilm", "torchao-int4", "q5"): 1.05,
    ("minilm", "vllm-int4 rotated", "q6"): 0.87,
    ("minilm", "vllm-int4 rotated", "q5"): 0.98,
    ("heavy", "vllm-int4 rotated", "q5"): 0.40,
}


@dataclass(frozen=True)
class Made:
    """A folder to be measured, and how long making it took. measured: where bits and errors are read, if elsewhere."""

    name: str
    weights_from: str
    rule: str | None
    folder: Path
    measured: Path
    seconds: float


def masters(model: Path, work: Path, threads: int) -> Iterator[Made]:
    """At the widths, each with its BF16 export."""
    for bits in WIDTHS:
        start = time.monotonic()
        master, plain = work / f"q{bits}", work / f"q{bits}-bf16"
        quantize(model, master, load_recipe(f"q{bits}"), threads=threads)
        seconds = time.monotonic() - start
        export(master, plain, "bf16", threads=threads)
        yield Made(f"master q{bits}", SOURCE, None, plain, master, seconds)


def integer_exports(model: Path, work: Path, threads: int, targets: list[str], absent: set[str]) -> Iterator[Made]:
    """Every target in every way; needs the masters in `work`. absent: gets the lines that install what is missing."""
    for target, basis, name in TARGETS:
        if target not in EXPORTS or target not in targets:
            continue
        for number, (weights_from, rule) in enumerate(WAYS):
            start = time.monotonic()
            out = work / f"{name.replace(' ', '-')}-{number}"
            master = work / (weights_from if weights_from != SOURCE else "q5")
            original = model if weights_from == SOURCE else None
            options = ExportOptions(basis=basis, qparams=rule)
            try:
                export(master, out, target, options, original=original, threads=threads)
            except MissingDependencyError as error:
                absent.add(str(error))
                break
            yield Made(name, weights_from, rule, out, out, time.monotonic() - start)


def every_matrix(plain: Path, weights_from: str, work: Path) -> Made:
    """A plain checkpoint whose 2-D weights have all gone through INT4 min-max in groups of 128, zero point from 0 to 15."""
    start = time.monotonic()
    folder = work / f"matrices-{weights_from}"
    folder.mkdir()
    read, tensors = export_weight(plain), {}
    for name in stored_names(plain):
        weight = read(name)
        if weight.ndim == 2:
            groups = weight.reshape(-1, 128)
            low, high = groups.min(1, keepdims=True).clip(max=0), groups.max(1, keepdims=True).clip(min=0)
            scale = np.maximum((high - low) / 15, np.float32(1e-9))
            zero = np.rint(-low / scale)
            codes = np.clip(np.rint(groups / scale) + zero, 0, 15)
            weight = ((codes - zero) * scale).reshape(weight.shape)
        tensors[name] = np.ascontiguousarray(weight)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (plain / name).exists():
            (folder / name).write_bytes((plain / name).read_bytes())
    return Made("INT4 integer zero, all 2-D weights", weights_from, "minmax", folder, folder, time.monotonic() - start)


def stored_names(folder: Path) -> list[str]:
    """Of all tensors in the safetensors files."""
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        names += [name for name in header if name != "__metadata__"]
    return names


def weight_bytes(folder: Path) -> int:
    """Of the safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def of_weights(model: Path, made: Made) -> dict[str, Any]:
    """Bits and errors, from the files; without a manifest of ours only the size."""
    bytes_ = weight_bytes(made.measured)
    if made.measured == model or not (made.measured / "pqweights.json").exists():
        return {"bytes": bytes_, "bits_per_weight": None, "bits_of_model": None, "relative_mse": None}
    totals = inspect(made.measured).totals
    try:
        errors = relative_mse(model, made.measured)
    except SourceError:  # the runtime holds weights under other names
        integers = everything = None
    else:
        integers, everything = errors.integers.relative_mse, errors.master.relative_mse
    return {
        "bytes": bytes_,
        "bits_per_weight": totals["bits_per_weight"],
        "bits_of_model": 8 * bytes_ / totals["weights"],
        "relative_mse": everything,
        "relative_mse_of_integers": integers,
    }


def measure(
    made: Made, model: Path, ids: Ids, windows: Windows, reference: list[Loss], generated: int, prompt: str
) -> dict[str, Any]:
    """One row; `reference` is filled by the first one."""
    start = time.monotonic()
    loaded = open_model(made.folder)
    losses = window_losses(loaded, ids, windows)
    seconds = time.monotonic() - start
    reference[:] = reference or losses
    mean, error = change(losses, reference)
    return {
        "model": model.name,
        "what": made.name,
        "weights_from": made.weights_from,
        "rule": made.rule,
        **of_weights(model, made),
        "perplexity": perplexity(losses),
        "change": mean,
        "standard_error": error,
        "runtime": loaded.runtime,
        "making_seconds": made.seconds,
        "evaluation_seconds": seconds,
        "sample": continuation(made.folder, loaded, prompt, generated) if generated else None,
    }


def language_model(model: Path, options: Any, absent: set[str]) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    text = (options.text or model / "eval.txt").read_text(encoding="utf-8")[: options.characters]
    ids, windows = tokenize(model, text), Windows(options.window, options.stride, True, options.windows)
    reference: list[Loss] = []
    threads = usable_cores()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)

        def everything() -> Iterator[Made]:
            yield Made("original", SOURCE, None, model, model, 0.0)
            yield from masters(model, work, threads)
            yield from integer_exports(model, work, threads, options.targets, absent)
            yield every_matrix(work / "q5-bf16", "q5", work)
            yield every_matrix(model, SOURCE, work)

        for made in everything():
            try:
                yield measure(made, model, ids, windows, reference, options.generate, text[:100])
            except MissingDependencyError as error:
                absent.add(str(error))


def write_weights(kind: str, folder: Path) -> Path:
    """A checkpoint of nothing but matrices, called like layers of a Llama without biases."""
    weights = peers.heavy_tailed() if kind == "heavy" else peers.linear_weights(peers.default_model())
    folder.mkdir()
    tensors = {f"model.layers.{number}.mlp.up_proj.weight": weight for number, weight in enumerate(weights)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    return folder


def weights_alone(kind: str, options: Any, absent: set[str]) -> list[dict[str, Any]]:
    """Errors of masters and exports of some weights, over that of torchao's rule on the original."""
    threads, rows = usable_cores(), []
    targets = [target for target in options.targets if target != "mlx-q4"]  # mlx-lm has to know the model
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)
        source = write_weights(kind, work / "source")
        for made in (*masters(source, work, threads), *integer_exports(source, work, threads, targets, absent)):
            measured = of_weights(source, made)
            rows.append(
                {
                    "weights": kind,
                    "what": made.name,
                    "weights_from": made.weights_from,
                    "rule": made.rule,
                    **measured,
                    "manifest_mse": claimed(made.measured),
                    "goal": GOALS.get((kind, made.name, made.weights_from)) if made.rule == "best" else None,
                }
            )
    (base,) = [
        row["relative_mse"]
        for row in rows
        if (row["what"], row["weights_from"], row["rule"]) == ("torchao-int4", SOURCE, "minmax")
    ]
    return [row | {"ratio": row["relative_mse"] / base} for row in rows]


def claimed(folder: Path) -> float | None:
    """The error against the original as the manifest of a master or an export has it."""
    manifest = read_manifest(folder)
    pairs = [
        (record.relative_mse if manifest.kind == "master" else record.total_mse, record.energy)
        for record in manifest.records
        if record.energy is not None
    ]
    if any(error is None for error, _ in pairs):
        return None
    # In an export the energy is that of what was read, which from a master is the original's less the master's error.
    return sum((error or 0) * energy for error, energy in pairs) / sum(energy for _, energy in pairs)


def number(value: float | None, form: str) -> Cell:
    return None if value is None else format(value, form)


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown: one for each model or set of weights."""
    result: dict[str, str] = {}
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        rows: list[list[Cell]] = [
            [
                row["what"],
                row["weights_from"],
                row["rule"],
                number(row["bits_per_weight"], ".4g"),
                number(row["bits_of_model"], ".4g"),
                number(row["relative_mse"], ".5f"),
                f"{row['perplexity']:.3f}",
                f"{row['change']:+.4f} +- {row['standard_error'] or 0:.4f}",
                gigabytes(row["bytes"]),
                row["runtime"],
                f"{row['making_seconds']:.1f}",
                f"{row['evaluation_seconds']:.1f}",
            ]
            for row in document["rows"]
            if row["model"] == model
        ]
        header = [
            "what", "weights from", "rule", "bits/weight", "bits/weight, whole model", "relative MSE", "perplexity",
            "change of its log", "size", "runtime", "s to make", "s to evaluate",
        ]  # fmt: skip
        result[f"exports-{model}"] = f"{model}\n\n{table(header, rows)}"
        samples = [row for row in document["rows"] if row["model"] == model and row["sample"] is not None]
        if samples:
            cells: list[list[Cell]] = [
                [row["what"], row["weights_from"], row["rule"], repr(row["sample"])] for row in samples
            ]
            result[f"exports-{model}-samples"] = table(["what", "weights from", "rule", "continues with"], cells)
    for kind in dict.fromkeys(row["weights"] for row in document["weights"]):
        rows = [
            [
                row["what"],
                row["weights_from"],
                row["rule"],
                f"{row['bits_per_weight']:.4g}",
                f"{row['relative_mse']:.6f}",
                number(row["manifest_mse"], ".6f"),
                f"{row['ratio']:.4f}",
                row["goal"],
            ]
            for row in document["weights"]
            if row["weights"] == kind
        ]
        header = [
            "what",
            "weights from",
            "rule",
            "bits/weight",
            "relative MSE",
            "as the manifest says",
            "ratio",
            "goal",
        ]
        result[f"exports-{kind}"] = f"{kind}\n\n{table(header, rows)}"
    if document["absent"]:
        result["exports-absent"] = "\n".join(f"Not measured: {line}" for line in document["absent"])
    return result


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL_DIR")
    parser.add_argument("--text", type=Path, help="UTF-8; by default eval.txt of the model's folder")
    parser.add_argument("--characters", type=int, default=60_000, help="of the text, from its start")
    parser.add_argument("--window", type=int, default=WINDOWS.size, help="tokens")
    parser.add_argument("--stride", type=int, default=WINDOWS.stride, help="tokens")
    parser.add_argument("--windows", type=int, default=WINDOWS.count)
    parser.add_argument("--targets", nargs="+", default=[*dict.fromkeys(target for target, _, _ in TARGETS)])
    parser.add_argument("--generate", type=int, default=0, metavar="TOKENS", help="a sample of so many from each")
    parser.add_argument("--weights", choices=("minilm", "heavy"), nargs="+", default=[], help="errors of weights alone")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; by default the temporary folder")
    options = parser.parse_args()
    if not options.models and not options.weights:
        parser.error("give a MODEL_DIR, or --weights")
    start = now()
    absent: set[str] = set()
    rows = [row for model in options.models for row in language_model(model, options, absent)]
    weights = [row for kind in options.weights for row in weights_alone(kind, options, absent)]
    settings = {"window": options.window, "stride": options.stride, "windows": options.windows}
    document = {
        "machine": machine(start),
        "settings": settings,
        "rows": rows,
        "weights": weights,
        "absent": sorted(absent),
    }
    publish("exports", document, sections(document), options.out)


if __name__ == "__main__":
    main()
