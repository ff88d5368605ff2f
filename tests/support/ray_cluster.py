"""A Ray cluster of several nodes on this machine, whose nodes and workers are killed by tests.

A node is a raylet with its workers. Killing one ends all of its processes with SIGKILL at once, as a power failure
does, except that the operating system closes the connections. All files are in a short folder below /tmp, because paths
of sockets have at most 107 bytes; RAY_TMPDIR names it, so that clusters of other processes are not found by `auto`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.convert.jobs import Job
from pqweights.planning.layout import TensorPlan

OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes is 75 MB
WAIT_SECONDS = 60.0
# A node that is killed answers nothing at once, one that is busy may take seconds.
NOTICED_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
# What a cluster says of lost nodes goes to stdout of the driver, unless it is skipped like a line that was said before.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
# Every cluster of the tests expects this token: a process cannot use clusters with tokens and others.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
for _name, _value in (QUIET | TOKEN).items():
    os.environ.setdefault(_name, _value)  # before Ray is imported, which reads it then


@dataclass(frozen=True)
class RayNode:
    """A node that computes.

    id: what Ray calls it
    handle: the node of ray.cluster_utils
    """

    id: str
    handle: Any = field(repr=False)

    @property
    def raylet(self) -> int:
        """The process that starts the workers."""
        pid: int = self.handle.all_processes["raylet"][0].process.pid
        return pid

    def workers(self, task: str = "") -> list[int]:
        """Return the processes of workers; of those that run a task, if it has a name."""
        return [pid for pid, title in _children(self.raylet).items() if title.startswith(f"ray::{task}")]


class RayCluster:
    """A head without cores, and nodes.

    address: that of the head, for --ray
    nodes: those that were not killed
    """

    def __init__(self, **system: Any) -> None:
        """Start a head. system: internal settings of Ray, such as health_check_period_ms."""
        from ray.cluster_utils import Cluster

        self.nodes = list[RayNode]()
        head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head | {"_system_config": system})
        self.address: str = self._cluster.address

    def add_node(self) -> RayNode:
        """Start a node of one core, and wait until the cluster has it."""
        support = Path(__file__).parent
        paths = [str(support), str(support.parent), os.environ.get("PYTHONPATH", "")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # workers need the classes of this module
            handle = self._cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        node = RayNode(handle.node_id, handle)
        self.nodes.append(node)
        return node

    def kill(self, node: RayNode) -> None:
        """End all processes of a node with SIGKILL."""
        processes = {node.raylet, *_children(node.raylet)}
        for pid in processes:
            kill_process(pid)
        self._cluster.remove_node(node.handle, allow_graceful=False)
        self.nodes.remove(node)

    def wait_for_worker(self, task: str) -> int:
        """Wait until a task runs, and return the process that runs it."""

        def find() -> int | None:
            pids = [pid for node in self.nodes for pid in node.workers(task)]
            return pids[0] if pids else None

        return wait_until(find, f"no worker ran {task}")

    def restore(self, count: int) -> None:
        """Start nodes in place of those that were killed, and end more than `count`."""
        for node in self.nodes[count:]:
            self.kill(node)
        while len(self.nodes) < count:
            self.add_node()

    def shut_down(self) -> None:
        """End all processes."""
        import ray

        ray.shutdown()  # of a test that failed
        self._cluster.shutdown()


def _children(pid: int) -> dict[int, str]:
    """Return the titles of the processes that a process started, by id."""
    import psutil

    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                found[child.pid] = " ".join(child.cmdline()).strip()  # a title is padded
    return found


def kill_process(pid: int) -> None:
    """End a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until(find: Callable[[], Any], otherwise: str) -> Any:
    """Wait until a function returns something that counts, and return it. otherwise: what was waited for in vain."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        if found := find():
            return found
        time.sleep(0.01)
    raise TimeoutError(otherwise)


@contextlib.contextmanager
def running_cluster(count: int, **system: Any) -> Iterator[RayCluster]:
    """Run a cluster of a head and that many nodes until the context ends. system: see RayCluster."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        try:
            cluster = RayCluster(**system)
            try:
                cluster.restore(count)
                yield cluster
            finally:
                cluster.shut_down()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[RayCluster]:
    with running_cluster(0, **NOTICED_SOON) as cluster:
        yield cluster


@pytest.fixture
def ray_cluster(session_cluster: RayCluster) -> RayCluster:
    """A cluster with two nodes of one core, which live."""
    session_cluster.restore(2)
    return session_cluster


@dataclass(frozen=True, kw_only=True)
class Faulty:
    """An encoder of which something happens when a tensor is begun.

    encode: what it does otherwise
    tensor: its name
    marker: a file that is then made, which states the node and the process
    fault: "kill" ends the first process, "kill all" every one, "hang" waits for the file GO beside the marker
    """

    encode: Callable[[TensorPlan, LogicalTensor], Job]
    tensor: str
    marker: Path
    fault: str

    def __call__(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the pass, or not."""
        if planned.name == self.tensor and (self.fault == "kill all" or not self.marker.exists()):
            import ray

            partial = self.marker.with_suffix(".partial")
            partial.write_text(f"{ray.get_runtime_context().get_node_id()} {os.getpid()}")
            partial.rename(self.marker)
            if self.fault != "hang":
                kill_process(os.getpid())
            wait_until(self.marker.with_name("GO").exists, "nothing said that the task should go on")
        return self.encode(planned, tensor)
