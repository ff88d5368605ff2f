"""Draw the plots and fill the tables of the pages from the JSON documents of the benchmarks.

    python benchmarks/report.py --out docs/benchmarks docs/benchmarks.md

On a page, the text between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced by the section of that name, so
that no figure is typed by hand. The sections are those of each benchmark, and `BENCHMARK-machine`. A benchmark without
a document leaves its sections and its plots as they are. Plots need matplotlib; without it, only the tables are
written.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attention
import calibration
import columns
import commands
import exports
import fit
import formats
import gguf_types
import hub
import kv_cache
import kv_speed
import loading
import lossless
import numpy as np
import peers
import phases
import planning
import quality
import rates
import ray_kills
import ray_scaling
import real
import running
import scaling
import strips
import throughput
from harness import RATES, Cell, Document, machine_line, stale_lines, table

from pqweights.common.options import SELF

Panels = np.ndarray  # [panels] of matplotlib axes

SECTIONS: dict[str, Callable[[Document], dict[str, str]]] = {
    "throughput": throughput.sections,
    "columns": columns.sections,
    "strips": strips.sections,
    "commands": commands.sections,
    "cold": commands.sections,
    "commands-t4": commands.sections,
    "peers": peers.sections,
    "scaling": scaling.sections,
    "planning": planning.sections,
    "phases": phases.sections,
    "exports": exports.sections,
    "gguf_types": gguf_types.sections,
    "loading": loading.sections,
    "lossless": lossless.sections,
    "running": running.sections,
    "attention": attention.sections,
    "kv_cache": kv_cache.sections,
    "kv_speed_4096": kv_speed.sections,
    "quality": quality.sections,
    "calibration": calibration.sections,
    "formats": formats.sections,
    "hub": hub.sections,
    "fit": fit.sections,
    "rates": rates.sections,
    "real": real.sections,
    "ray_scaling": ray_scaling.sections,
    "ray_kills": ray_kills.sections,
}


def draw_throughput(document: Document, panels: Panels) -> None:
    """Encode and decode rates by bit width and thread count; memcpy as a line."""
    rows, widths, threads = document["rows"], document["settings"]["bits"], document["settings"]["threads"]
    found = {(row["operation"], row["threads"]): row["weights_per_second"] / 1e9 for row in rows}
    for panel, operation in zip(panels, ("encode", "decode"), strict=True):
        for place, count in enumerate(threads):
            label = f"{count} thread{'s' * (count > 1)}"
            heights = [found[f"{operation} {bits}", count] for bits in widths]
            at = np.arange(len(widths)) + (place - (len(threads) - 1) / 2) * 0.8 / len(threads)
            panel.bar(at, heights, 0.8 / len(threads), label=label, color=f"C{place}")
            panel.axhline(found["memcpy", count], linestyle="--", color=f"C{place}", label=f"memcpy, {label}")
        panel.set(title=operation, xlabel="bits", ylabel="G weights/s")
        panel.set_xticks(range(len(widths)), widths)
        panel.legend(fontsize="small")


def draw_wall_time(document: Document, panels: Panels) -> None:
    """The time of every command as a multiple of that of cp."""
    checkpoints = list(dict.fromkeys(row["checkpoint"] for row in document["rows"]))
    measured = {row["command"] for row in document["rows"]} - {"cp"}
    names = [name for name in commands.COMMANDS if name in measured]
    for place, name in enumerate(names):
        heights = [row["of_cp"] for row in document["rows"] if row["command"] == name]
        width = 0.8 / len(names)
        panels[0].bar(np.arange(len(checkpoints)) + (place - len(names) / 2) * width, heights, width, label=name)
    panels[0].axhline(1, color="black", linestyle="--", label="cp -r")
    panels[0].set(title="wall time, page cache warm, through sync", xlabel="checkpoint", ylabel="of cp -r")
    panels[0].set_xticks(range(len(checkpoints)), checkpoints)
    panels[0].legend()


def draw_memory(document: Document, panels: Panels) -> None:
    """Peak memory against the size of the checkpoint."""
    for name in commands.COMMANDS:
        rows = [row for row in document["rows"] if row["command"] == name and row["peak_bytes"]]
        if rows:
            sizes, peaks = [row["bytes"] / 1e9 for row in rows], [row["peak_bytes"] / 1e6 for row in rows]
            panels[0].plot(sizes, peaks, marker="o", label=name)
    if document["idle_peak_bytes"]:
        idle = document["idle_peak_bytes"] / 1e6
        panels[0].axhline(idle, color="black", linestyle="--", label="idle: import pqweights, torch, numpy")
    panels[0].set(title="peak resident memory", xlabel="GB of checkpoint", ylabel="MB")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()


def draw_peers(document: Document, panels: Panels) -> None:
    """Error against size with the rate-distortion bound, then the distance to the bound, which tells more."""
    views = (("real", "relative_mse"), ("real", "above_bound"), ("heavy_tailed", "above_bound"))
    titles = {"real": document["settings"]["model"], "heavy_tailed": "heavy-tailed columns"}
    labels = {"relative_mse": "relative MSE", "above_bound": "bits above the bound"}
    ours = [row for row in document["rows"] if row["quantizer"].startswith("pqweights")]
    libraries: dict[str, list[Document]] = {}
    for row in document["rows"]:
        if row not in ours:
            libraries.setdefault(row["quantizer"].replace(",", " ").split()[0], []).append(row)
    for panel, (weights, field) in zip(panels, views, strict=True):
        for number, rows in enumerate(libraries.values()):
            for row, marker in zip(rows, itertools.cycle("osD^v<>pPX*"), strict=False):
                point = row[weights]["bits_per_weight"], row[weights][field]
                panel.plot(*point, marker, linestyle="", color=f"C{number}", label=row["quantizer"])
        scalar = [row for row in ours if row["quantizer"].startswith("pqweights, ")]
        lines = {"pqweights, 2 to 8 bits": scalar, **peers.trellis_rows(ours)}
        for (label, rows), color in zip(lines.items(), ("black", "C3", "C1", "gold"), strict=True):
            line = [(row[weights]["bits_per_weight"], row[weights][field]) for row in rows]
            panel.plot(*zip(*line, strict=True), marker="o", color=color, label=label)
        bits = np.array([2.0, 8.5])
        bound = 4.0**-bits if field == "relative_mse" else 0 * bits
        panel.plot(bits, bound, linestyle="--", color="gray", label="rate-distortion bound (Gaussian)")
        panel.set(title=titles[weights], xlabel="bits per weight, everything counted", ylabel=labels[field])
    panels[0].set_yscale("log")
    panels[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def draw_scaling(document: Document, panels: Panels) -> None:
    """Seconds against size with the fitted line, and speed-up against threads."""
    sizes = [row["bytes"] / 1e9 for row in document["sizes"]]
    for number, (field, label) in enumerate({"seconds": "through sync", "exit_seconds": "until it returned"}.items()):
        fit = document["lines"][field]
        panels[0].plot(sizes, [row[field] for row in document["sizes"]], "o", color=f"C{number}", label=label)
        ends = np.array([0.0, max(sizes)])
        panels[0].plot(ends, fit["seconds"] + fit["seconds_per_gigabyte"] * ends, "--", color=f"C{number}")
    panels[0].set(title="quantize", xlabel="GB of checkpoint", ylabel="seconds")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    for name in ("quantize", "export"):
        rows = [row for row in document["threads"] if row["command"] == name]
        counts = [row["threads"] for row in rows]
        panels[1].plot(counts, [rows[0]["exit_seconds"] / row["exit_seconds"] for row in rows], marker="o", label=name)
    panels[1].plot(counts, counts, "--", color="gray", label="ideal")
    panels[1].set(title=f"a checkpoint of {document['settings']['threads_size']}", xlabel="threads", ylabel="speed-up")
    panels[1].legend()


def draw_quality(document: Document, panels: Panels) -> None:
    """KL divergence against size: masters without and with scales, and peers."""
    for panel, model in zip(panels, document["settings"], strict=False):
        rows = [row for row in document["rows"] if row["model"] == model and row["kl"] is not None]
        masters = [row for row in rows if row["part"] == quality.MASTERS]
        for label, scaled, color in (("pqweights", False, "black"), ("pqweights, AWQ", True, "C3")):
            line = [(row["bits_per_weight"], row["kl"]) for row in masters if row["what"].endswith(" AWQ") == scaled]
            panel.plot(*zip(*line, strict=True), marker="o", color=color, label=label)
        trellis = [row for row in rows if row["part"] == quality.TRELLIS and quality.is_plain(row)]
        line = sorted((row["bits_per_weight"], row["kl"]) for row in trellis)
        panel.plot(*zip(*line, strict=True), marker="o", color="C1", label="pqweights, trellis, 8 states")
        others = [row for row in rows if row["part"] == quality.OTHERS]
        libraries = list(dict.fromkeys(row["what"].split()[0] for row in others))
        for row, marker in zip(others, itertools.cycle("sD^v<>pPX*"), strict=False):
            color = f"C{libraries.index(row['what'].split()[0]) % 10}"
            panel.plot(row["bits_per_weight"], row["kl"], marker, linestyle="", color=color, label=row["what"])
        panel.set(
            title=model, xlabel="bits per weight, everything counted", ylabel="KL(original || model), nats per token"
        )
        panel.set_yscale("log")
    panels[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def draw_fit(document: Document, panels: Panels) -> None:
    """Measured KL over predicted rise: a panel for each kind of sensitivities, a colour for each model."""
    for panel, kind in zip(panels, (fit.RULE, fit.SAMPLED, fit.TEXT), strict=True):
        for place, model in enumerate(document["models"]):
            rows = [row for row in model["rows"] if row["bits_per_weight"] >= fit.FEWEST_BITS]
            predicted, measured = [row["predicted"][kind] for row in rows], [row["kl"] for row in rows]
            panel.scatter(predicted, measured, s=14, color=f"C{place}", label=model["name"])
        limits = (0.001, 1.0)
        panel.plot(limits, limits, color="grey", linewidth=0.8)
        panel.set(
            xscale="log", yscale="log", xlabel="predicted rise, nats per token", ylabel="KL divergence", title=kind
        )
        panel.legend(fontsize="small")


# The benchmarks whose rows are compared by size, and what is shown of them.
BY_SIZE = ("quality", "formats", "gguf_types")
SHORT_TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M")
MEASURES = {"kl": ".5f", "perplexity": ".3f", "top1": ".1%"}


class Sized(NamedTuple):
    """A quantized model by its size: what it is called, bits per parameter, and its row."""

    name: str
    bits: float
    row: Document

    @staticmethod
    def of(row: Document, name: str, counts: dict[str, int], part: str) -> Sized:
        """Everything outside the part that is quantized takes 16 bits."""
        bits = row.get("bits_per_weight") or row["bits"]
        return Sized(name, (bits * counts[part] + 16 * (counts["all"] - counts[part])) / counts["all"], row)


def by_size(of_quality: Document, of_formats: Document, of_types: Document, model: str) -> dict[str, list[Sized]]:
    """Our masters, and types of llama.cpp and ik_llama.cpp, by who made them."""
    counts = of_quality["settings"][model]["parameters"]
    trellis = [row for row in rows_with(of_quality["rows"], model, part=quality.TRELLIS) if quality.is_plain(row)]
    own = rows_with(of_quality["rows"], model, part=quality.CALIBRATED, sample=SELF, states=quality.STATES)
    result = {
        "pqweights, trellis": [Sized.of(row, f"{row['bits']:g}", counts, "quantized") for row in trellis],
        "pqweights, calibrated": [Sized.of(row, f"{row['bits']:g}", counts, "quantized") for row in own],
    }
    for who in (gguf_types.THEIRS, gguf_types.THEIRS_WITH_DATA):
        rows = [row for row in rows_with(of_types["models"], model, what=who) if row["kl"] is not None]
        result[who] = [Sized(row["type"], 8 * row["bytes"] / counts["all"], row) for row in rows]
    rows = rows_with(of_formats["rows"], model, who=formats.IK)
    result[formats.IK] = [Sized.of(row, row["format"], counts, "linear") for row in rows]
    return result


def draw_calibration(of_quality: Document, of_formats: Document, of_types: Document, panels: Panels) -> None:
    """KL divergence against the size of the whole model, by who made it."""
    style_of = {"pqweights, trellis": "C1o-", "pqweights, calibrated": "C3o-", formats.IK: "C2D--"}
    style_of |= {gguf_types.THEIRS: "C0s--", gguf_types.THEIRS_WITH_DATA: "C0^--"}
    legend: dict[str, Any] = {}
    for panel, model in zip(panels, of_quality["settings"], strict=False):
        for label, models in by_size(of_quality, of_formats, of_types, model).items():
            points = sorted((each.bits, each.row["kl"]) for each in models)
            (legend[label],) = panel.plot(*zip(*points, strict=True), style_of[label], markersize=5)
        panel.set(title=model, xlabel="bits per parameter of the model", ylabel="KL(original || model), nats per token")
        panel.set(yscale="log", xlim=(1.5, 9))
    panels[-1].legend(legend.values(), legend.keys(), fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def table_by_size(of_quality: Document, of_formats: Document, of_types: Document) -> dict[str, str]:
    """A table for each model, the smallest first."""
    sections = {}
    for model in of_quality["settings"]:
        groups = by_size(of_quality, of_formats, of_types, model)
        listed = sorted((each.bits, who, each.name, each.row) for who, models in groups.items() for each in models)
        lines: list[list[Cell]] = [
            [f"{bits:.2f}", who, name, *(quality.number(row.get(of), form) for of, form in MEASURES.items())]
            for bits, who, name, row in listed
        ]
        header = ["bits per parameter", "", "", "KL", "perplexity", "top-1"]
        if "calibration-short" not in sections:
            sections["calibration-short"] = short_by_size(listed)
        sections[f"calibration-by-size-{model}"] = table(header, lines)
    return sections


def short_by_size(listed: list[tuple[float, str, str, Document]]) -> str:
    """Calibrated masters between the types of llama.cpp, in a line. listed: as in table_by_size"""
    shown = {"pqweights, calibrated": ("2.125", "3.125", "4.125"), gguf_types.THEIRS_WITH_DATA: SHORT_TYPES}
    chosen = [(bits, who, name, row["kl"]) for bits, who, name, row in listed if name in shown.get(who, ())]
    names = [f"{who.partition(',')[0]} {name}" for _, who, name, _ in chosen]
    sizes, divergences = [f"{bits:.2f}" for bits, *_ in chosen], [f"{kl:.4f}" for *_, kl in chosen]
    return table(["", *names], [["bits per parameter", *sizes], ["KL divergence", *divergences]])


def trellis_claim(of_peers: Document, of_quality: Document) -> str:
    """What the README says of the trellis at 4.125 bits: its squared error, and what it gives up of that for KL."""
    names = ("pqweights trellis, 4.125 bits", peers.one_step_name(4.125), "llama.cpp Q4_K")
    own, one_step, beside = (next(r["real"] for r in of_peers["rows"] if r["quantizer"] == name) for name in names)
    kl = {(row["model"], row["what"]): row["kl"] for row in of_quality["rows"] if row["part"] == quality.VARIANTS}
    ways = [f"trellis 4.125, {way}" for way in (quality.BY_NORM, quality.ONE_STEP)]
    lower = [f"{1 - kl[model, ways[0]] / kl[model, ways[1]]:.0%}" for model in of_quality["settings"]]
    share = own["relative_mse"] / beside["relative_mse"]
    change = [f"{each['relative_mse']:.6f}" for each in (one_step, own)]
    bound = [f"{each['above_bound']:.3f}" for each in (one_step, own)]
    text = (
        f"Without data, the trellis has {share:.2f} of the squared error of llama.cpp's Q4_K at 0.375 bits less. It "
        "minimizes divergence rather than squared error: steps that follow the norms of blocks raise its relative MSE "
        f"from {change[0]} to {change[1]} ({bound[0]} and {bound[1]} bits above the bound) and take "
        f"{' and '.join(lower)} off "
        "the KL divergence of two models ([why](docs/trellis.md))."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def rows_with(rows: list[Document], model: str, **fields: Any) -> list[Document]:
    """The rows of a model that have these fields."""
    return [row for row in rows if row["model"] == model and all(row.get(key) == fields[key] for key in fields)]


# How makers of results are drawn, and what was read: by tool and format, of masters the codec.
REAL_MAKERS = {
    "pqweights trellis": "C3o",
    "pqweights trellis, fitted": "C1o",
    "pqweights Lloyd-Max": "C4o",
    "pqweights GGUF": "C0s",
    "llama.cpp GGUF": "C7s",
    "ik_llama.cpp GGUF": "C5s",
    "pqweights MLX": "C2^",
    "mlx-lm MLX": "C8^",
}
LINES = {None: "-", real.TEXT: "--", real.SELF: ":"}


def draw_real(document: Document, panels: Panels) -> None:
    """The divergence of real models against the size of their files, by tool and format."""
    legend: dict[str, Any] = {}
    for panel, (model, about) in zip(panels, document["settings"].items(), strict=False):
        series: dict[tuple[str, str | None], list[Document]] = {}
        for row in document["rows"]:
            if row["model"] == model and row["name"] not in real.GRIDS.get(about["grid"], ()):
                kind = row["format"]
                if kind == real.MASTER:
                    fitted = ", fitted" if "fitted" in row["name"] else ""
                    kind = f"trellis{fitted}" if row["name"].startswith("trellis") else "Lloyd-Max"
                series.setdefault((f"{row['tool']} {kind}", row["data"]), []).append(row)
        for maker, style in REAL_MAKERS.items():
            for data, line in LINES.items():
                points = sorted((row["bits_per_parameter"], row["kl"]) for row in series.get((maker, data), ()))
                if points:
                    label = f"{maker}, {data}" if data else maker
                    (legend[label],) = panel.plot(*zip(*points, strict=True), style + line, markersize=5)
        panel.set(title=f"{model}, decoded from {about['grid']}", xlabel="bits per parameter", yscale="log")
    panels[0].set_ylabel("KL from the original, nats per token")
    panels[-1].legend(legend.values(), legend.keys(), fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


# file name -> the benchmarks that it shows, the number of panels, the function that draws them
PLOTS: dict[str, tuple[tuple[str, ...], int, Callable[..., None]]] = {
    "throughput": (("throughput",), 2, draw_throughput),
    "wall-time": (("commands",), 1, draw_wall_time),
    "memory": (("commands",), 1, draw_memory),
    "peers": (("peers",), 3, draw_peers),
    "scaling": (("scaling",), 2, draw_scaling),
    "quality": (("quality",), 2, draw_quality),
    "calibration": (BY_SIZE, 2, draw_calibration),
    "fit": (("fit",), 3, draw_fit),
    "real": (("real",), 3, draw_real),
}


def draw(documents: dict[str, Document], out: Path) -> None:
    """Write the plots as SVG. The same documents give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    settings: Any = {"svg.hashsalt": "pqweights", "svg.fonttype": "none", "axes.grid": True, "axes.axisbelow": True}
    matplotlib.rcParams.update(settings)
    from matplotlib import pyplot

    for name, (shown, panels, paint) in PLOTS.items():
        if all(benchmark in documents for benchmark in shown):
            figure, axes = pyplot.subplots(1, panels, figsize=(6 * panels, 4.5), squeeze=False, layout="constrained")
            paint(*(documents[benchmark] for benchmark in shown), axes[0])
            metadata: dict[str, Any] = {"Date": None}
            figure.savefig(out / f"{name}.svg", metadata=metadata)
            pyplot.close(figure)


