"""What a language model is worth after quantization: masters with and without AWQ, the ablation, and the peers.

    python benchmarks/quality.py MODEL_DIR [MODEL_DIR...] [--text TEXT] [--only masters ablation peers]

Per model, by the protocol of `pqweights eval` (docs/evaluation.md) on the first `--max-tokens` tokens of the text
(MODEL_DIR/eval.txt by default), in float32 on the CPU, each model beside the original: perplexity, KL divergence, top-1
agreement. Activation-aware scales are searched on the tokens that come after those, for each width anew.

Peers (benchmarks/peers.py) quantize every weight that a master quantizes, embeddings and lm_head too, in their own layout;
what they decode to is evaluated in float32 on the same windows. Bits per weight count everything that they store for those
weights; relative MSE is ||W - W'||^2 / ||W||^2 over them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peers
from harness import Cell, Document, argument_parser, machine, now, publish, table, usable_cores
from safetensors.numpy import save_file

from pqweights.checkpoint.source import open_local
from pqweights.evaluate.evaluation import choose_windows
from pqweights.evaluate.protocol import Scores, Windows, compare
from pqweights.evaluate.weight_errors import relative_mse
from pqweights.measure.ablation import MOST_CALIBRATION_TOKENS, ablate
from pqweights.measure.calibrate import WINDOW, calibrate
from pqweights.planning.plan import QUANTIZE
from pqweights.planning.recipe import load_recipe
from pqweights.quantize import Quantize, quantize
from pqweights.results.inspect import inspect
from pqweights.runtimes.decoders import values_of
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.models import Model, open_model
from pqweights.runtimes.texts import Ids, load_tokenizer, read_text, tokenize

WIDTHS = (8, 6, 5, 4, 3, 2)
ABLATED = (5, 4, 3)
# Of the peers that benchmarks/peers.py has, those at sizes like ours.
PEERS = (
    "llama.cpp Q8_0", "llama.cpp Q6_K", "llama.cpp Q5_K", "llama.cpp Q4_K", "llama.cpp IQ4_XS", "llama.cpp Q3_K",
    "MLX affine, 5 bits", "MLX affine, 4 bits", "bitsandbytes NF4", "bitsandbytes NF4, double", "HQQ, 4 bits",
    "torchao INT4 (tinygemm)",
)  # fmt: skip
MASTERS, ABLATION, OTHERS = "masters", "ablation", "peers"


def measures(scores: Scores) -> dict[str, Any]:
    """What a row has of its scores."""
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


def masters(
    model: Path, work: Path, ids: Ids, calibration: str, windows: Windows, base: Model
) -> Iterator[dict[str, Any]]:
    """At every width, without and with scales."""
    threads = usable_cores()
    for bits in WIDTHS:
        recipe, scales, out = load_recipe(f"q{bits}"), work / "scales.safetensors", work / "master"
        calibrate(
            model, scales, calibration, recipe, max_tokens=MOST_CALIBRATION_TOKENS, window=min(WINDOW, windows.size),
            threads=threads, overwrite=True,
        )  # fmt: skip
        for awq in (None, scales):
            quantize(model, out, recipe, awq=awq, threads=threads, overwrite=True)
            yield {
                "what": f"q{bits}" + (" AWQ" if awq else ""),
                "bits": bits,
                "bits_per_weight": inspect(out).totals["bits_per_weight"],
                "relative_mse": relative_mse(model, out).master.relative_mse,
                **measures(compare(open_model(out), base, ids, windows)),
            }


def others(
    model: Path, work: Path, ids: Ids, windows: Windows, base: Model, absent: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Every peer that is installed. absent: gets the others."""
    quantizers, _, missing = peers.load_quantizers()
    absent |= missing
    checkpoint = open_local(model)
    chosen = {t.name for t in Quantize(load_recipe("q5")).plan(checkpoint) if t.action == QUANTIZE}
    for quantizer in quantizers:
        if quantizer.name not in PEERS:
            continue
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
        folder = work / "peer"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        for name in ("config.json", *(name for name in checkpoint.companions if "/" not in name)):
            (folder / name).write_bytes((model / name).read_bytes())
        yield {
            "what": quantizer.name,
            "bits": None,
            "bits_per_weight": stored / weights,
            "relative_mse": error / energy,
            **measures(compare(open_model(folder), base, ids, windows)),
        }


