"""Encode and decode rates of the CPU kernels per width, beside numpy's memcpy of the same BF16 bytes in the same run.

    python benchmarks/kernels.py

Blocks are shared out over threads in chunks of 2**20 weights, as in the driver; kernels and memcpy release the GIL. The
rounds of all operations take turns, medians count, and the ratio is to memcpy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pqweights.codebook import codebook
from pqweights.kernels import BLOCK_SIZE, load_backend

CHUNK_BLOCKS = (1 << 20) // BLOCK_SIZE
VALUE_BYTES = 2 * BLOCK_SIZE
Work = Callable[[int, int], object]  # first block, one past the last


def weights(blocks: int) -> np.ndarray:
    """Gaussian weights as raw BF16 bytes: [blocks * 256] u8."""
    values = np.random.default_rng(0).standard_normal((CHUNK_BLOCKS, BLOCK_SIZE), dtype=np.float32) * 0.02
    chunk = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(-1)
    return np.concatenate([np.roll(chunk, 7 * i) for i in range(-(-blocks // CHUNK_BLOCKS))]).view(np.uint8)


def operations(blocks: int, widths: list[int]) -> dict[str, Work]:
    """Everything that is timed, by name; arrays are made and touched here, not in the timing."""
    backend = load_backend("cpu")
    values = weights(blocks)
    target = np.ones_like(values)

    def memcpy(first: int, last: int) -> None:
        at, end = first * VALUE_BYTES, last * VALUE_BYTES
        np.copyto(target[at:end], values[at:end])

    result: dict[str, Work] = {"memcpy": memcpy}
    for bits in widths:
        book = codebook(bits)
        codes = np.ones((blocks, 16 * bits), dtype=np.uint8)
        norms = np.ones(blocks, dtype=np.uint16)
        sums = np.ones((2, blocks))

        def encode(first: int, last: int, book=book, codes=codes, norms=norms, sums=sums) -> None:
            backend.encode(
                values[first * VALUE_BYTES : last * VALUE_BYTES], "BF16", book, False, 0, codes[first:last],
                norms[first:last], sums[0, first:last], sums[1, first:last],
            )  # fmt: skip

        def decode(first: int, last: int, book=book, codes=codes, norms=norms) -> None:
            part = target[first * VALUE_BYTES : last * VALUE_BYTES]
            backend.decode(codes[first:last], norms[first:last], "BF16", book, False, 0, part)

        result[f"encode {bits}"] = encode
        result[f"decode {bits}"] = decode
    return result


def seconds(pool: ThreadPoolExecutor, work: Work, blocks: int) -> float:
    """One round over all blocks."""
    starts = range(0, blocks, CHUNK_BLOCKS)
    begin = time.perf_counter()
    list(pool.map(lambda first: work(first, min(first + CHUNK_BLOCKS, blocks)), starts))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=1 << 26)
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(2, 9)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    blocks = -(-options.weights // BLOCK_SIZE // CHUNK_BLOCKS) * CHUNK_BLOCKS
    works = operations(blocks, options.bits)
    times: dict[str, list[float]] = {name: [] for name in works}
    with ThreadPoolExecutor(options.threads) as pool:
        for name in works:  # encode comes before decode, which needs its codes; and everything is compiled
            seconds(pool, works[name], blocks)
        for _ in range(options.rounds):
            for name, work in works.items():
                times[name].append(seconds(pool, work, blocks))
    rates = {name: blocks * BLOCK_SIZE / statistics.median(values) for name, values in times.items()}
    rows = [
        {"operation": name, "weights_per_second": rate, "ratio_to_memcpy": rate / rates["memcpy"]}
        for name, rate in rates.items()
    ]
    cores = len(os.sched_getaffinity(0))
    if options.json:
        shown = {"weights": blocks * BLOCK_SIZE, "cores": cores, "threads": options.threads, "rates": rows}
        print(json.dumps(shown, indent=2))
        return
    print(
        f"{blocks * BLOCK_SIZE} weights in BF16, {options.threads} threads on {cores} cores, median of {options.rounds}"
    )
    print(f"{'operation':<9}  {'G weights/s':>11}  {'of memcpy':>9}")
    for row in rows:
        print(f"{row['operation']:<9}  {row['weights_per_second'] / 1e9:11.3f}  {row['ratio_to_memcpy']:9.3f}")


if __name__ == "__main__":
    main()
