"""Error feedback column by column, as calibrated masters have it, beside feedback over strips of 128 columns.

    python benchmarks/strips.py MODEL_DIR... [--inputs 512]

Strips would need no format of their own: each is 128 columns, rotated along the columns and encoded like any weight of
the trellis. So the question is what single columns gain. For one weight of each role and size, from the layer in the
middle: the relative squared error of the layer's output on text that was not calibrated on, at equal bits per weight,
everything stored counted. Rows are not weighed. Text is MODEL_DIR/eval.txt; the moments are those of its first tokens,
damped as a calibration damps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness import Cell, Document, argument_parser, machine, now, publish, table

from pqweights.formats import get_codec
from pqweights.formats.column_encoding import InputFactors, best_damping, encode_columns
from pqweights.formats.columns import decode_codes

WINDOW, WINDOWS, HELD_EVERY = 256, 48, 12
STATES = 8
RATES = (2.125, 3.125, 4.125)
WAYS = ("plain", "strips", "columns")
Floats = np.ndarray


def inputs_of(model: torch.nn.Module, modules: dict[str, torch.nn.Linear], ids: torch.Tensor) -> dict[str, Floats]:
    """The inputs of linear layers, [tokens, K] f32. ids: [windows, tokens]"""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in modules}

    def add(name: str, _: Any, inputs: Any) -> None:
        seen[name].append(inputs[0].reshape(-1, inputs[0].shape[-1]))

    hooks = [module.register_forward_pre_hook(functools.partial(add, name)) for name, module in modules.items()]
    with torch.inference_mode():
        for batch in ids.split(4):
            model(batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows).numpy() for name, rows in seen.items()}


def moments_of(rows: Floats) -> Floats:
    """Their second moments, [K, K] f32."""
    return rows.T @ rows / np.float32(len(rows))


def plain(weight: Floats, rate: float) -> tuple[Floats, float]:
    """The weight through the trellis codec, and its bits per weight."""
    format = get_codec("hadamard-trellis").at(rate, STATES).sized(weight.size)
    stored = np.empty((-(-weight.size // format.block_size), format.parts[0].bytes_per_block), dtype=np.uint8)
    values = np.zeros(len(stored) * format.block_size, dtype=np.float32)
    values[: weight.size] = weight.reshape(-1)
    decoded = np.empty_like(values)
    format.encode(values.view(np.uint8), [stored], dtype="F32")
    format.decode([stored], decoded.view(np.uint8), dtype="F32")
    return decoded[: weight.size].reshape(weight.shape), 8 * stored.size / weight.size


def strips(weight: Floats, rate: float, moments: Floats, damping: float) -> tuple[Floats, float]:
    """The weight strip by strip, each with the errors of those before it in mind: H = (I + A) D (I + A)' in blocks."""
    size = len(moments)
    damped = moments + damping * moments.diagonal().mean() * np.eye(size)
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    decoded, errors, bits = np.empty_like(weight), np.zeros(weight.shape), []
    for start in range(0, size, 128):
        own = slice(start, start + 128)
        # (I + A) of these columns: those of U, by the inverse of its block on the diagonal.
        feedback = upper[:start, own] @ np.linalg.inv(upper[own, own])
        wanted = (weight[:, own] + errors[:, :start] @ feedback).astype(np.float32)
        decoded[:, own], stored = plain(np.ascontiguousarray(wanted), rate)
        errors[:, own] = weight[:, own] - decoded[:, own]
        bits.append(stored)
    return decoded, float(np.mean(bits))


def columns(weight: Floats, rate: float, moments: Floats, damping: float) -> tuple[Floats, float]:
    """The weight as a calibrated master has it, with the step that takes the rate."""
    low, high = 2.0**-30, 2.0**10
    bits, inputs = 0.0, InputFactors.of([moments], damping)
    while abs(bits - rate) > 0.004 and high / low > 1.0001:
        step = (low * high) ** 0.5
        codes, _ = encode_columns(weight, inputs, gradients=np.ones(len(weight)), step=step, states=STATES)
        bits = 8 * sum(part.nbytes for part in codes.parts) / weight.size
        low, high = (step, high) if bits > rate else (low, step)
    decoded = np.empty(weight.shape, dtype=np.float32)
    decode_codes(codes, codes.cut.blocks, "F32", decoded.reshape(-1).view(np.uint8))
    return decoded, bits


def measure(folder: Path, least: int) -> list[dict[str, Any]]:
    """A row for each weight and rate."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = (folder / "eval.txt").read_text(encoding="utf-8")[: 12 * WINDOW * WINDOWS]
    ids = torch.tensor(tokenizer(text)["input_ids"][: 2 * WINDOW * WINDOWS]).reshape(2, WINDOWS, WINDOW)
    middle = f"layers.{model.config.num_hidden_layers // 2}."
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and middle in name and module.in_features >= least
    }
    rows = []
    for name, module in modules.items():
        weight = np.ascontiguousarray(module.weight.detach().numpy())
        seen, fresh = (inputs_of(model, {name: module}, windows)[name] for windows in ids)
        moments, other, held = moments_of(seen), moments_of(fresh), np.arange(len(seen)) // WINDOW % HELD_EVERY == 11
        damping = best_damping([moments_of(np.delete(seen, held, axis=0))], [seen[held]])
        ways: dict[str, Callable[[float], tuple[Floats, float]]] = {
            "plain": functools.partial(plain, weight),
            "strips": functools.partial(strips, weight, moments=moments, damping=damping),
            "columns": functools.partial(columns, weight, moments=moments, damping=damping),
        }
        energy = float(((weight @ other) * weight).sum())
        for rate in RATES:
            row: dict[str, Any] = {"model": folder.name, "weight": name, "shape": list(weight.shape)}
            row |= {"damping": damping, "rate": rate}
            for way, quantized in ways.items():
                decoded, bits = quantized(rate)
                error = weight - decoded
                row[way] = {"error": float(((error @ other) * error).sum()) / energy, "bits": bits}
            rows.append(row)
            print(name, rate, *(f"{way} {row[way]['error']:.3e} {row[way]['bits']:.3f}" for way in WAYS), flush=True)
    return rows


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    lines: list[list[Cell]] = []
    for row in document["rows"]:
        errors = [row[way]["error"] for way in WAYS]
        name = f"{row['model']}: {row['weight'].removeprefix('model.')}"
        lines.append([name, " x ".join(map(str, row["shape"])), row["damping"], row["rate"]])
        lines[-1] += [*(f"{error:.2e}" for error in errors)]
        lines[-1] += [f"{errors[0] / errors[2]:.2f}", f"{errors[1] / errors[2]:.2f}"]
    header = ("weight", "outputs x inputs", "damping", "bits", *WAYS, "plain / columns", "strips / columns")
    return {"strips": table(header, lines)}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders of language models, with eval.txt")
    parser.add_argument("--inputs", type=int, default=512, help="weights of fewer inputs are left out")
    options = parser.parse_args()
    start = now()
    rows = [row for folder in options.models for row in measure(folder, options.inputs)]
    document = {"machine": machine(start), "settings": {"states": STATES, "tokens": WINDOW * WINDOWS}, "rows": rows}
    publish("strips", document, sections(document), options, ("columns",))


if __name__ == "__main__":
    main()
