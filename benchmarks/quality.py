"""What a language model is worth after quantization: masters with and without data, the ablation, and the peers.

    python benchmarks/quality.py MODEL_DIR [MODEL_DIR...] [--text TEXT] [--bits 5 4]
        [--only masters trellis variants calibrated ablation peers]

Each model is measured beside the original by the protocol of `pqweights eval` (docs/evaluation.md), on the first
`--max-tokens` tokens of the text (MODEL_DIR/eval.txt by default), in float32 on the CPU: perplexity, KL divergence,
top-1 agreement. Activation-aware scales are searched on the tokens that follow, anew for each bit width; masters are
calibrated on the same tokens, or on a sample of the model itself.

The ablation has the rows of the table in arXiv:2603.29078 v1 (absmax, rotation alone, levels alone, both:
benchmarks/ablation.py), the least-squares norm, enlarged weights where a width has them, activation-aware scales, and
INT4 made from the master or straight from the original. *Share* is the share of the gain of rotation and levels over
absmax that a row gains, if that gain is above twice its standard error.

Peers (benchmarks/peers.py) quantize every weight that a master quantizes, embeddings and lm_head included, in their own
layout; what they decode to is evaluated in float32 on the same windows. Bits per weight count everything that they
store for those weights; relative MSE is ||W - W'||^2 / ||W||^2 over them. With --only, a document in --out keeps its
rows of the other parts, and of the ablation those of widths other than --bits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import peers
from ablation import ABSMAX, BOTH, STEPS, quantizers
from harness import Cell, Document, argument_parser, machine, measured_with, now, publish, table
from safetensors.numpy import save_file

import pqweights
from pqweights.calibrate.collecting import HELD_BACK_OF
from pqweights.calibrate.sample import WINDOW
from pqweights.calibrate.scale_search import FEWEST_WINDOWS
from pqweights.checkpoint.source import open_local
from pqweights.common.options import SELF, EvaluationOptions, Options
from pqweights.common.threads import usable_cores
from pqweights.errors import ExportError, MissingDependencyError
from pqweights.formats.lloyd_max import LloydMax
from pqweights.formats.trellis import Trellis
from pqweights.planning import fit
from pqweights.planning.choice import choose_recipe
from pqweights.planning.decisions import rate_planner
from pqweights.planning.layout import QUANTIZE
from pqweights.planning.recipe import Goal, Recipe, load_recipe
from pqweights.results.inspect import inspect
from pqweights.runtime.evaluation import choose_windows
from pqweights.runtime.folders import read_folder
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.protocol import Scores, TextWindows, compare, perplexity_change
from pqweights.runtime.texts import Ids, load_tokenizer, read_text, tokenize

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from export_decoders import values_of
from weight_errors import relative_mse

WIDTHS = (8, 6, 5, 4, 3, 2)
ABLATED = (5, 4)
# Of the peers in benchmarks/peers.py, those of sizes like ours.
PEERS = (
    "llama.cpp Q8_0",
    "llama.cpp Q6_K",
    "llama.cpp Q5_K",
    "llama.cpp Q4_K",
    "llama.cpp IQ4_XS",
    "llama.cpp Q3_K",
    "MLX affine, 5 bits",
    "MLX affine, 4 bits",
    "bitsandbytes NF4",
    "bitsandbytes NF4, double",
    "HQQ, 4 bits",
    "torchao INT4 (tinygemm)",
)
# Rates of trellis masters: those of the scalar masters, of the peers, and with more effort.
TRELLIS_RATES = (8.0, 6.5625, 6.125, 5.5, 5.125, 4.5, 4.25, 4.125, 3.4375, 3.125, 2.125)
LONGER = ((64, 5.125), (64, 4.125), (64, 3.125), (256, 4.125))
WITH_AWQ = (5.125, 4.125, 3.125)
# Rates at which the trellis codec is measured with the same step for all blocks of a superblock, too.
VARIED_RATES = (4.125, 3.125, 2.125)
ONE_STEP, BY_NORM = "one step", "steps by norm"
LEAST_SQUARES, ENLARGED = "least squares", "enlarged"
FUSED, APART = "fused weights alike", "taken apart"
# Calibrated masters, each beside the trellis master of its rate: what they are calibrated on, and the states.
CALIBRATED_RATES = (2.125, 3.125, 4.125)
ON_TEXT = "text"
STATES = 8
CALIBRATIONS = ((SELF, STATES), (ON_TEXT, STATES), (SELF, 64), (SELF, 256))
CALIBRATION_TOKENS = 16384  # of AWQ
LEAST_SQUARES_NORM = "+ least-squares norm"
# How INT4 in groups of 128 is rounded: --qparams, and its name in a row.
RULES: dict[Literal["minmax", "best"], str] = {"minmax": "torchao's min-max", "best": "least squares"}
MASTERS, TRELLIS, VARIANTS, CALIBRATED = "masters", "trellis", "variants", "calibrated"
ABLATION, OTHERS = "ablation", "peers"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model, and what its rows are measured on.

    model: the folder of the original.
    base: the original, opened.
    ids: the tokens that are evaluated on, the first of the text.
    rest: the tokens that follow them, for calibration.
    windows: how the tokens are cut.
    widths: the bit widths of the ablation.
    work: where folders are made.
    absent: receives why a peer or a part could not be measured.
    """

    model: Path
    base: Model
    ids: Ids
    rest: Ids
    windows: TextWindows
    widths: tuple[int, ...]
    work: Path
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def calibration(self) -> str:
        """The text for calibration."""
        return str(load_tokenizer(self.model).decode(self.rest.tolist()))

    def scores(self, folder: Path | None = None) -> Scores:
        """The scores of a folder beside the original; without one, of the original."""
        model, reference = (self.base, None) if folder is None else (open_model(folder), self.base)
        return compare(model, reference, ids=self.ids, windows=self.windows)

    def measures(self, folder: Path | None = None) -> dict[str, Any]:
        """The measured fields of the row of a folder; without one, of the original."""
        return measures(self.scores(folder))

    def settings(self) -> dict[str, Any]:
        """The text and the windows, for the document."""
        starts = self.windows.starts(len(self.ids))
        return {
            "tokens": len(self.ids),
            "windows": len(starts),
            "window": self.windows.size,
            "stride": self.windows.stride,
            "scored": sum(self.windows.scored(start) for start in starts),
            "calibration_tokens": len(self.rest),
            "parameters": parameters(self.model),
        }


