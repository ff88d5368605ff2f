"""Encode and decode rates of the CPU kernels for each bit width, beside numpy's memcpy of the same BF16 bytes.

The trellis codec stands beside the scalar one, with each number of states.

    python benchmarks/throughput.py

Blocks are shared out over threads in chunks of 2**20 weights, as in the driver; kernels and memcpy release the GIL. The
rounds of all operations take turns, the tables show medians, and each ratio is to memcpy on as many threads. (The file
is not called kernels.py because libraries that peers.py imports look for a package of that name.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from harness import Document, argument_parser, machine, now, publish, table

from pqweights.common.threads import usable_cores
from pqweights.formats import get_codec
from pqweights.formats.lloyd_max import codebook
from pqweights.formats.master import BlockFormat
from pqweights.kernels import BLOCK_SIZE, BlockCoding, Encoded, load_backend

CHUNK_WEIGHTS = 1 << 20
CHUNK_BLOCKS = CHUNK_WEIGHTS // BLOCK_SIZE
TRELLIS_BITS = (2.125, 4.125, 5.125, 8)
VALUE_BYTES = 2 * BLOCK_SIZE
Work = Callable[[int, int], object]  # first block, one past the last


def weights(blocks: int) -> np.ndarray:
    """Gaussian weights as raw BF16 bytes: [blocks * 256] u8."""
    values = np.random.default_rng(0).standard_normal((CHUNK_BLOCKS, BLOCK_SIZE), dtype=np.float32) * 0.02
    chunk = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(-1)
    return np.concatenate([np.roll(chunk, 7 * i) for i in range(-(-blocks // CHUNK_BLOCKS))]).view(np.uint8)


def operations(blocks: int, widths: list[int]) -> dict[str, Work]:
    """What is timed, by name. Arrays are allocated and touched here, outside of the timing."""
    backend = load_backend()
    values = weights(blocks)
    target = np.ones_like(values)

    def memcpy(first: int, last: int) -> None:
        at, end = first * VALUE_BYTES, last * VALUE_BYTES
        np.copyto(target[at:end], values[at:end])

    result: dict[str, Work] = {"memcpy": memcpy}
    for bits in widths:
        coding = BlockCoding(codebook=codebook(bits))
        out = np.ones((blocks, 16 * bits), dtype=np.uint8), np.ones(blocks, dtype=np.uint16)

        def encode(first: int, last: int, coding: BlockCoding = coding, out: Encoded = out) -> None:
            part = out[0][first:last], out[1][first:last]
            backend.encode(values[first * VALUE_BYTES : last * VALUE_BYTES], "BF16", coding, part)

        def decode(first: int, last: int, coding: BlockCoding = coding, out: Encoded = out) -> None:
            part = target[first * VALUE_BYTES : last * VALUE_BYTES]
            backend.decode((out[0][first:last], out[1][first:last]), coding, "BF16", part)

        result[f"encode {bits}"] = encode
        result[f"decode {bits}"] = decode
    for name, format in trellis_formats().items():
        result |= trellis_operations(name, format, values, target)
    return result


def trellis_formats() -> dict[str, BlockFormat]:
    """The formats of the trellis codec that are timed, by the names of their rows."""
    codec = get_codec("hadamard-trellis")
    rates = [(states, TRELLIS_BITS[1]) for states in codec.efforts[1:]]
    found = [(codec.efforts[0], bits) for bits in TRELLIS_BITS] + rates
    return {f"trellis, {states} states, {bits}": codec.at(bits, states).sized(CHUNK_WEIGHTS) for states, bits in found}


def trellis_operations(name: str, format: BlockFormat, values: np.ndarray, target: np.ndarray) -> dict[str, Work]:
    """Encoding and decoding with one format."""
    chunks, (part,) = len(values) // (2 * CHUNK_WEIGHTS), format.parts
    rows = np.ones((chunks, CHUNK_WEIGHTS // format.block_size, part.bytes_per_block), dtype=np.uint8)

    def encode(first: int, last: int) -> None:
        at = first * VALUE_BYTES
        part = rows[first // CHUNK_BLOCKS]
        format.encode(values[at : last * VALUE_BYTES], [part], dtype="BF16")

    def decode(first: int, last: int) -> None:
        at = first * VALUE_BYTES
        format.decode([rows[first // CHUNK_BLOCKS]], target[at : last * VALUE_BYTES], dtype="BF16")

    return {f"encode {name}": encode, f"decode {name}": decode}


def seconds(pool: ThreadPoolExecutor, work: Work, blocks: int) -> float:
    """The seconds of one round over all blocks."""
    starts = range(0, blocks, CHUNK_BLOCKS)
    begin = time.perf_counter()
    list(pool.map(lambda first: work(first, min(first + CHUNK_BLOCKS, blocks)), starts))
    return time.perf_counter() - begin


def measure(blocks: int, widths: list[int], threads: int, rounds: int) -> list[dict]:
    """The rows of one thread count, one per operation."""
    works = operations(blocks, widths)
    times: dict[str, list[float]] = {name: [] for name in works}
    with ThreadPoolExecutor(threads) as pool:
        for name in works:  # warm up: compiles, and encode makes the codes that decode needs
            seconds(pool, works[name], blocks)
        for _ in range(rounds):
            for name, work in works.items():
                times[name].append(seconds(pool, work, blocks))
    rates = {name: blocks * BLOCK_SIZE / statistics.median(values) for name, values in times.items()}
    return [
        {"operation": name, "threads": threads, "weights_per_second": rate, "of_memcpy": rate / rates["memcpy"]}
        for name, rate in rates.items()
    ]


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    found = {(row["operation"], row["threads"]): row for row in document["rows"]}
    settings = document["settings"]
    columns = [(operation, threads) for threads in settings["threads"] for operation in ("encode", "decode")]
    header = ["bits", *(f"{operation}, {threads} thread{'s' * (threads > 1)}" for operation, threads in columns)]
    copied = [found["memcpy", threads]["weights_per_second"] / 1e9 for _, threads in columns]
    rows = [["memcpy", *(f"{rate:.3f}" for rate in copied)]]
    for bits in (*settings["bits"], *settings["trellis"]):
        cells = [found[f"{operation} {bits}", threads] for operation, threads in columns]
        shares = [f"{cell['weights_per_second'] / 1e9:.3f} ({cell['of_memcpy']:.2f})" for cell in cells]
        rows.append([str(bits), *shares])
    note = (
        f"{settings['weights'] / 1e6:.0f} M weights, {settings['dtype']}, blocks of {settings['block_size']}, "
        f"median of {settings['rounds']}; G weights/s, in parentheses of memcpy."
    )
    return {"throughput": f"{note}\n\n{table(header, rows)}", "throughput-trellis": trellis_table(document)}


def trellis_table(document: Document) -> str:
    """The table of the page of the trellis codec, with a scalar width beside it."""
    found = {(row["operation"], row["threads"]): row["weights_per_second"] / 1e6 for row in document["rows"]}
    threads = document["settings"]["threads"]
    columns = [(operation, count) for operation in ("encode", "decode") for count in threads]
    header = ["", *(f"{operation}, M weights/s, {count} thread{'s' * (count > 1)}" for operation, count in columns)]
    names = {name: name for name in document["settings"]["trellis"]} | {"scalar, 4 bits": "4"}
    rows = [
        [shown, *(f"{found[f'{operation} {name}', count]:.0f}" for operation, count in columns)]
        for shown, name in names.items()
    ]
    return table(header, rows)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--weights", type=int, default=1 << 26)
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(2, 9)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, usable_cores()}))
    options = parser.parse_args()
    start = now()
    blocks = -(-options.weights // BLOCK_SIZE // CHUNK_BLOCKS) * CHUNK_BLOCKS
    settings = {
        "weights": blocks * BLOCK_SIZE,
        "dtype": "BF16",
        "block_size": BLOCK_SIZE,
        "rounds": options.rounds,
        "threads": options.threads,
        "bits": options.bits,
        "trellis": list(trellis_formats()),
    }
    rows = [row for count in options.threads for row in measure(blocks, options.bits, count, options.rounds)]
    document = {"machine": machine(start), "settings": settings, "rows": rows}
    codecs = (*(f"q{bits}" for bits in options.bits), "trellis")
    publish("throughput", document, sections(document), options, codecs)


if __name__ == "__main__":
    main()
