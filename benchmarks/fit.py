"""Widths chosen by sensitivity, beside uniform ones and a hand-made recipe: loss at equal size, and prediction against measurement.

    python benchmarks/fit.py MODEL_DIR [MODEL_DIR...]

Per model, by the protocol of `pqweights eval` on the first `--max-tokens` tokens of MODEL_DIR/eval.txt, in float32 on the CPU, beside
the original: the change of the log-perplexity, paired by window, and the KL divergence. Sensitivities are (a) the rule of thumb,
(b) measured on random tokens, (c) measured on the text that follows the part evaluated on. The hand-made recipe is that of
arXiv:2603.29078 v1: gate and up 3 bits, down 4, attention 5, o_proj and lm_head 6 (embeddings 5, experts as the MLP).
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Document, argument_parser, machine, now, publish, table, usable_cores

from pqweights.codecs import get_codec
from pqweights.evaluate.evaluation import choose_windows
from pqweights.evaluate.protocol import Windows, compare, perplexity
from pqweights.measure.sensitivity import measure_sensitivity
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe, Rule, Target, load_recipe
from pqweights.planning.sensitivity_file import HEURISTIC, Sensitivity, alphas_for, groups_of, write_sensitivity
from pqweights.quantize import plan_quantize, quantize
from pqweights.results.inspect import inspect
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.models import Model, open_model
from pqweights.runtimes.texts import Ids, load_tokenizer, read_text, tokenize

UNIFORM = (2, 3, 4, 5, 6)
TARGETS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
# Below it the theorem does not hold.
FEWEST_BITS = 3.0
RULE, RANDOM, TEXT = "(a) rule of thumb", "(b) random tokens", "(c) text"
HAND_MADE = Recipe(
    "hand-made", "gate and up 3, down 4, attention 5, o_proj and lm_head 6", "hadamard-lloyd-max", 5,
    (
        Rule(names=("*o_proj.weight",), bits=6), Rule(roles=("lm_head",), bits=6),
        Rule(names=("*down_proj.weight",), bits=4), Rule(roles=("mlp", "expert"), bits=3),
    ),
)  # fmt: skip


class Bench:
    """One model: its masters, measured and predicted."""

    def __init__(self, model: Path, work: Path, max_tokens: int, sensitivity_tokens: int) -> None:
        self.model, self.work = model, work
        text = read_text(model / "eval.txt")
        self.ids: Ids = tokenize(model, text, max_tokens)
        self.windows: Windows = choose_windows([read_folder(model)], None, 128, False)
        self.base: Model = remembering(open_model(model))
        self.perplexity = 0.0  # of the original
        self.measured: dict[tuple[tuple[str, int | None], ...], dict[str, Any]] = {}
        rest = load_tokenizer(model).decode(tokenize(model, text, None)[max_tokens:].tolist())
        self.files: dict[str, str] = {RULE: HEURISTIC}
        self.found: dict[str, Sensitivity | None] = {RULE: None}
        self.seconds: dict[str, float] = {}
        for kind, given in ((RANDOM, None), (TEXT, rest)):
            start = time.monotonic()
            found = measure_sensitivity(model, load_recipe("q5"), text=given, tokens=sensitivity_tokens)
            self.seconds[kind] = time.monotonic() - start
            path = work / f"{len(self.files)}.json"
            write_sensitivity(path, found)
            self.files[kind], self.found[kind] = str(path), found

    def row(self, what: str, recipe: Recipe) -> dict[str, Any]:
        """Quantize and measure; what each sensitivity predicts of the widths that came out."""
        _, _, plan = plan_quantize(self.model, recipe)
        widths = tuple((tensor.name, tensor.bits) for tensor in plan.tensors)
        if widths not in self.measured:  # several sensitivities may choose the same
            out = self.work / "master"
            quantize(self.model, out, recipe, threads=usable_cores(), overwrite=True)
            scores = compare(open_model(out), self.base, self.ids, self.windows)
            assert scores.change is not None and scores.divergence is not None
            totals = inspect(out).totals
            self.measured[widths] = {
                "bits_per_weight": totals["bits_per_weight"],
                "output_bytes": totals["output_bytes"],
                "perplexity": scores.perplexity.value,
                "change": scores.change.value,
                "change_error": scores.change.standard_error,
                "kl": scores.divergence.mean.value,
            }
            assert scores.reference_losses is not None
            self.perplexity = perplexity(scores.reference_losses)
        return {
            "what": what,
            "target": None if recipe.target is None else recipe.target.bits_per_weight,
            **self.measured[widths],
            "predicted": {kind: self._predicted(recipe, kind) for kind in self.files},
        }

    def alphas(self, recipe: Recipe, kind: str) -> tuple[dict[str, float], dict[str, list[str]], dict[str, TensorPlan]]:
        """alpha and weights of each group, and the plan of the weights."""
        checkpoint, _, plan = plan_quantize(self.model, recipe)
        planned = {t.name: t for t in plan.tensors if t.action == QUANTIZE}
        groups = groups_of(checkpoint, [(t.name, t.role) for t in planned.values()])
        weights = {t.name: t.weights for t in planned.values()}
        alphas, _ = alphas_for(groups, {t.name: t.role for t in planned.values()}, weights, self.found[kind])
        return alphas, groups, planned

    def _predicted(self, recipe: Recipe, kind: str) -> float:
        alphas, groups, planned = self.alphas(recipe, kind)

        def error(names: list[str]) -> float:
            parts = [planned[n] for n in names]
            promised = [get_codec(t.codec or "").distortion(t.bits or 0) * t.weights for t in parts]
            return math.fsum(promised) / sum(t.weights for t in parts)

        return math.fsum(alphas[name] * error(names) for name, names in groups.items())

    def rows(self) -> list[dict[str, Any]]:
        """Everything that is compared."""
        q5 = load_recipe("q5")
        rows = [self.row(f"uniform {bits}", q5.with_bits(bits)) for bits in UNIFORM]
        hand_made = self.row(HAND_MADE.name, HAND_MADE)
        rows.append(hand_made)
        for target in [Target(bits_per_weight=b) for b in TARGETS] + [Target(output_bytes=hand_made["output_bytes"])]:
            for kind, file in self.files.items():
                rows.append(self.row(kind, replace(q5, target=target, sensitivity=file)))  # slow, one by one
        for row in rows:
            row["line"] = between(rows, row["bits_per_weight"])
        return rows


def remembering(model: Model) -> Model:
    """The same model, which computes each window once."""
    known: dict[tuple[bytes, int], Any] = {}

    def logits(ids: Ids, last: int) -> Any:
        key = (ids.tobytes(), last)
        if key not in known:
            known[key] = model.logits(ids, last)
        return known[key]

    return replace(model, logits=logits)


def between(rows: list[dict[str, Any]], bits_per_weight: float) -> float | None:
    """The change of the log-perplexity on the line between the neighbouring uniform widths."""
    uniform = sorted((r["bits_per_weight"], r["change"]) for r in rows if r["what"].startswith("uniform"))
    if not uniform[0][0] <= bits_per_weight <= uniform[-1][0]:
        return None
    return float(np.interp(bits_per_weight, [x for x, _ in uniform], [y for _, y in uniform]))


def correlations(models: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Of predicted and measured rises from FEWEST_BITS on, over all models; of them and of their logarithms."""
    pairs = [
        (row["predicted"][kind], row["change"])
        for model in models
        for row in model["rows"]
        if row["bits_per_weight"] > FEWEST_BITS - 0.01
    ]
    kl = [row["kl"] for model in models for row in model["rows"] if row["bits_per_weight"] > FEWEST_BITS - 0.01]
    predicted, measured = np.array([p for p, _ in pairs]), np.array([m for _, m in pairs])
    return {
        "points": len(pairs),
        "pearson": float(np.corrcoef(predicted, measured)[0, 1]),
        "pearson_kl": float(np.corrcoef(predicted, kl)[0, 1]),
        "pearson_log_kl": float(np.corrcoef(np.log(predicted), np.log(kl))[0, 1]),
        "slope_kl": float((predicted * kl).sum() / (predicted**2).sum()),
    }