def parameters(model: Path) -> dict[str, int]:
    """How many weights a model has: in all, those that masters quantize, and without embeddings and the head."""
    plan = rate_planner(open_local(model), load_recipe("t4")).planned({})
    quantized = [tensor for tensor in plan if tensor.action == QUANTIZE]
    linear = [tensor for tensor in quantized if tensor.role not in ("embedding", "lm_head")]
    parts = {"all": plan, "quantized": quantized, "linear": linear}
    return {part: sum(tensor.weights for tensor in tensors) for part, tensors in parts.items()}


def remembering(model: Model) -> Model:
    """The model, which computes the logits of a window once: all rows are compared with the same original.

    They take 4 bytes for each scored token and entry of the vocabulary: 100 MB for the models that this is meant for.
    """
    known: dict[tuple[bytes, int], Any] = {}

    def logits(ids: Ids, last: int) -> Any:
        key = ids.tobytes(), last
        if key not in known:
            known[key] = model.logits(ids, last)
        return known[key]

    return replace(model, logits=logits)


def measures(scores: Scores) -> dict[str, Any]:
    """The measured fields of a row."""
    change, found = scores.perplexity_change, scores.divergence
    return {
        "perplexity": scores.perplexity.value,
        "perplexity_error": scores.perplexity.standard_error,
        "change": None if change is None else change.value,
        "change_error": None if change is None else change.standard_error,
        "kl": None if found is None else found.mean.value,
        "kl_error": None if found is None else found.mean.standard_error,
        "kl_99": None if found is None else found.percentile_99,
        "top1": None if found is None else found.top1.value,
    }


def masters(bench: Bench) -> Iterator[dict[str, Any]]:
    """The rows of the masters, at every bit width, without and with scales."""
    for bits in WIDTHS:
        recipe = load_recipe(f"q{bits}")
        for awq in (False, True):
            yield master(bench, recipe, f"q{bits}" + (" AWQ" if awq else ""), awq=awq)


