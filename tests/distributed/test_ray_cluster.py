"""The cluster of the tests loses what they kill, and our driver does not print what Ray says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import QUIET, RayCluster, is_running, kill_process, wait_until

ray = pytest.importorskip("ray")

LOSING = """
import sys, time
from pathlib import Path

from pqweights.rewrite.distributed.cluster import connected

with connected(sys.argv[1], cores=1) as ray:

    def waits():
        time.sleep(600)

    task = ray.remote(max_retries=0)(waits).remote()
    assert ray.wait([task], timeout=60)[0]
    try:
        ray.get(task)
    except ray.exceptions.WorkerCrashedError:
        time.sleep(2)  # for what is said later
        print("lost")
"""


@pytest.fixture
def connected(ray_cluster: RayCluster) -> Iterator[Any]:
    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def started(folder: Path, name: str) -> Any:
    """Start a task that says that it runs, and then waits."""
    path = folder / name

    def waits() -> None:
        import time

        path.touch()
        time.sleep(600)

    task = ray.remote(max_retries=0)(waits).remote()
    wait_until(path.exists, "the task did not start")
    return task


def test_nodes_compute_and_have_ids(ray_cluster, connected):
    task = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    assert ray.get(task.remote()) in {node.id for node in ray_cluster.nodes}
    assert len([node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]) == 2


def test_killed_worker_loses_its_task(ray_cluster, connected, tmp_path):
    task = started(tmp_path, "task")
    kill_process(ray_cluster.wait_for_worker("waits"))
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(task, timeout=30)


def test_killed_node_loses_its_tasks_and_is_replaced(ray_cluster, connected, tmp_path):
    tasks = [started(tmp_path, name) for name in "ab"]
    lost = ray_cluster.nodes[0]
    workers = lost.workers("waits")
    ray_cluster.kill(lost)
    assert workers
    wait_until(lambda: not any(map(is_running, workers)), "a worker lives on")
    done, running = ray.wait(tasks, timeout=30)
    with pytest.raises(ray.exceptions.NodeDiedError):
        ray.get(done[0])
    ray.cancel(running[0], force=True)
    ray_cluster.restore(2)
    assert lost.id not in {node.id for node in ray_cluster.nodes}
    assert started(tmp_path, "c")


def test_driver_is_silent_about_a_lost_worker(ray_cluster):
    command = [sys.executable, "-c", LOSING, ray_cluster.address]
    environment = {name: value for name, value in os.environ.items() if name not in QUIET}  # what users have
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    kill_process(ray_cluster.wait_for_worker("waits"))
    assert process.communicate(timeout=60) == ("lost\n", "")


def test_auto_means_this_cluster(ray_cluster):
    code = "import ray; print(ray.init('auto', log_to_driver=False, logging_level='ERROR').address_info['gcs_address'])"
    environment = os.environ | ray_cluster.environment
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ray_cluster.address
