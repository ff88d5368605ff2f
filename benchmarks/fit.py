"""Bit widths chosen by sensitivity, beside uniform ones and a hand-made recipe: loss at equal size, predicted and
measured.

    python benchmarks/fit.py MODEL_DIR [MODEL_DIR...]

Each model is measured beside the original by the protocol of `pqweights eval` on the first `--max-tokens` tokens of
MODEL_DIR/eval.txt, in float32 on the CPU: the change of the log-perplexity, paired by window, and the KL divergence.
Sensitivities are (a) the rule of thumb, (b) measured on text sampled from the model itself, (c) measured on the text
that follows the part that is evaluated on. The hand-made recipe is that of arXiv:2603.29078 v1: gate and up 3 bits,
down 4, attention 5, o_proj and lm_head 6 (embeddings 5, experts as the MLP).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Cell, Document, argument_parser, machine, now, publish, table
from quality import remembering

from pqweights.calibrate.sensitivity import measured
from pqweights.common.options import DEFAULT_SAMPLE_TOKENS, SELF, EvaluationOptions, Options
from pqweights.convert.convert import convert
from pqweights.planning.choice import choose_recipe
from pqweights.planning.layout import QUANTIZE, TensorPlan, block_format_of
from pqweights.planning.recipe import Goal, Recipe, Rule, load_recipe
from pqweights.planning.sensitivity import Sensitivity, alphas_for, groups_of
from pqweights.results.inspect import inspect
from pqweights.runtime.evaluation import choose_windows
from pqweights.runtime.folders import read_folder
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.protocol import TextWindows, compare, perplexity
from pqweights.runtime.texts import Ids, load_tokenizer, read_text, tokenize
from pqweights.storage import open_store
from pqweights.targets.master import Learned, plan_quantize

UNIFORM = (2, 3, 4, 5, 6)
TARGETS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
# The codecs that fits choose from, by the names of digests.CODECS.
CODECS = tuple(f"q{bits}" for bits in range(2, 9))
# Below it the theorem does not hold.
FEWEST_BITS = 3.0
RULE, SAMPLED, TEXT = "(a) rule of thumb", "(b) without a text", "(c) text"
KINDS = (RULE, SAMPLED, TEXT)
HAND_MADE = Recipe(
    name="hand-made",
    description="gate and up 3, down 4, attention 5, o_proj and lm_head 6",
    codec="hadamard-lloyd-max",
    bits=5,
    rules=(
        Rule(name=("*o_proj.weight",), bits=6),
        Rule(role=("lm_head",), bits=6),
        Rule(name=("*down_proj.weight",), bits=4),
        Rule(role=("mlp", "expert"), bits=3),
    ),
)


def measured_sensitivity(model: Path, text: str | None, tokens: int) -> Sensitivity:
    """Sensitivities measured on the first tokens of a text, or on what is sampled from the model without one."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "text.txt")
        file.write_text(text or "", encoding="utf-8")
        asked = Options(calibrate=SELF if text is None else file, calibration_tokens=tokens)
        return measured(model, Path(folder), load_recipe("q5"), asked, progress=lambda done, total, what: None)


class Groups(NamedTuple):
    """The groups of weights that a recipe quantizes.

    alphas: the sensitivity of each group.
    names: the weights of each group.
    planned: the plan of each weight.
    """

    alphas: dict[str, float]
    names: dict[str, list[str]]
    planned: dict[str, TensorPlan]

    def error(self, group: str) -> float:
        """The relative squared error that the codec promises for a group."""
        parts = [self.planned[name] for name in self.names[group]]
        promised = [block_format_of(tensor).least_squares().distortion * tensor.weights for tensor in parts]
        return math.fsum(promised) / sum(tensor.weights for tensor in parts)

    def predicted_rise(self) -> float:
        """The predicted rise of the loss, in nats per token."""
        return math.fsum(self.alphas[name] * self.error(name) for name in self.names)