def trellis_masters(bench: Bench) -> Iterator[dict[str, Any]]:
    """The rows of trellis masters."""
    base = replace(load_recipe("t4"), name="trellis")
    for rate in TRELLIS_RATES:
        recipe = choose_recipe(base, Options(bits=rate))
        yield master(bench, recipe, f"trellis {rate:g}")
        for states, at in LONGER:
            if at == rate:
                yield master(bench, replace(recipe, effort=states), f"trellis {rate:g}, {states} states")
        if rate in WITH_AWQ:
            yield master(bench, recipe, f"trellis {rate:g} AWQ", awq=True)


def variants(bench: Bench) -> Iterator[dict[str, Any]]:
    """The rows of masters in ways of before beside those of now: steps, sizes of weights, groups of fits."""
    base = replace(load_recipe("t4"), name="trellis")
    for rate in VARIED_RATES:
        for power, what in ((0, ONE_STEP), (0.5, BY_NORM)):
            with mock.patch.multiple(Trellis, first_step_power=power, most_gained=0):
                yield master(bench, choose_recipe(base, Options(bits=rate)), f"trellis {rate:g}, {what}")
    yield master(bench, choose_recipe(base, Options(bits=2.125)), f"trellis 2.125, {ENLARGED}")
    for power, what in ((0, ONE_STEP), (0.5, BY_NORM)):
        recipe = choose_recipe(base, Options(bits=3.125))
        with mock.patch.object(Trellis, "first_step_power", power):
            yield master(bench, recipe, f"trellis 3.125 AWQ, {what}", awq=True)
    for rate in VARIED_RATES:
        recipe = replace(base, goal=Goal(bits_per_weight=rate))
        with mock.patch.object(fit, "taken_apart", lambda groups, alphas, _: (groups, alphas)):
            yield master(bench, recipe, f"fit to {rate:g}, {FUSED}")
        yield master(bench, recipe, f"fit to {rate:g}, {APART}")
    for bits in LloydMax.gained:
        for gained, what in (((), LEAST_SQUARES), ((bits,), ENLARGED)):
            with mock.patch.object(LloydMax, "gained", gained):
                yield master(bench, load_recipe(f"q{bits}"), f"q{bits}, {what}")


def calibrated_masters(bench: Bench) -> Iterator[dict[str, Any]]:
    """The rows of calibrated masters."""
    text, out = bench.work / "calibration.txt", bench.work / "calibrated"
    text.write_text(bench.calibration, encoding="utf-8")
    for bits in CALIBRATED_RATES:
        for sample, states in CALIBRATIONS:
            recipe = choose_recipe(replace(load_recipe("t4"), effort=states), Options(bits=bits))
            on = text if sample == ON_TEXT else sample
            pqweights.quantize(bench.model, out, recipe, calibrate=on, threads=usable_cores(), overwrite=True)
            what = f"calibrated {bits:g}, {sample}, {states} states"
            yield {"sample": sample, "states": states} | sized(bench, out, what, bits) | bench.measures(out)


def master(bench: Bench, recipe: Recipe, what: str, *, awq: bool = False) -> dict[str, Any]:
    """The row of a master whose codes are not calibrated. awq: whether input channels are scaled"""
    out = quantized(bench, recipe, awq=awq)
    return sized(bench, out, what, recipe.bits) | bench.measures(out)


def quantized(bench: Bench, recipe: Recipe, *, awq: bool = False) -> Path:
    """Make a master whose codes are not calibrated."""
    out, text = bench.work / "master", bench.work / "calibration.txt"
    text.write_text(bench.calibration, encoding="utf-8")
    scaled: dict[str, Any] = {"awq": text, "calibration_tokens": CALIBRATION_TOKENS} if awq else {}
    pqweights.quantize(bench.model, out, recipe, overwrite=True, **scaled)
    return out


def sized(bench: Bench, out: Path, what: str, bits: float | None) -> dict[str, Any]:
    """The fields of the row of a master or an export that no text is needed for."""
    return {
        "what": what,
        "bits": bits,
        "bits_per_weight": inspect(out).totals.bits_per_weight,
        "relative_mse": relative_mse(bench.model, out).master.relative_mse,
    }


