"""What every export of a language model is worth: bits, error of the weights, and perplexity in its own runtime.

    python benchmarks/exports.py MODEL_DIR [MODEL_DIR...] [--text TEXT]
    python benchmarks/exports.py --weights minilm|heavy

For each model, in a temporary folder: the masters (through their BF16 export), then every integer export, with
least-squares scales and with the runtime's own min-max rule, from a master and from the original weights. Perplexity is
measured on the first windows of the text (MODEL_DIR/eval.txt by default) as docs/evaluation.md defines them, the first
one scored whole, in float32. The change of the log-perplexity against the original is paired over windows and shown
with its standard error. Bits per weight count all that is stored for the quantized weights; a second column counts the
whole model. Relative MSE is ||W - W'||^2 / ||W||^2 against the original, decoded
from the files, over all weights that the master quantizes. torchao's exports are in the plain packing: in tiles, layers
as narrow as those of small models stay in BF16.

The last rows, `all 2-D weights`, are not exports: INT4 with an integer zero point, min-max, groups of 128, on every
matrix, embeddings and lm_head included, in a few lines of numpy here. An integer zero point keeps 0 where it is.
torchao's rule has a floating-point zero point and moves 0, which costs perplexity, though not squared error, where a
group has an outlier.

With --weights no model is run: the linear weights of all-MiniLM-L6-v2 or heavy-tailed weights (both from peers.py) go
through the same commands, and each error is given relative to torchao's min-max INT4 made directly from the original.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers
from harness import Cell, Document, argument_parser, gigabytes, machine, now, publish, table
from safetensors.numpy import save_file

import pqweights
from pqweights.convert.manifest import read_manifest
from pqweights.errors import MissingDependencyError, SourceError
from pqweights.results.inspect import inspect
from pqweights.runtime.models import open_model
from pqweights.runtime.protocol import Loss, TextWindows, change, compare, perplexity
from pqweights.runtime.texts import Ids, tokenize

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from export_decoders import export_weight
from weight_errors import relative_mse

SOURCE = "original"
WINDOWS = TextWindows(size=256, stride=128, score_first=True, count=40)
WIDTHS = (6, 5, 4)
TARGETS = ("torchao", "mlx", "vllm")
# what the weights are taken from, and the rule for scales and offsets
WAYS: tuple[tuple[str, Literal["best", "minmax"]], ...] = (
    ("q5", "minmax"),
    ("q5", "best"),
    ("q6", "best"),
    (SOURCE, "minmax"),
    (SOURCE, "best"),
)
# (weights, target, source of the weights) -> the most that relative MSE may be, over that of torchao's rule on the
# original
GOALS = {
    ("minilm", "torchao", SOURCE): 0.84,
    ("minilm", "torchao", "q6"): 0.90,
    ("minilm", "torchao", "q5"): 1.05,
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A folder that is to be measured.

    name, weights_from, rule: the first cells of its row.
    folder: what is evaluated.
    measured: the folder that bits and errors are read from, which for a master is not its BF16 export.
    seconds: how long it took to make.
    """

    name: str
    weights_from: str
    rule: Literal["best", "minmax"] | None
    folder: Path
    measured: Path
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A source and where its masters and exports are made.

    absent: receives the messages that say which package is missing and how to install it.
    """

    source: Path
    work: Path
    targets: tuple[str, ...]
    absent: set[str]

    def masters(self) -> Iterator[Made]:
        """A master of each width, with its BF16 export."""
        for bits in WIDTHS:
            start = time.monotonic()
            master, plain = self.work / f"q{bits}", self.work / f"q{bits}-bf16"
            pqweights.quantize(self.source, master, f"q{bits}")
            seconds = time.monotonic() - start
            pqweights.export(master, plain, "bf16")
            yield Made(
                name=f"master q{bits}", weights_from=SOURCE, rule=None, folder=plain, measured=master, seconds=seconds
            )

    def integer_exports(self) -> Iterator[Made]:
        """Every target in every way. The masters must have been made."""
        for target in TARGETS:
            if target not in self.targets:
                continue
            for number, (weights_from, rule) in enumerate(WAYS):
                start = time.monotonic()
                out = self.work / f"{target}-{number}"
                source = self.source if weights_from == SOURCE else self.work / weights_from
                try:
                    packing = "plain" if target == "torchao" else None  # tiles leave narrow layers in BF16
                    pqweights.export(source, out, target, qparams=rule, packing=packing)
                except MissingDependencyError as error:
                    self.absent.add(str(error))
                    break
                seconds = time.monotonic() - start
                yield Made(name=target, weights_from=weights_from, rule=rule, folder=out, measured=out, seconds=seconds)

    def every_matrix(self, plain: Path, weights_from: str) -> Made:
        """A plain checkpoint whose 2-D weights have all been rounded to INT4."""
        start = time.monotonic()
        folder = self.work / f"matrices-{weights_from}"
        folder.mkdir()
        read, tensors = export_weight(plain), {}
        for name in stored_names(plain):
            weight = read(name)
            tensors[name] = np.ascontiguousarray(rounded(weight) if weight.ndim == 2 else weight)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (plain / name).exists():
                (folder / name).write_bytes((plain / name).read_bytes())
        return Made(
            name="INT4 integer zero, all 2-D weights",
            weights_from=weights_from,
            rule="minmax",
            folder=folder,
            measured=folder,
            seconds=time.monotonic() - start,
        )


def rounded(weight: np.ndarray) -> np.ndarray:
    """A matrix after INT4 min-max in groups of 128 with an integer zero point from 0 to 15."""
    groups = weight.reshape(-1, 128)
    low, high = groups.min(1, keepdims=True).clip(max=0), groups.max(1, keepdims=True).clip(min=0)
    scale = np.maximum((high - low) / 15, np.float32(1e-9))
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(groups / scale) + zero, 0, 15)
    return ((codes - zero) * scale).reshape(weight.shape)


def stored_names(folder: Path) -> list[str]:
    """The names of all tensors in the safetensors files of a folder."""
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        names += [name for name in header if name != "__metadata__"]
    return names


def weight_bytes(folder: Path) -> int:
    """The size of the safetensors files of a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def of_weights(source: Path, made: Made) -> dict[str, Any]:
    """Bits and errors, read from the files; only the size if pqweights did not write the folder."""
    size = weight_bytes(made.measured)
    if made.measured == source or not (made.measured / "pqweights.json").exists():
        return {"bytes": size, "bits_per_weight": None, "bits_of_model": None, "relative_mse": None}
    totals = inspect(made.measured).totals
    try:
        errors = relative_mse(source, made.measured)
    except SourceError:  # those that the runtime stores under other names
        integers = everything = None
    else:
        integers, everything = errors.integers.relative_mse, errors.master.relative_mse
    return {
        "bytes": size,
        "bits_per_weight": totals.bits_per_weight,
        "bits_of_model": 8 * size / totals.weights,
        "relative_mse": everything,
        "relative_mse_of_integers": integers,
    }


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every row of a model is evaluated on.

    reference: the losses of the first row, which is the original; filled by `measure`.
    """

    model: Path
    ids: Ids
    windows: TextWindows
    reference: list[Loss] = field(default_factory=list)

    def measure(self, made: Made) -> dict[str, Any]:
        """The row of one folder."""
        start = time.monotonic()
        loaded = open_model(made.folder)
        losses = compare(loaded, None, ids=self.ids, windows=self.windows).losses
        seconds = time.monotonic() - start
        self.reference[:] = self.reference or losses
        mean, error = change(losses, self.reference)
        return {
            "model": self.model.name,
            "what": made.name,
            "weights_from": made.weights_from,
            "rule": made.rule,
            **of_weights(self.model, made),
            "perplexity": perplexity(losses),
            "change": mean,
            "standard_error": error,
            "runtime": loaded.runtime,
            "making_seconds": made.seconds,
            "evaluation_seconds": seconds,
        }


def everything_of(bench: Bench) -> Iterator[Made]:
    """The original, its masters, the exports, and INT4 of all matrices."""
    model = bench.source
    yield Made(name="original", weights_from=SOURCE, rule=None, folder=model, measured=model, seconds=0.0)
    yield from bench.masters()
    yield from bench.integer_exports()
    yield bench.every_matrix(bench.work / "q5-bf16", "q5")
    yield bench.every_matrix(model, SOURCE)


def language_model(model: Path, options: Any, absent: set[str]) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    text = (options.text or model / "eval.txt").read_text(encoding="utf-8")[: options.characters]
    evaluation = Evaluation(
        model=model,
        ids=tokenize(model, text),
        windows=TextWindows(size=options.window, stride=options.stride, score_first=True, count=options.windows),
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        bench = Bench(source=model, work=Path(work), targets=tuple(options.targets), absent=absent)
        for made in everything_of(bench):
            try:
                yield evaluation.measure(made)
            except MissingDependencyError as error:
                absent.add(str(error))


def write_weights(kind: str, folder: Path) -> Path:
    """A checkpoint of nothing but matrices, named like layers of a Llama without biases."""
    weights = peers.heavy_tailed() if kind == "heavy" else peers.linear_weights(peers.default_model())
    folder.mkdir()
    tensors = {f"model.layers.{number}.mlp.up_proj.weight": weight for number, weight in enumerate(weights)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    return folder


def weights_alone(kind: str, options: Any, absent: set[str]) -> list[dict[str, Any]]:
    """The errors of masters and exports of some weights, relative to that of torchao's rule on the original."""
    targets = tuple(target for target in options.targets if target != "mlx")  # mlx-lm has to know the model
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source = write_weights(kind, Path(work) / "source")
        bench = Bench(source=source, work=Path(work), targets=targets, absent=absent)
        rows = [weights_record(kind, source, made) for made in (*bench.masters(), *bench.integer_exports())]
    base = next((row["relative_mse"] for row in rows if is_base(row)), None)
    return [row | {"ratio": None if base is None else row["relative_mse"] / base} for row in rows]


