"""Encode and decode rates of columns of a weight, beside those of the plain trellis on as many weights.

    python benchmarks/columns.py

A weight of N(0,1) whose inputs are correlated is encoded with the feedback of all its columns, at about 3 bits. Rates
are weights in a second of the processor's time, so that other work on the machine counts less; the rounds of all
operations take turns, and the tables show medians. The Cholesky factor of the moments, which takes as long for one row
as for all, is left out.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
from harness import Document, argument_parser, machine, now, publish, table

from pqweights.common.threads import usable_cores
from pqweights.formats import get_codec
from pqweights.formats.column_encoding import ColumnMeasures, InputFactors, encode_columns, moment_blocks
from pqweights.formats.columns import ColumnCodes
from pqweights.formats.trellis_tables import decode_tables
from pqweights.kernels import columns
from pqweights.kernels.trellis import STATES

BITS, STEP = 3.0, 0.42
Work = Callable[[], object]


def operations(rows: int, size: int, threads: int) -> dict[str, Work]:
    """What is timed, by name."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((rows, size), dtype=np.float32)
    mixed = rng.standard_normal((size, size), dtype=np.float32) / np.float32(size**0.5)
    moments, gradients = np.eye(size, dtype=np.float32) + mixed @ mixed.T, np.ones(rows)

    inputs = InputFactors.of([moments[part, part] for part in moment_blocks(size)])

    def encode(states: int = STATES[0]) -> tuple[ColumnCodes, ColumnMeasures]:
        return encode_columns(weight, inputs, gradients=gradients, step=STEP, states=states, threads=threads)

    codes, _ = encode()
    values = np.empty(2 * weight.size, dtype=np.uint8)
    factors = {"row_factors": np.ones(rows, np.float32), "column_factors": np.ones(size, np.float32)}

    def decode() -> None:
        blocks = codes.cut.blocks
        columns.decode(codes.trellis, codes.lengths, values, "BF16", blocks=blocks, **factors, tables=decode_tables())

    format = get_codec("hadamard-trellis").at(BITS, STATES[0]).sized(weight.size)
    stored = np.empty((-(-weight.size // format.block_size), format.parts[0].bytes_per_block), dtype=np.uint8)
    plain, decoded = (np.zeros(len(stored) * format.block_size * size, dtype=np.uint8) for size in (4, 2))
    plain[: weight.nbytes] = weight.reshape(-1).view(np.uint8)
    return {
        **{f"encode, {states} states": functools.partial(encode, states) for states in STATES[:2]},
        "decode": decode,
        "encode, plain trellis": lambda: format.encode(plain, [stored], dtype="F32"),
        "decode, plain trellis": lambda: format.decode([stored], decoded, dtype="BF16"),
    }


def measure(rows: int, size: int, threads: int, rounds: int) -> list[dict]:
    """The rows of one number of threads, one per operation."""
    works = operations(rows, size, threads)
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            begin = time.process_time()
            work()
            if turn:  # the first one warms up
                times[name].append(time.process_time() - begin)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return [
        {"operation": name, "threads": threads, "weights_per_second": rows * size / seconds}
        for name, seconds in medians.items()
    ]


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    settings = document["settings"]
    threads = settings["threads"]
    found = {(row["operation"], row["threads"]): row for row in document["rows"]}
    header = ["", *(f"M weights per second of the processor, {count} thread{'s' * (count > 1)}" for count in threads)]
    lines = [
        [name, *(f"{found[name, count]['weights_per_second'] / 1e6:.0f}" for count in threads)]
        for name in dict.fromkeys(row["operation"] for row in document["rows"])
    ]
    note = f"A weight of shape {settings['shape']}, median of {settings['rounds']}."
    return {"columns": f"{note}\n\n{table(header, lines)}"}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, usable_cores()}))
    options = parser.parse_args()
    start = now()
    rows = [row for count in options.threads for row in measure(options.rows, options.columns, count, options.rounds)]
    settings = {"shape": [options.rows, options.columns], "rounds": options.rounds, "threads": options.threads}
    document = {"machine": machine(start), "settings": settings, "rows": rows}
    publish("columns", document, sections(document), options, ("columns", "trellis"))


if __name__ == "__main__":
    main()