def read_documents(folder: Path) -> dict[str, Document]:
    """The documents of the benchmarks that have one."""
    paths = {name: folder / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def all_sections(documents: dict[str, Document]) -> dict[str, str]:
    """The sections of all benchmarks, by name."""
    sections: dict[str, str] = {}
    for name, document in documents.items():
        sections |= SECTIONS[name](document)
        sections[f"{name}-machine"] = "\n\n".join([*machine_lines(document), *stale_lines(document)])
    if "peers" in documents and "quality" in documents:
        sections["trellis-claim"] = trellis_claim(documents["peers"], documents["quality"])
    if all(name in documents for name in BY_SIZE):
        sections |= table_by_size(*(documents[name] for name in BY_SIZE))
    return sections


def machine_lines(document: Document) -> list[str]:
    """The machine that a document was measured on, and that of its rates if they are older."""
    lines = [machine_line(document)]
    return lines if RATES not in document else [*lines, f"The rates: {machine_line(document[RATES])}"]


def fill(page: Path, sections: dict[str, str]) -> None:
    """Replace the text between the markers."""
    text = page.read_text(encoding="utf-8")
    for name, content in sections.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}{content}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON documents, and of the plots")
    parser.add_argument("pages", type=Path, nargs="*", help="Markdown files to fill")
    options = parser.parse_args()
    documents = read_documents(options.out)
    sections = all_sections(documents)
    for page in options.pages:
        fill(page, sections)
    if importlib.util.find_spec("matplotlib"):
        draw(documents, options.out)
    else:
        print(f"no plots: matplotlib is not installed. {peers.BENCH}")


if __name__ == "__main__":
    main()
