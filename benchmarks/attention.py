"""Attention on packed keys and values without restoring them, beside the same products in BF16 by torch.

    python benchmarks/attention.py

One query (batch 1) against keys and values of SIZE coordinates, for one head and for eight. Ours is the look-up product
of polar-rope keys, the product of Hadamard keys, and the sum of 4-bit values with a scale and a low end for each token.
Torch has keys in BF16, and the fastest of its ways for the shape counts. "Restored" is the packed keys restored to BF16
by torch, then multiplied.
Each way goes round a set of distinct caches of at least CACHE_BYTES, so that none lies in a processor's cache; the ways
take turns. Ratios are medians of the ratios of turns that followed each other.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Cell, Document, argument_parser, machine, now, publish, table, usable_cores
from torch.nn.functional import linear

from pqweights.kernels.attention import hadamard_scores, polar_rope_scores, weighted_values

SIZE = 128
KEYS = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
HEADS = (1, 8)
CACHE_BYTES = 128_000_000
# Turns in which torch's fastest way is found, before it takes turns with ours: some leave threads asleep for the next.
TRIALS = 15
# Restoring is slow, and has fewer turns.
RESTORED_TURNS = 5

Tensor = torch.Tensor

# --- torch ---

# Query [heads, 1, SIZE] and keys [heads, keys, SIZE] in BF16 to scores.
SCORE_WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "q @ K.T": lambda q, k: q @ k.transpose(1, 2),
    "K @ q.T": lambda q, k: k @ q.transpose(1, 2),
    "linear": lambda q, k: [linear(q[head], k[head]) for head in range(len(q))],
    "einsum": lambda q, k: torch.einsum("hrd,htd->hrt", q, k),
}
# Weights [heads, 1, keys] and values [heads, keys, SIZE] in BF16 to sums.
VALUE_WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "p @ V": lambda p, v: p @ v,
    "V.T @ p.T": lambda p, v: v.transpose(1, 2) @ p.transpose(1, 2),
    "linear": lambda p, v: [linear(p[head], v[head].T) for head in range(len(p))],
    "einsum": lambda p, v: torch.einsum("hrt,htd->hrd", p, v),
}


def fields(packed: Tensor, bits: int) -> Tensor:
    """Codes of 2 or 4 bits, unpacked along the last dimension."""
    return torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)


# --- what is compared ---


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product on packed codes.

    name: what tables call it
    bytes_per_key: of one head, as the kernel reads them
    caches: makes `count` packed caches: tensors whose first dimension counts them
    ours: the product of an input (f32) and one of these caches
    restored: the same cache as torch restores it to BF16, [heads, keys, SIZE]
    ways: those of torch
    """

    name: str
    bytes_per_key: float
    caches: Callable[[int, int, int], list[Tensor]]
    ours: Callable[[Tensor, list[Tensor]], Tensor]
    restored: Callable[[list[Tensor]], Tensor]
    ways: dict[str, Callable[[Tensor, Tensor], Any]]