def ablation(
    model: Path, text: str, calibration: str, tokens: int, windows: Windows, absent: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The rows of pqweights ablate."""
    done = ablate(
        model,
        text,
        ABLATED,
        load_recipe("q5"),
        calibration=calibration,
        max_tokens=tokens,
        window=windows.size,
        stride=windows.stride,
        threads=usable_cores(),
    )
    for line in done.absent:
        absent["INT4"] = line
    for row in done.rows:
        yield {
            "what": row.name,
            "bits": row.bits,
            "bits_per_weight": row.bits_per_weight,
            "relative_mse": row.relative_mse,
            "share": row.share,
            **measures(row.scores),
        }


def rows_of(model: Path, options: Any, settings: dict[str, Any], absent: dict[str, str]) -> Iterator[dict[str, Any]]:
    """All rows of one model."""
    path = options.text or model / "eval.txt"
    text = read_text(path)
    everything = tokenize(model, text)
    ids, rest = everything[: options.max_tokens], everything[options.max_tokens :][:MOST_CALIBRATION_TOKENS]
    calibration = str(load_tokenizer(model).decode(rest.tolist()))
    windows = choose_windows([read_folder(model)], options.window, options.stride, False)
    starts = windows.starts(len(ids))
    settings[model.name] = {
        "tokens": len(ids), "windows": len(starts), "window": windows.size, "stride": windows.stride,
        "scored": sum(windows.scored(start) for start in starts), "calibration_tokens": len(rest),
    }  # fmt: skip
    base = open_model(model)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)
        parts = {
            MASTERS: lambda: masters(model, work, ids, calibration, windows, base),
            ABLATION: lambda: ablation(model, text, calibration, options.max_tokens, windows, absent),
            OTHERS: lambda: others(model, work, ids, windows, base, absent),
        }
        alone = {"what": "original", "bits": None, "bits_per_weight": None, "relative_mse": None}
        yield {"model": model.name, "part": MASTERS} | alone | measures(compare(base, None, ids, windows))
        for part in options.only:
            for row in parts[part]():
                yield {"model": model.name, "part": part} | row


def number(value: float | None, form: str) -> Cell:
    return None if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str) -> Cell:
    return None if value is None else f"{value:{form}} +- {error or 0:{form.lstrip('+')}}"


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown: of each model its masters, its ablation and the peers."""
    result: dict[str, str] = {}
    for model, about in document["settings"].items():
        said = (
            f"{model}: {about['windows']} windows of {about['window']} tokens, stride {about['stride']}, the first "
            f"{about['window'] - about['stride']} of each masked: {about['scored']} tokens scored; AWQ on "
            f"{about['calibration_tokens']} other tokens"
        )
        for part in (MASTERS, ABLATION, OTHERS):
            rows = [row for row in document["rows"] if (row["model"], row["part"]) == (model, part)]
            if not rows:
                continue
            header = ["", "bits/weight", "relative MSE", "perplexity", "change", "KL mean", "KL 99%", "top-1"]
            cells: list[list[Cell]] = [
                [
                    row["what"],
                    number(row["bits_per_weight"], ".4f"),
                    number(row["relative_mse"], ".6f"),
                    with_error(row["perplexity"], row["perplexity_error"], ".3f"),
                    with_error(row["change"], row["change_error"], "+.3f"),
                    number(row["kl"], ".5f"),
                    number(row["kl_99"], ".4f"),
                    number(row["top1"], ".2%"),
                ]
                for row in rows
            ]
            if part == ABLATION:
                header = ["bits", *header, "share of the gain"]
                cells = [
                    [row["bits"], *line, number(row["share"], ".1%")] for row, line in zip(rows, cells, strict=True)
                ]
            result[f"quality-{part}-{model}"] = f"{said}\n\n{table(header, cells)}"
    result["quality-short"] = short(document)
    if document["absent"]:
        result["quality-absent"] = "\n".join(f"Not measured: {name} {why}" for name, why in document["absent"].items())
    return result


def short(document: Document) -> str:
    """Masters of all models in one table: perplexity and KL at each width, without and with scales."""
    found = {(row["model"], row["what"]): row for row in document["rows"] if row["part"] == MASTERS}
    models = list(document["settings"])
    header = ["", *(f"{model}: {name}" for model in models for name in ("perplexity", "KL", "AWQ: perplexity", "KL"))]
    rows: list[list[Cell]] = []
    for what in ("original", *(f"q{bits}" for bits in WIDTHS)):
        line: list[Cell] = [what]
        for model in models:
            for row in (found.get((model, what)), found.get((model, f"{what} AWQ"))):
                line += [None, None] if row is None else [f"{row['perplexity']:.3f}", number(row["kl"], ".5f")]
        rows.append(line)
    return table(header, rows)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders of language models")
    parser.add_argument("--text", type=Path, help="UTF-8 text; MODEL_DIR/eval.txt by default")
    parser.add_argument("--max-tokens", type=int, default=24_000)
    parser.add_argument("--window", type=int)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--only", nargs="+", choices=(MASTERS, ABLATION, OTHERS), default=(MASTERS, ABLATION, OTHERS))
    parser.add_argument("--folder", type=Path, help="where masters are made; by default the temporary folder")
    options = parser.parse_args()
    start, settings, absent = now(), {}, {}
    rows = []
    for model in options.models:
        for row in rows_of(model, options, settings, absent):
            rows.append(row)
            print(
                f"{row['model']}: {row['part']}: {row['bits'] or ''} {row['what']}: {row['perplexity']:.3f}", flush=True
            )
    document = {"machine": machine(start), "settings": settings, "rows": rows, "absent": absent}
    publish("quality", document, sections(document), options.out)


if __name__ == "__main__":
    main()