class Bench:
    """One model: its sensitivities, and its masters, measured and predicted.

    found: the sensitivities of each kind; None for the rule of thumb.
    seconds: how long measuring them took.
    perplexity: that of the original.
    """

    def __init__(self, model: Path, work: Path, *, max_tokens: int, sensitivity_tokens: int) -> None:
        self.model, self.work = model, work
        text = read_text(model / "eval.txt")
        self.ids: Ids = tokenize(model, text, max_tokens)
        self.windows: TextWindows = choose_windows([read_folder(model)], EvaluationOptions(stride=128))
        self.base: Model = remembering(open_model(model))
        self.perplexity = 0.0
        self.measured: dict[tuple[tuple[str, float | None], ...], dict[str, Any]] = {}
        rest = load_tokenizer(model).decode(tokenize(model, text, None)[max_tokens:].tolist())
        self.found: dict[str, Sensitivity | None] = {RULE: None}
        self.seconds: dict[str, float] = {}
        for kind, given in ((SAMPLED, None), (TEXT, rest)):
            start = time.monotonic()
            self.found[kind] = measured_sensitivity(model, given, sensitivity_tokens)
            self.seconds[kind] = time.monotonic() - start

    def row(self, what: str, recipe: Recipe, chosen_by: str = RULE) -> dict[str, Any]:
        """Quantize and measure, with what each kind of sensitivities predicts of the widths that came out."""
        learned = Learned(sensitivity=self.found[chosen_by])
        plan = plan_quantize(self.model, recipe, learned=learned)
        widths = tuple((tensor.name, tensor.bits) for tensor in plan.tensors)
        if widths not in self.measured:  # several sensitivities may choose the same
            self.measured[widths] = self._measure(recipe, learned)
        return {
            "what": what,
            "target": None if recipe.goal is None else recipe.goal.bits_per_weight,
            **self.measured[widths],
            "predicted": {kind: self.groups(recipe, kind, learned).predicted_rise() for kind in self.found},
        }

    def _measure(self, recipe: Recipe, learned: Learned) -> dict[str, Any]:
        out = self.work / "master"
        store, options = open_store(out), Options(overwrite=True)
        convert(plan_quantize(self.model, recipe, options, learned, out=store), store, options)
        scores = compare(open_model(out), self.base, ids=self.ids, windows=self.windows)
        assert scores.change is not None and scores.divergence is not None
        assert scores.reference_losses is not None
        self.perplexity = perplexity(scores.reference_losses)
        totals = inspect(out).totals
        return {
            "bits_per_weight": totals.bits_per_weight,
            "output_bytes": totals.output_bytes,
            "perplexity": scores.perplexity.value,
            "change": scores.change.value,
            "change_error": scores.change.standard_error,
            "kl": scores.divergence.mean.value,
        }

    def groups(self, recipe: Recipe, kind: str, learned: Learned) -> Groups:
        """The groups of a recipe's plan, with their sensitivities of one kind."""
        made = plan_quantize(self.model, recipe, learned=learned)
        planned = {tensor.name: tensor for tensor in made.tensors if tensor.action == QUANTIZE}
        roles = {name: tensor.role for name, tensor in planned.items()}
        names = groups_of(made.checkpoint, list(roles.items()))
        alphas, _ = alphas_for(names, roles=roles, known=self.found[kind])
        return Groups(alphas, names, planned)

    def rows(self) -> list[dict[str, Any]]:
        """Everything that is compared."""
        q5 = load_recipe("q5")
        rows = [self.row(f"uniform {bits}", choose_recipe(q5, Options(bits=bits))) for bits in UNIFORM]
        hand_made = self.row(HAND_MADE.name, HAND_MADE)
        rows.append(hand_made)
        targets = [Goal(bits_per_weight=bits) for bits in TARGETS]
        targets.append(Goal(output_bytes=hand_made["output_bytes"]))
        for target in targets:
            rows += [self.row(kind, replace(q5, goal=target), kind) for kind in self.found]
        for row in rows:
            row["line"] = between(rows, row["bits_per_weight"])
        return rows