def polar(radius_bits: int) -> Product:
    """Polar-rope keys with angles of four bits."""
    angles = 2 * math.pi * torch.arange(16) / 16 - math.pi
    cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()

    def caches(count: int, heads: int, keys: int) -> list[Tensor]:
        shape = (count, heads, keys // 32, SIZE // 2)
        return [codes(*shape, 16), codes(*shape, 4 * radius_bits), torch.rand(count, heads, SIZE // 2).half()]

    def ours(query: Tensor, cache: list[Tensor]) -> Tensor:
        return polar_rope_scores(query, *cache, angle_bits=4, radius_bits=radius_bits)

    def restored(cache: list[Tensor]) -> Tensor:
        places = fields(cache[0], 4).int()
        lengths = fields(cache[1], radius_bits).bfloat16() * cache[2].bfloat16()[:, None, :, None]
        keys = torch.cat([lengths * cosines[places], lengths * sines[places]], dim=2)
        return keys.transpose(2, 3).reshape(len(keys), -1, SIZE)

    return Product(
        name=f"polar-rope keys, m4n{radius_bits}",
        bytes_per_key=SIZE / 2 * (4 + radius_bits) / 8,
        caches=caches,
        ours=ours,
        restored=restored,
        ways=SCORE_WAYS,
    )


def hadamard() -> Product:
    """Hadamard keys of four bits, with a norm each; what is restored is rotated, as the query is."""
    levels = torch.linspace(-2.7, 2.7, 16)

    def caches(count: int, heads: int, keys: int) -> list[Tensor]:
        return [codes(count, heads, keys, SIZE // 2), torch.rand(count, heads, keys).half()]

    def restored(cache: list[Tensor]) -> Tensor:
        return levels.bfloat16()[fields(cache[0], 4).int()] * cache[1].bfloat16()[..., None]

    return Product(
        name="Hadamard keys, 4 bits",
        bytes_per_key=SIZE / 2 + 2,
        caches=caches,
        ours=lambda query, cache: hadamard_scores(query, cache[0], cache[1], levels),
        restored=restored,
        ways=SCORE_WAYS,
    )


def values() -> Product:
    """Values of four bits, with a scale and a low end for each token."""
    levels = torch.arange(16.0)

    def caches(count: int, heads: int, keys: int) -> list[Tensor]:
        scales, lows = (torch.rand(count, heads, keys).half() for _ in range(2))
        return [codes(count, heads, keys, SIZE // 2), scales, lows]

    def ours(weights: Tensor, cache: list[Tensor]) -> Tensor:
        packed, scales, lows = cache
        return weighted_values(weights, packed, levels, size=SIZE, scales=scales, lows=lows)

    def restored(cache: list[Tensor]) -> Tensor:
        packed, scales, lows = (tensor if tensor.dim() == 3 else tensor.bfloat16()[..., None] for tensor in cache)
        return fields(packed, 4).bfloat16() * scales + lows

    return Product(
        name="values, 4 bits", bytes_per_key=SIZE / 2 + 4, caches=caches, ours=ours, restored=restored, ways=VALUE_WAYS
    )


def codes(*shape: int) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


# --- measuring ---


def measure(product: Product, heads: int, keys: int, plain: Tensor, rounds: int) -> Document:
    """One row: times of ours, of torch and of restoring, which take turns.

    plain: BF16 caches [count, heads, keys, SIZE]
    """
    packed = product.caches(count_for(product.bytes_per_key * heads * keys), heads, keys)
    of_scores = product.ways is SCORE_WAYS
    whole = torch.randn(heads, 1, SIZE) if of_scores else torch.rand(heads, 1, keys)
    half = whole.bfloat16()
    check(product, half.float(), [part[0] for part in packed])
    turn = itertools.count()

    def seconds(name: str) -> float:
        cache = plain[next(turn) % len(plain)]
        return timed(lambda: product.ways[name](half, cache))

    trials = {name: statistics.median(seconds(name) for _ in range(TRIALS)) for name in product.ways}
    best = min(trials, key=lambda name: trials[name])
    times: dict[str, list[float]] = {"packed": [], "bf16": []}
    for number in range(-1, rounds):  # the first round is for warming up
        cache = [part[number % len(part)] for part in packed]
        ours, theirs = timed(partial(product.ours, whole, cache)), seconds(best)
        if number >= 0:
            times["packed"].append(ours)
            times["bf16"].append(theirs)
    restored = []

    def restored_way(cache: list[Tensor]) -> Tensor:
        return product.ways[best](half, product.restored(cache))

    for number in range(RESTORED_TURNS):
        cache = [part[number % len(part)] for part in packed]
        restored.append(timed(partial(restored_way, cache)))
    ratios = [theirs / ours for ours, theirs in zip(times["packed"], times["bf16"], strict=True)]
    packed_seconds, restored_seconds = (statistics.median(found) for found in (times["packed"], restored))
    return {
        "product": product.name,
        "heads": heads,
        "keys": keys,
        "bytes_per_key": product.bytes_per_key,
        "way": best,
        "packed_seconds": packed_seconds,
        "bf16_seconds": statistics.median(times["bf16"]),
        "restored_seconds": restored_seconds,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "restored_ratio": restored_seconds / packed_seconds,
    }


def timed(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def count_for(cache_bytes: float) -> int:
    """How many caches of this size are gone round."""
    return max(2, math.ceil(CACHE_BYTES / cache_bytes))


def check(product: Product, whole: Tensor, cache: list[Tensor]) -> None:
    """Stop if ours is not the product with the restored cache, within the rounding of BF16."""
    restored = product.restored(cache).float()
    exact = whole @ (restored.transpose(1, 2) if product.ways is SCORE_WAYS else restored)
    error = float((product.ours(whole, cache) - exact).norm() / exact.norm())
    if not error < 0.02:
        raise SystemExit(f"error: {product.name} differ by {error:.3g} from the product of what torch restores")


def measure_all(heads_of: list[int], keys_of: list[int], rounds: int) -> list[Document]:
    """The rows of all products and shapes."""
    products, rows = (polar(4), polar(2), hadamard(), values()), []
    with torch.inference_mode():
        for heads, keys in itertools.product(heads_of, keys_of):
            plain = torch.randn(count_for(2 * SIZE * heads * keys), heads, keys, SIZE, dtype=torch.bfloat16)
            rows += [measure(product, heads, keys, plain, rounds) for product in products]
    return sorted(rows, key=lambda row: [product.name for product in products].index(row["product"]))


# --- tables ---

HEADER = (
    "product",
    "heads",
    "keys",
    "packed, us",
    "BF16, us",
    "speed, of BF16",
    "quartiles",
    "restored, us",
    "bytes per key, of BF16",
    "read, GB/s",
)


def cells(row: Document) -> list[Cell]:
    """A line of the table."""
    packed, bf16, restored = (f"{row[f'{name}_seconds'] * 1e6:.0f}" for name in ("packed", "bf16", "restored"))
    low, high = row["ratio_quartiles"]
    return [
        row["product"],
        row["heads"],
        row["keys"],
        packed,
        f"{bf16} ({row['way']})",
        f"{row['ratio']:.1f}",
        f"{low:.1f} to {high:.1f}",
        restored,
        f"{row['bytes_per_key'] / (2 * SIZE):.2f}",
        f"{row['bytes_per_key'] * row['heads'] * row['keys'] / row['packed_seconds'] / 1e9:.1f}",
    ]


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    settings = document["settings"]
    about = (
        f"One query, {SIZE} coordinates, {settings['threads']} threads; medians of {settings['rounds']} turns, which "
        f"go round caches of {CACHE_BYTES // 10**6} MB."
    )
    shown = (min(row["keys"] for row in document["rows"]), max(row["keys"] for row in document["rows"]))
    return {
        "attention": f"{about}\n\n" + table(HEADER, [cells(row) for row in document["rows"] if row["keys"] in shown])
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--keys", type=int, nargs="+", default=KEYS, help="multiples of 32")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    start = now()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = measure_all(options.heads, options.keys, options.rounds)
    settings = {"threads": options.threads, "rounds": options.rounds}
    document = {"machine": machine(start), "settings": settings, "rows": rows}
    publish("attention", document, sections(document), options, ("kv",))


if __name__ == "__main__":
    main()