def others(bench: Bench) -> Iterator[dict[str, Any]]:
    """The rows of every peer that is installed."""
    quantizers, _, missing = peers.load_quantizers()
    bench.absent.update(missing)
    for quantizer in quantizers:
        if quantizer.name in PEERS:
            folder, sizes = write_peer(bench, quantizer)
            yield {"what": quantizer.name, "bits": None, **sizes, **bench.measures(folder)}


def write_peer(bench: Bench, quantizer: peers.Quantizer) -> tuple[Path, dict[str, float]]:
    """Write the weights as a peer decodes them; returns the folder, with bits per weight and relative MSE."""
    checkpoint, folder = open_local(bench.model), bench.work / "peer"
    plan = rate_planner(checkpoint, load_recipe("q5")).planned({})
    chosen = {tensor.name for tensor in plan if tensor.action == QUANTIZE}
    stored = weights = 0
    error = energy = 0.0
    tensors = {}
    for tensor in checkpoint.tensors:
        values = values_of(tensor)
        if tensor.name in chosen:
            packed = quantizer.encode(quantizer.prepare(values.copy()))
            decoded = np.asarray(quantizer.decode(packed), dtype=np.float32).reshape(values.shape)
            stored, weights = stored + quantizer.stored_bits(packed), weights + values.size
            error += float(np.square(values.astype(np.float64) - decoded).sum())
            energy += float(np.square(values, dtype=np.float64).sum())
            values = decoded
        tensors[tensor.name] = np.ascontiguousarray(values)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", *(name for name in checkpoint.companions if "/" not in name)):
        (folder / name).write_bytes((bench.model / name).read_bytes())
    return folder, {"bits_per_weight": stored / weights, "relative_mse": error / energy}


def ablation(bench: Bench) -> Iterator[dict[str, Any]]:
    """The rows of what each step of the method is worth; without AWQ if too few tokens are left to calibrate on."""
    yield {"what": "original", "bits": None, "bits_per_weight": None, "relative_mse": None} | bench.measures()
    for bits in bench.widths:
        rows = [(row, bench.scores(folder)) for row, folder in ablated(bench, bits)]
        losses = {row["what"]: scores.losses for row, scores in rows}
        gain = perplexity_change(losses[ABSMAX], losses[BOTH])
        for row, scores in rows:
            share = None
            if row["what"] != ABSMAX and gain.standard_error and gain.value > 2 * gain.standard_error:
                share = perplexity_change(losses[ABSMAX], scores.losses).value / gain.value
            yield row | {"share": share} | measures(scores)
    for row, folder in integers(bench, bench.model, "INT4 from the original", None):
        yield row | bench.measures(folder)


def ablated(bench: Bench, bits: int) -> Iterator[tuple[dict[str, Any], Path]]:
    """What is compared at a bit width, each in a folder that exists until the next is asked for."""
    for quantizer in quantizers(bits):
        folder, sizes = write_peer(bench, quantizer)
        yield {"what": quantizer.name, "bits": bits} | sizes, folder
    recipe = load_recipe(f"q{bits}")
    with mock.patch.object(LloydMax, "gained", ()):
        out = quantized(bench, recipe)
    yield sized(bench, out, LEAST_SQUARES_NORM, bits), out
    if bits in LloydMax.gained:
        out = quantized(bench, recipe)
        yield sized(bench, out, f"+ {ENLARGED}", bits), out
    yield from integers(bench, out, "+ INT4 on top", bits)
    needed = HELD_BACK_OF * FEWEST_WINDOWS * WINDOW
    if len(bench.rest) < needed:
        bench.absent["AWQ"] = f"needs {needed} tokens after those of --max-tokens, found {len(bench.rest)}"
        return
    out = quantized(bench, recipe, awq=True)
    yield sized(bench, out, "+ AWQ", bits), out


def integers(bench: Bench, source: Path, what: str, bits: int | None) -> Iterator[tuple[dict[str, Any], Path]]:
    """torchao's INT4 of a folder in groups of 128, by each rule."""
    out = bench.work / "int4"
    for rule, name in RULES.items():
        try:
            pqweights.export(source, out, "torchao", packing="plain", group_size=128, qparams=rule, overwrite=True)
        except (ExportError, MissingDependencyError) as error:
            bench.absent["INT4"] = str(error)
            return
        yield sized(bench, out, f"{what}, {name}", bits), out