def weights_record(kind: str, source: Path, made: Made) -> dict[str, Any]:
    """The row of one master or export of some weights."""
    return {
        "weights": kind,
        "what": made.name,
        "weights_from": made.weights_from,
        "rule": made.rule,
        **of_weights(source, made),
        "manifest_mse": claimed(made.measured),
        "goal": GOALS.get((kind, made.name, made.weights_from)) if made.rule == "best" else None,
    }


def is_base(row: dict[str, Any]) -> bool:
    """Whether it is the row that the others are compared with."""
    return (row["what"], row["weights_from"], row["rule"]) == ("torchao", SOURCE, "minmax")


def claimed(folder: Path) -> float | None:
    """The error against the original that the manifest of a master or an export states."""
    manifest = read_manifest(folder)
    pairs = [
        (record.relative_mse if manifest.kind == "master" else record.total_mse, record.energy)
        for record in manifest.records
        if record.energy is not None
    ]
    if any(error is None for error, _ in pairs):
        return None
    # The energy of an export is that of what was read: from a master, the original's less the master's error.
    return sum((error or 0) * energy for error, energy in pairs) / sum(energy for _, energy in pairs)


def number(value: float | None, form: str) -> Cell:
    """A number in a format, or None."""
    return None if value is None else format(value, form)


