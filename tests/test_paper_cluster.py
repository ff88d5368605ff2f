"""Clusters on paper: estimates by hand, and what must hold for any."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])  # only here: names clash
    from paper_cluster import Cluster, Estimate, duration, estimate

ONE = Cluster(price=3.6, cores=8, task_threads=8, network_bytes=1e9, shard_bytes=1e9, fixed_seconds=0.0)


def on_paper(nodes: int, source_bytes: float = 10e9, cluster: Cluster = ONE, **others: Any) -> Estimate:
    given = {"cpu_seconds_per_byte": 8e-8, "result_share": 0.5} | others
    return estimate(source_bytes, nodes=nodes, cluster=cluster, **given)


def test_estimates_by_hand() -> None:
    # 5 shards, each of 2e9 bytes of source, 160 CPU seconds and 3e9 bytes that move.
    assert on_paper(1) == Estimate(pytest.approx(100.0), pytest.approx(0.1), "compute")
    assert on_paper(5) == Estimate(pytest.approx(20.0), pytest.approx(0.1), "compute")
    # One node has two shards, the others one: the fifth shard waits.
    assert on_paper(4) == Estimate(pytest.approx(40.0), pytest.approx(0.16), "shards")
    assert on_paper(1, cpu_seconds_per_byte=1e-9) == Estimate(pytest.approx(15.0), pytest.approx(0.015), "network")


def test_more_nodes_than_shards_cost_and_do_not_help() -> None:
    assert on_paper(50).seconds == on_paper(5).seconds
    assert on_paper(50).money == pytest.approx(10 * on_paper(5).money)


@pytest.mark.parametrize("nodes", [1, 3, 17, 64])
def test_no_cluster_is_faster_than_its_cores_and_its_network(nodes: int) -> None:
    for cost in (1e-9, 1e-7):
        found = on_paper(nodes, 140e9, cluster=Cluster(fixed_seconds=0.0), cpu_seconds_per_byte=cost)
        assert found.seconds >= 140e9 * cost / (16 * nodes) * 0.999
        assert found.seconds >= 140e9 * 1.5 / 1.25e9 / nodes * 0.999


def test_durations_are_read_as_people_do() -> None:
    assert [duration(seconds) for seconds in (60, 3600, 36_000)] == ["1 min", "60 min", "10.0 h"]