PARTS = {
    MASTERS: masters,
    TRELLIS: trellis_masters,
    VARIANTS: variants,
    CALIBRATED: calibrated_masters,
    ABLATION: ablation,
    OTHERS: others,
}


def open_bench(model: Path, options: Any, work: Path) -> Bench:
    """A model with its text, cut into what is evaluated on and what is calibrated on."""
    ids = tokenize(model, read_text(options.text or model / "eval.txt"))
    return Bench(
        model=model,
        base=remembering(open_model(model)),
        ids=ids[: options.max_tokens],
        rest=ids[options.max_tokens :][:CALIBRATION_TOKENS],
        windows=choose_windows([read_folder(model)], EvaluationOptions(window=options.window, stride=options.stride)),
        widths=tuple(options.bits),
        work=work,
    )


def rows_of(bench: Bench, parts: list[str]) -> Iterator[dict[str, Any]]:
    """All rows of one model."""
    name = bench.model.name
    alone = {"what": "original", "bits": None, "bits_per_weight": None, "relative_mse": None}
    yield {"model": name, "part": MASTERS} | alone | bench.measures() | measured_with([])
    for part in parts:
        for row in PARTS[part](bench):
            whole = {"model": name, "part": part} | row
            yield whole | measured_with(codecs_of(whole))


def codecs_of(row: Document) -> list[str]:
    """What a row is about, by the names of digests.CODECS; nothing of originals and peers."""
    if row["part"] == OTHERS or row["what"] == "original" or row["what"] in STEPS:
        return []
    if row["part"] == CALIBRATED:
        return ["columns"]
    if row["what"].startswith(("trellis", "fit")):
        return ["trellis"]
    integer = ["torchao int4"] if "INT4" in row["what"] else []
    return ([f"q{row['bits']}"] if row["bits"] else []) + integer


def carried_over(options: Any, models: Iterable[str]) -> Document:
    """What stays of an earlier document: rows that this run does not measure, and its settings."""
    path = None if options.out is None else options.out / "quality.json"
    if path is None or not path.is_file():
        return {"settings": {}, "rows": [], "absent": {}}
    earlier: Document = json.loads(path.read_text())

    def stays(row: Document) -> bool:
        other_width = row["part"] == ABLATION and row["bits"] not in (None, *options.bits)
        return other_width or row["part"] not in options.only or row["model"] not in models

    return {**earlier, "rows": [row for row in earlier["rows"] if stays(row)]}


def number(value: float | None, form: str) -> Cell:
    """A number in a format, or None."""
    return None if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str) -> Cell:
    """A number with its standard error, or None."""
    return None if value is None else f"{value:{form}} +- {error or 0:{form.lstrip('+')}}"


COLUMNS = ("bits/weight", "relative MSE", "KL", "perplexity change", "top-1")


def cells(row: Document | None) -> list[Cell]:
    """A row below COLUMNS."""
    if row is None:
        return [None] * len(COLUMNS)
    return [
        number(row["bits_per_weight"], ".3f"),
        number(row["relative_mse"], ".6f"),
        with_error(row["kl"], row["kl_error"], ".5f"),
        with_error(row["change"], row["change_error"], "+.3f"),
        number(row["top1"], ".1%"),
    ]


def lines_of(document: Document, part: str) -> list[tuple[str, float | None, str]]:
    """The part, the bits and the name of the rows of a part's table, in order."""
    rows = [row for row in document["rows"] if row["part"] == part and row["what"] != "original"]
    if part == ABLATION:
        rows.sort(key=lambda row: -(row["bits"] or 0))
    keys: list[tuple[str, float | None, str]] = list(dict.fromkeys((part, row["bits"], row["what"]) for row in rows))
    if part != CALIBRATED:
        return keys
    result: list[tuple[str, float | None, str]] = []
    for bits in CALIBRATED_RATES:  # each rate after the trellis masters of that rate
        result += [(TRELLIS, bits, name) for name in (f"trellis {bits:g}", f"trellis {bits:g}, 64 states")]
        result += [key for key in keys if key[1] == bits]
    return result