def shortfall(models: list[dict[str, Any]]) -> str:
    """By how much the rule of thumb falls short of measuring, in words."""
    ratios = {}
    for model in models:
        for row in model["rows"]:
            if row["what"] == RULE and row["bits_per_weight"] > FEWEST_BITS - 0.01:
                other = next(r for r in model["rows"] if r["what"] == RANDOM and r["target"] == row["target"])
                ratios[model["name"], row["bits_per_weight"]] = row["kl"] / other["kl"]
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    (name, bits), worst = max(ratios.items(), key=lambda item: item[1])
    return (
        f"The KL divergence with (a) is {mean:.3f} times that with (b), as the geometric mean over {len(ratios)} targets from "
        f"{FEWEST_BITS:g} bits on; at worst {worst:.3f} times ({name}, {bits:.4f} bits)."
    )


def alphas_by_kind(models: list[dict[str, Any]]) -> str:
    """alpha of each kind of group, summed over layers, and what share of it the first and the last layer have."""
    rows: list[list[Any]] = []
    for model in models:
        kinds: dict[str, list[str]] = {}
        for name in model["alphas"][RULE]:
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
        for kind, names in kinds.items():
            row: list[Any] = [model["name"], f"`{kind}`"]
            for by in (RULE, RANDOM, TEXT):
                ordered = sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
                found = [model["alphas"][by][name] for name in ordered]
                total = sum(found)
                ends = f" ({found[0] / total:.0%}, {found[-1] / total:.0%})" if len(found) > 1 else ""
                row.append(f"{total:.3f}{ends}")
            rows.append(row)
    return table(["model", "groups", "rule (first, last layer)", "random tokens", "text"], rows)


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    parts = []
    for model in document["models"]:
        rows = [
            [
                row["what"], row["target"] if row["target"] is not None else None, f"{row['bits_per_weight']:.4f}", row["output_bytes"],
                f"{row['perplexity']:.4f}", f"{row['change']:+.5f} ± {row['change_error']:.5f}", None if row["line"] is None else f"{row['change'] - row['line']:+.5f}",
                f"{row['kl']:.5f}", *(f"{row['predicted'][kind]:.5f}" for kind in (RULE, RANDOM, TEXT)),
            ]
            for row in model["rows"]
        ]  # fmt: skip
        header = [
            "widths", "target", "bits/weight", "bytes", "perplexity", "log-perplexity, change", "against the line", "KL",
            "predicted (a)", "(b)", "(c)",
        ]  # fmt: skip
        about = f"{model['scored_tokens']} tokens scored, perplexity of the original {model['perplexity']:.4f}"
        parts.append(f"**{model['name']}** ({about})\n\n{table(header, rows)}")
    rows = []
    for kind in (RULE, RANDOM, TEXT):
        found = correlations(document["models"], kind)
        rows.append([
            kind, found["points"], f"{found['pearson']:.4f}", f"{found['pearson_kl']:.4f}", f"{found['pearson_log_kl']:.4f}", f"{found['slope_kl']:.3f}",
        ])  # fmt: skip
    header = ["sensitivities", "points", "r with the change", "r with KL", "r of logarithms, KL", "KL / predicted"]
    at_size = []
    for model in document["models"]:
        hand_made = next(row for row in model["rows"] if row["what"] == HAND_MADE.name)
        ours = {
            row["what"]: row for row in model["rows"] if row["target"] is None and row["what"] in (RULE, RANDOM, TEXT)
        }
        at_size.append([
            model["name"], f"{hand_made['bits_per_weight']:.4f}", f"{hand_made['change']:+.5f}",
            *(f"{ours[kind]['change']:+.5f}" for kind in (RULE, RANDOM, TEXT)), f"{hand_made['kl']:.5f}",
            *(f"{ours[kind]['kl']:.5f}" for kind in (RULE, RANDOM, TEXT)),
        ])  # fmt: skip
    size_header = ["model", "bits/weight", "hand-made", "(a)", "(b)", "(c)", "hand-made, KL", "(a)", "(b)", "(c)"]
    return {
        "fit": "\n\n".join(parts),
        "fit-correlation": f"{table(header, rows)}\n\n{shortfall(document['models'])}",
        "fit-alphas": alphas_by_kind(document["models"]),
        "fit-hand-made": table(size_header, at_size),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders, each with eval.txt")
    parser.add_argument("--max-tokens", type=int, default=20000, help="of the text that is evaluated on")
    parser.add_argument("--tokens", type=int, default=2048, help="for sensitivities")
    parser.add_argument("--folder", type=Path, help="where masters are made; by default a temporary folder")
    options = parser.parse_args()
    start = now()
    models = []
    for folder in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            bench = Bench(folder, Path(work), options.max_tokens, options.tokens)
            scored = sum(bench.windows.scored(at) for at in bench.windows.starts(len(bench.ids)))
            alphas = {kind: bench.alphas(load_recipe("q5"), kind)[0] for kind in bench.files}
            print(f"{folder.resolve().name}: sensitivities in {bench.seconds}", file=sys.stderr, flush=True)
            rows = bench.rows()
            models.append({
                "name": folder.resolve().name, "scored_tokens": scored, "window": bench.windows.size, "stride": bench.windows.stride,
                "seconds": bench.seconds, "perplexity": bench.perplexity, "alphas": alphas, "rows": rows,
            })  # fmt: skip
    settings = {"max_tokens": options.max_tokens, "tokens": options.tokens, "dtype": "float32"}
    document = {"machine": machine(start), "settings": settings, "models": models}
    publish("fit", document, sections(document), options.out)


if __name__ == "__main__":
    main()