MODEL_HEADER = (
    "what",
    "weights from",
    "rule",
    "bits/weight",
    "bits/weight, whole model",
    "relative MSE",
    "perplexity",
    "change of its log",
    "size",
    "runtime",
    "s to make",
    "s to evaluate",
)
# What is measured, by the names of digests.CODECS.
CODECS = ("q4", "q5", "q6", "torchao int4", "mlx q4", "vllm w4a16")
WEIGHTS_HEADER = (
    "what",
    "weights from",
    "rule",
    "bits/weight",
    "relative MSE",
    "as the manifest says",
    "ratio",
    "goal",
)


def model_row(row: Document) -> list[Cell]:
    """A line of the table of a model."""
    return [
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


def weights_row(row: Document) -> list[Cell]:
    """A line of the table of weights without a model."""
    return [
        row["what"],
        row["weights_from"],
        row["rule"],
        f"{row['bits_per_weight']:.4g}",
        f"{row['relative_mse']:.6f}",
        number(row["manifest_mse"], ".6f"),
        number(row["ratio"], ".4f"),
        row["goal"],
    ]


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown: one for each model or set of weights."""
    result: dict[str, str] = {}
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["model"] == model]
        result[f"exports-{model}"] = f"{model}\n\n{table(MODEL_HEADER, [model_row(row) for row in rows])}"
    for kind in dict.fromkeys(row["weights"] for row in document["weights"]):
        cells = [weights_row(row) for row in document["weights"] if row["weights"] == kind]
        result[f"exports-{kind}"] = f"{kind}\n\n{table(WEIGHTS_HEADER, cells)}"
    if document["absent"]:
        result["exports-absent"] = "\n".join(f"Not measured: {line}" for line in document["absent"])
    return result


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL_DIR")
    parser.add_argument("--text", type=Path, help="UTF-8 text; by default eval.txt in the folder of the model")
    parser.add_argument("--characters", type=int, default=60_000, help="how much of the text to read, from its start")
    parser.add_argument("--window", type=int, default=WINDOWS.size, help="tokens per window")
    parser.add_argument("--stride", type=int, default=WINDOWS.stride, help="tokens between windows")
    parser.add_argument("--windows", type=int, default=WINDOWS.count)
    parser.add_argument("--targets", nargs="+", default=[*TARGETS])
    parser.add_argument(
        "--weights", choices=("minilm", "heavy"), nargs="+", default=[], help="measure errors of these weights"
    )
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; by default a temporary folder")
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
    publish("exports", document, sections(document), options, CODECS)


if __name__ == "__main__":
    main()
