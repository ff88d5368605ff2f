"""Products of packed weights with a few rows of inputs on a GPU, beside torch's BF16 F.linear with the decoded weight.

    python benchmarks/gpu.py

Each way takes turns with as many weights as it needs to exceed the GPU's caches, so that weights come from its memory.
*GPU* is the time of a CUDA graph of all these products, the rotation of the inputs included each time. *Calls* is the
time of the same products called from Python one by one, which includes what Python and the launches cost. Ratios are
torch's median divided by ours: above 1, ours is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from harness import Cell, Document, argument_parser, machine, now, publish, table, version

from pqweights.codecs import get_codec
from pqweights.codecs.lloyd_max import ScalarCoder
from pqweights.codecs.scalar import HADAMARD, ScalarState
from pqweights.inference.loading import packed_products
from pqweights.inference.loading.packed_rows import Factor, PackedRows, decode_rows

SHAPES = ((14336, 4096), (4096, 4096))  # outputs, columns
PACKED_BYTES = 512_000_000  # in turn: several times the largest cache of a GPU
ROUNDS = 21
MOST_ERROR = 0.02  # of an output, as a share of the largest one; BF16 has 8 bits


def packed_rows(outputs: int, columns: int, bits: int, device: torch.device) -> PackedRows:
    """Random codes and norms."""
    coder = get_codec("hadamard-lloyd-max").coder(bits)
    assert isinstance(coder, ScalarCoder)
    blocks = outputs * columns // coder.block_size
    codes = torch.randint(256, (blocks, 16 * bits), dtype=torch.uint8, device=device)
    norms = (torch.rand(blocks, device=device) + 0.5).half()
    return PackedRows(
        place="random",
        weights=outputs * columns,
        rows=outputs,
        columns=columns,
        coder=coder,
        state=ScalarState(HADAMARD, 0),
        parts=(codes, norms.view(torch.uint8).view(-1, 2)),
        offset=0,
        first_block=0,
        awq=None,
        factor=Factor(),
    )


def decoded(rows: PackedRows) -> torch.Tensor:
    """The weight in BF16."""
    out = torch.empty(rows.rows, rows.columns, dtype=torch.bfloat16, device=rows.parts[0].device)
    decode_rows((rows,), 0, rows.rows, out=out)
    return out


def graph_of(work: Callable[[], None]) -> Callable[[], None]:
    """The work as a CUDA graph; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(work: Callable[[], None]) -> float:
    """The time between events before and after the work."""
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return 1000 * float(start.elapsed_time(end))


def measure(shape: tuple[int, int], bits: int, counts: list[int], device: torch.device) -> list[dict[str, Any]]:
    """The rows of a shape and a bit width, one for each number of rows of inputs."""
    first = packed_rows(*shape, bits, device)
    number = -(-PACKED_BYTES // first.byte_count)
    weights = [first, *(packed_rows(*shape, bits, device) for _ in range(number - 1))]
    plain = [decoded(each) for each in weights]
    found = []
    for count in counts:
        x = torch.randn(count, shape[1], dtype=torch.bfloat16, device=device)

        def ours(x: torch.Tensor = x) -> None:
            for each in weights:
                packed_products.multiply((each,), x, None)

        def torchs(x: torch.Tensor = x) -> None:
            for each in plain:
                torch.nn.functional.linear(x, each)

        if not packed_products.multiplies((first,), x):
            raise SystemExit(f"error: {count} rows are not multiplied with the codes, but with the decoded weight")
        expected = torch.nn.functional.linear(x.float(), plain[0].float())
        error = (packed_products.multiply((first,), x, None).float() - expected).abs().max() / expected.abs().max()
        if not error <= MOST_ERROR:
            raise SystemExit(
                f"error: {shape}, {bits} bits, {count} rows: an output is off by {error:.3g} of the largest"
            )
        works: dict[str, Callable[[], None]] = {"ours": ours, "torch": torchs}
        for work in works.values():
            work()  # compiles
        works |= {f"{name}, graph": graph_of(work) for name, work in works.items()}
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            for name, work in works.items():
                times[name].append(microseconds(work) / number)
        medians = {name: statistics.median(values) for name, values in times.items()}
        about = {"outputs": shape[0], "columns": shape[1], "bits": bits, "rows": count, "error": float(error)}
        found.append({**about, "microseconds": medians, "bytes": first.byte_count})
    return found


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    header = (
        "weight",
        "bits",
        "rows",
        "GPU: ours, µs",
        "torch, µs",
        "ratio",
        "ours, GB/s",
        "calls: ours, µs",
        "torch, µs",
    )
    lines: list[list[Cell]] = []
    for row in document["rows"]:
        times = row["microseconds"]
        graph, plain, ours, theirs = (times[name] for name in ("ours, graph", "torch, graph", "ours", "torch"))
        lines.append([f"{row['outputs']} x {row['columns']}", row["bits"], row["rows"], f"{graph:.1f}", f"{plain:.1f}"])
        lines[-1] += [f"{plain / graph:.2f}", f"{row['bytes'] / graph / 1e3:.0f}", f"{ours:.1f}", f"{theirs:.1f}"]
        lines[-1] += [f"{theirs / ours:.2f}"]
    note = f"{document['machine']['gpu']}, BF16 inputs, medians of {document['settings']['rounds']}."
    return {"gpu": f"{note}\n\n{table([*header, 'ratio'], lines)}"}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="of inputs")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 5])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this needs an NVIDIA GPU and a CUDA build of torch; found none")
    if version("triton") is None:
        raise SystemExit("error: this needs triton, which is not installed: pip install 'pqweights[cuda]'")
    start, device = now(), torch.device("cuda", 0)
    with torch.no_grad():
        rows = [
            each for shape in SHAPES for bits in options.bits for each in measure(shape, bits, options.rows, device)
        ]
    described = machine(start) | {"gpu": torch.cuda.get_device_name(device)}
    described["versions"] |= {"triton": version("triton")}
    document = {"machine": described, "settings": {"rounds": ROUNDS}, "rows": rows}
    publish("gpu", document, sections(document), options, ("q2", "q3", "q4", "q5", "q6", "q8"))


if __name__ == "__main__":
    main()