def between(rows: list[dict[str, Any]], bits_per_weight: float) -> float | None:
    """The change of the log-perplexity on the straight line between the neighbouring uniform widths."""
    uniform = sorted((row["bits_per_weight"], row["change"]) for row in rows if row["what"].startswith("uniform"))
    if not uniform[0][0] <= bits_per_weight <= uniform[-1][0]:
        return None
    return float(np.interp(bits_per_weight, [bits for bits, _ in uniform], [change for _, change in uniform]))


def correlations(models: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """How predicted and measured rises go together, over all models, from FEWEST_BITS on."""
    rows = [row for model in models for row in model["rows"] if row["bits_per_weight"] > FEWEST_BITS - 0.01]
    predicted = np.array([row["predicted"][kind] for row in rows])
    change, kl = np.array([row["change"] for row in rows]), np.array([row["kl"] for row in rows])
    return {
        "points": len(rows),
        "pearson": float(np.corrcoef(predicted, change)[0, 1]),
        "pearson_kl": float(np.corrcoef(predicted, kl)[0, 1]),
        "pearson_log_kl": float(np.corrcoef(np.log(predicted), np.log(kl))[0, 1]),
        "slope_kl": float((predicted * kl).sum() / (predicted**2).sum()),
    }


def shortfall(models: list[dict[str, Any]]) -> str:
    """How much worse the rule of thumb is than measuring, in words."""
    ratios = {}
    for model in models:
        for row in model["rows"]:
            if row["what"] == RULE and row["bits_per_weight"] > FEWEST_BITS - 0.01:
                other = next(r for r in model["rows"] if r["what"] == SAMPLED and r["target"] == row["target"])
                ratios[model["name"], row["bits_per_weight"]] = row["kl"] / other["kl"]
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    (name, bits), worst = max(ratios.items(), key=lambda item: item[1])
    return (
        f"The KL divergence with (a) is {mean:.3f} times that with (b), as the geometric mean over "
        f"{len(ratios)} targets from {FEWEST_BITS:g} bits on; at worst it is {worst:.3f} times as large "
        f"({name}, {bits:.4f} bits)."
    )


def alphas_by_kind(models: list[dict[str, Any]]) -> str:
    """alpha of each kind of group, summed over layers, with the shares of the first and the last layer."""
    rows: list[list[Cell]] = []
    for model in models:
        kinds: dict[str, list[str]] = {}
        for name in model["alphas"][RULE]:
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
        for kind, names in kinds.items():
            ordered = sorted(names, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
            shares = [alpha_cell([model["alphas"][by][name] for name in ordered]) for by in KINDS]
            rows.append([model["name"], f"`{kind}`", *shares])
    return table(["model", "groups", "rule (first, last layer)", "its own text", "text"], rows)


def alpha_cell(alphas: list[float]) -> str:
    """The sum over layers, and the shares of the first and the last one."""
    total = sum(alphas)
    ends = f" ({alphas[0] / total:.0%}, {alphas[-1] / total:.0%})" if len(alphas) > 1 else ""
    return f"{total:.3f}{ends}"


WIDTHS_HEADER = (
    "widths",
    "target",
    "bits/weight",
    "bytes",
    "perplexity",
    "log-perplexity, change",
    "against the line",
    "KL",
    "predicted (a)",
    "(b)",
    "(c)",
)
CORRELATION_HEADER = (
    "sensitivities",
    "points",
    "r with the change",
    "r with KL",
    "r of logarithms, KL",
    "KL / predicted",
)
AT_SIZE_HEADER = ("model", "bits/weight", "hand-made", "(a)", "(b)", "(c)", "hand-made, KL", "(a)", "(b)", "(c)")


def widths_row(row: dict[str, Any]) -> list[Cell]:
    """A line of the table of a model."""
    return [
        row["what"],
        row["target"],
        f"{row['bits_per_weight']:.4f}",
        row["output_bytes"],
        f"{row['perplexity']:.4f}",
        f"{row['change']:+.5f} ± {row['change_error']:.5f}",
        None if row["line"] is None else f"{row['change'] - row['line']:+.5f}",
        f"{row['kl']:.5f}",
        *(f"{row['predicted'][kind]:.5f}" for kind in KINDS),
    ]


def of_model(model: dict[str, Any]) -> str:
    """The table of a model."""
    about = f"{model['scored_tokens']} tokens scored, perplexity of the original {model['perplexity']:.4f}"
    return f"**{model['name']}** ({about})\n\n{table(WIDTHS_HEADER, [widths_row(row) for row in model['rows']])}"


def correlation_row(models: list[dict[str, Any]], kind: str) -> list[Cell]:
    """A line of the table of correlations."""
    found = correlations(models, kind)
    names = ("pearson", "pearson_kl", "pearson_log_kl")
    return [kind, int(found["points"]), *(f"{found[name]:.4f}" for name in names), f"{found['slope_kl']:.3f}"]


def at_size(model: dict[str, Any]) -> list[Cell]:
    """A line of the comparison with the hand-made recipe, at its size."""
    hand_made = next(row for row in model["rows"] if row["what"] == HAND_MADE.name)
    chosen = {row["what"]: row for row in model["rows"] if row["target"] is None and row["what"] in KINDS}
    rows = [hand_made, *(chosen[kind] for kind in KINDS)]
    changes, divergences = [f"{row['change']:+.5f}" for row in rows], [f"{row['kl']:.5f}" for row in rows]
    return [model["name"], f"{hand_made['bits_per_weight']:.4f}", *changes, *divergences]


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    models = document["models"]
    correlated = table(CORRELATION_HEADER, [correlation_row(models, kind) for kind in KINDS])
    return {
        "fit": "\n\n".join(of_model(model) for model in models),
        "fit-correlation": f"{correlated}\n\n{shortfall(models)}",
        "fit-alphas": alphas_by_kind(models),
        "fit-hand-made": table(AT_SIZE_HEADER, [at_size(model) for model in models]),
    }


def measured_model(folder: Path, options: Any) -> dict[str, Any]:
    """The entry of one model in the document."""
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        bench = Bench(folder, Path(work), max_tokens=options.max_tokens, sensitivity_tokens=options.tokens)
        print(f"{folder.resolve().name}: sensitivities in {bench.seconds}", file=sys.stderr, flush=True)
        alphas = {kind: bench.groups(load_recipe("q5"), kind, Learned()).alphas for kind in bench.found}
        rows = bench.rows()
    windows = bench.windows
    return {
        "name": folder.resolve().name,
        "scored_tokens": sum(windows.scored(start) for start in windows.starts(len(bench.ids))),
        "window": windows.size,
        "stride": windows.stride,
        "seconds": bench.seconds,
        "perplexity": bench.perplexity,
        "alphas": alphas,
        "rows": rows,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the benchmarks of fits are told."""
    parser.add_argument("models", type=Path, nargs="+", help="folders, each with eval.txt")
    parser.add_argument("--max-tokens", type=int, default=20000, help="how many tokens of the text to evaluate on")
    parser.add_argument("--tokens", type=int, default=DEFAULT_SAMPLE_TOKENS, help="tokens to measure sensitivities on")
    parser.add_argument("--folder", type=Path, help="where masters are made; by default a temporary folder")


def run(
    name: str,
    doc: str,
    measure: Callable[[Path, Any], dict[str, Any]],
    render: Callable[[Document], dict[str, str]],
    codecs: Iterable[str],
) -> None:
    """Measure the models that the options name, and publish the document and its tables."""
    parser = argument_parser(doc)
    add_arguments(parser)
    options = parser.parse_args()
    start = now()
    models = [measure(folder, options) for folder in options.models]
    settings = {"max_tokens": options.max_tokens, "tokens": options.tokens, "dtype": "float32"}
    document = {"machine": machine(start), "settings": settings, "models": models}
    publish(name, document, render(document), options, codecs)


if __name__ == "__main__":
    run("fit", __doc__, measured_model, sections, CODECS)
