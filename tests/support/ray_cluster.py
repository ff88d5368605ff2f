"""A Ray cluster on this machine for tests, and transforms that fail in one of its tasks at a given tensor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.planning.plan import TensorPlan
from pqweights.quantizing import Quantize
from pqweights.rewrite.jobs import Job

STORE_BYTES = 80 << 20


@contextmanager
def started_cluster(nodes: int) -> Iterator[Any]:
    """Yield a cluster of a head without cores and some nodes with one core."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            add_node(cluster)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> None:
    """Add a node with one core."""
    support = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(support), str(support.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # its workers need the classes of this module
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


@dataclass(frozen=True, kw_only=True)
class Faulty(Quantize):
    """Quantizes, but something happens, once, when a tensor is begun.

    tensor: its name
    marker: a file that is then made, which states the node and the process
    fault: "kill" ends the process, "hang" waits until the file GO beside the marker is there
    """

    tensor: str
    marker: Path
    fault: str

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the job, or not."""
        if planned.name == self.tensor and not self.marker.exists():
            import ray

            node = ray.get_runtime_context().get_node_id()
            self.marker.write_text(f"{node} {os.getpid()}")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for(self.marker.with_name("GO"))
        return super().job(planned, tensor)


def wait_for(path: Path, seconds: float = 120.0) -> None:
    """Return when a file is there."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            pytest.fail(f"{path.name} did not come")
        time.sleep(0.02)