def part_table(document: Document, part: str) -> str:
    """One table of all models."""
    found = {(row["model"], row["part"], row["bits"], row["what"]): row for row in document["rows"]}
    columns = (*COLUMNS, "share of the gain") if part == ABLATION else COLUMNS
    lines: list[list[Cell]] = []
    for key in lines_of(document, part):
        rows = [found.get((model, *key)) for model in document["settings"]]
        if any(rows):
            line: list[Cell] = [f"{key[1]} bits, {key[2]}" if part == ABLATION and key[1] else key[2]]
            for row in rows:
                line += cells(row)
                if part == ABLATION:
                    line.append(number(row and row.get("share"), ".1%"))
            lines.append(line)
    return table(["", *(f"{model}: {column}" for model in document["settings"] for column in columns)], lines)


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown: a table of all models for each part."""
    result = {f"quality-{part}": part_table(document, part) for part in PARTS if part != VARIANTS}
    trellis = [*(f"trellis {rate:g}" for rate in VARIED_RATES), "trellis 3.125 AWQ"]
    result["quality-steps"] = variants_table(document, [(what, (ONE_STEP, BY_NORM)) for what in trellis])
    pairs = [
        ("q3", (LEAST_SQUARES, ENLARGED)),
        ("q2", (LEAST_SQUARES, ENLARGED)),
        ("trellis 2.125", (BY_NORM, ENLARGED)),
    ]
    result["quality-gains"] = variants_table(document, pairs)
    fits = [(f"fit to {rate:g}", (FUSED, APART)) for rate in VARIED_RATES]
    result["quality-apart"] = variants_table(document, fits)
    if document["absent"]:
        result["quality-absent"] = "\n".join(f"Not measured: {name} {why}" for name, why in document["absent"].items())
    return result


def variants_table(document: Document, pairs: Sequence[tuple[str, tuple[str, str]]]) -> str:
    """One table of the masters of all models in two ways.

    pairs: what is compared, and the ways, the present one last
    """
    found = {(row["model"], row["what"]): row for row in document["rows"] if row["part"] == VARIANTS}
    first, second = pairs[0][1]
    fields = [f"{field}, {way}" for field in ("relative MSE", "KL") for way in (first, second)]
    lines: list[list[Cell]] = []
    for model in document["settings"]:
        for what, ways in pairs:
            rows = [found[model, f"{what}, {way}"] for way in ways if (model, f"{what}, {way}") in found]
            if len(rows) == len(ways):
                errors = [f"{row['relative_mse']:.6f}" for row in rows]
                divergences = [with_error(row["kl"], row["kl_error"], ".5f") for row in rows]
                bits = number(rows[0]["bits_per_weight"], ".4f")
                lines.append([f"{model}, {what}", bits, *errors, *divergences, f"{rows[1]['kl'] / rows[0]['kl']:.3f}"])
    return table(["", "bits/weight", *fields, "KL, ratio"], lines)


def is_plain(row: Document) -> bool:
    """Whether a trellis master has the usual number of states, and no scales."""
    return "states" not in row["what"] and "AWQ" not in row["what"]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders of language models")
    parser.add_argument("--text", type=Path, help="UTF-8 text; MODEL_DIR/eval.txt by default")
    parser.add_argument("--max-tokens", type=int, default=24_000, help="how many tokens of the text to evaluate on")
    parser.add_argument("--window", type=int, help="tokens per window")
    parser.add_argument("--stride", type=int, help="tokens between windows")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--bits", type=int, nargs="+", default=ABLATED, help="the bit widths of the ablation")
    parser.add_argument("--folder", type=Path, help="where masters are made; by default a temporary folder")
    options = parser.parse_args()
    start = now()
    settings: dict[str, Any] = {}
    absent: dict[str, str] = {}
    rows = []
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            bench = open_bench(model, options, Path(work))
            settings[model.name] = bench.settings()
            for row in rows_of(bench, options.only):
                rows.append(row)
                about = f"{row['model']}: {row['part']}: {row['bits'] or ''} {row['what']}"
                print(f"{about}: {row['perplexity']:.3f}", flush=True)
            absent |= bench.absent
    kept = carried_over(options, settings)
    document = {
        "machine": machine(start),
        "settings": kept["settings"] | settings,
        "rows": kept["rows"] + [row for row in rows if row["part"] in options.only or not kept["rows"]],
        "absent": kept["absent"] | absent,
    }
    publish("quality", document, sections(document), options, None)


if __name__ == "__main__":
    main()
