"""Time and money of large models on clusters that were not there: computed from what a byte costs here.

    python benchmarks/paper_cluster.py --price 0.8 docs/benchmarks/ray_scaling.json

Nothing is measured. A checkpoint of S bytes becomes K = ceil(r S / shard) equal shards, r the result's share of its
source. A node has 16 cores, runs tasks of 8 threads, and moves 1.25e9 bytes per second, in and out together. A shard is
not divided, so that the busiest task has ceil(K / tasks) of them, the busiest node ceil(K / nodes):

    compute = ceil(K / tasks) S/K c / 8             c: CPU seconds per byte of source
    network = ceil(K / nodes) (S + r S)/K / 1.25e9
    time    = fixed + max(compute, network)
    money   = nodes time / 3600 price
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from harness import Document, table

MODELS = (("70 B", 70e9), ("671 B", 671e9), ("2 T", 2e12))
NODES = (1, 2, 4, 8, 16, 32, 64)
BYTES_PER_WEIGHT = 2
# Work in whole shards that takes this much longer than divided evenly is bounded by them.
ROUNDED_UP = 1.25
BOUNDS = {"compute": "c", "network": "n", "shards": "s"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is assumed of a cluster.

    price: of a node, in dollars per hour
    network_bytes: what a node receives and sends in a second, together
    fixed_seconds: for what does not depend on the number of nodes: start, headers, checks, publishing
    """

    price: float = 0.8
    cores: int = 16
    task_threads: int = 8
    network_bytes: float = 1.25e9
    shard_bytes: float = 5e9
    fixed_seconds: float = 60.0


@dataclass(frozen=True)
class Estimate:
    """A run on paper: its time, what it costs in dollars, and what bounds it, a key of BOUNDS."""

    seconds: float
    money: float
    bound: str


def estimate(
    source_bytes: float, *, cpu_seconds_per_byte: float, result_share: float, nodes: int, cluster: Cluster
) -> Estimate:
    """Compute a run on paper."""
    shards = max(1, math.ceil(source_bytes * result_share / cluster.shard_bytes))
    tasks = nodes * (cluster.cores // cluster.task_threads)
    shard_seconds = source_bytes / shards * cpu_seconds_per_byte / cluster.task_threads
    shard_moving = source_bytes * (1 + result_share) / shards / cluster.network_bytes
    compute, network = math.ceil(shards / tasks) * shard_seconds, math.ceil(shards / nodes) * shard_moving
    even_compute, even_network = shards / tasks * shard_seconds, shards / nodes * shard_moving
    working, even = max(compute, network), max(even_compute, even_network)
    bound = "compute" if compute >= network else "network"
    if working > ROUNDED_UP * even:
        bound = "shards"
    seconds = cluster.fixed_seconds + working
    return Estimate(seconds, nodes * seconds / 3600 * cluster.price, bound)


def duration(seconds: float) -> str:
    """Minutes, or hours if there are many."""
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def sections(document: Document, cluster: Cluster | None = None) -> dict[str, str]:
    """A table per codec, in Markdown."""
    cluster = cluster or Cluster()
    found = {}
    for cost in document["costs"]:
        lines = []
        for nodes in NODES:
            cells = [str(nodes)]
            for _, weights in MODELS:
                it = estimate(
                    weights * BYTES_PER_WEIGHT,
                    cpu_seconds_per_byte=cost["cpu_seconds_per_byte"],
                    result_share=cost["result_share"],
                    nodes=nodes,
                    cluster=cluster,
                )
                cells.append(f"{duration(it.seconds)}, ${it.money:.2f}, {BOUNDS[it.bound]}")
            lines.append(cells)
        found[f"paper-{cost['recipe']}"] = table(["nodes", *(name for name, _ in MODELS)], lines)
    return found


def main() -> None:
    default = Cluster()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path, help="the document of ray_scaling.py")
    parser.add_argument("--price", type=float, default=default.price, help="dollars per node-hour, an assumption")
    parser.add_argument("--cores", type=int, default=default.cores)
    parser.add_argument("--shard-gigabytes", type=float, default=default.shard_bytes / 1e9)
    parser.add_argument("--fixed-seconds", type=float, default=default.fixed_seconds)
    options = parser.parse_args()
    cluster = Cluster(
        price=options.price,
        cores=options.cores,
        shard_bytes=options.shard_gigabytes * 1e9,
        fixed_seconds=options.fixed_seconds,
    )
    for name, text in sections(json.loads(options.measured.read_text()), cluster).items():
        print(name, text, sep="\n\n")


if __name__ == "__main__":
    main()
