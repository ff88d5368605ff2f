"""A Ray cluster: how it is reached, which nodes it has, and what each of them can do."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.common.advice import pip_install
from pqweights.common.threads import slow_step
from pqweights.convert.distributed.worker import LOOK, VERSIONS, remote_call
from pqweights.errors import ClusterError, MissingDependencyError, OptionError

if TYPE_CHECKING:
    from types import ModuleType

AUTO, LOCAL = "auto", "local"
# A head node that is there accepts a connection at once, and answers before this time since the start is over.
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 8.0
# How long nodes may take to start a process and look around.
LOOK_SECONDS = 60.0
# How often a task is given again whose process, node or memory is gone.
MOST_RETRIES = 4
# What Ray says to a process without the token of the cluster, and where it looks for one by default.
NO_TOKEN = b"InvalidAuthToken"
TOKEN_FILE = Path("~/.ray/auth_token")
# Tried in a process of its own: where no Ray answers, the library ends the process.
_TRY = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster that computes.

    id: what Ray calls it
    name: what it is called in messages
    cores: how many of its cores Ray may use
    memory_bytes: how much of its memory
    """

    id: str
    name: str
    cores: int
    memory_bytes: int


def import_ray() -> ModuleType:
    """Return Ray, told to be quiet.

    Raises MissingDependencyError if it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault(
        "RAY_task_oom_retries", str(MOST_RETRIES)
    )  # by default a task that is too large is given again without end
    # Ray prints what it sees of lost workers to the standard output, where results of --json go. Repeated lines are
    # held back, and with them all that match this expression.
    os.environ |= {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(f"`ray` needs Ray ({error}): {pip_install('ray')}") from None
    return ray


@contextmanager
def connected(address: str, *, cores: int) -> Iterator[ModuleType]:
    """Connect to a cluster, and yield Ray; what is still running there for this process ends with the context.

    address: HOST:PORT of a head node, AUTO for the cluster that this machine belongs to, LOCAL for a new one
    cores: how many cores a new one uses

    Raises ClusterError if no Ray answers there, OptionError for an address that can be none.
    """
    _check_form(address)
    ray = import_ray()
    if ray.is_initialized():
        raise ClusterError(f"`ray` {address}: this process is connected to Ray already; call ray.shutdown() first")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with slow_step("connecting to Ray"):
            _connect(ray, address, cores)
        try:
            yield ray
        finally:
            ray.shutdown()
    finally:  # what connecting did to the signals of this process; None: a handler that was not set by Python
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _connect(ray: ModuleType, address: str, cores: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        _take_token()
        try:
            ray.init(address=LOCAL, num_cpus=cores, include_dashboard=False, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ClusterError(f"`ray` {LOCAL}: Ray cannot start here: {last_line(error)}") from None
        return
    _check_answer(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _refused(address, str(error)) from None


def _take_token() -> None:
    """Give this process and those that it starts a token for clusters, so that Ray writes none into the home folder.

    A cluster that ray.init starts asks for one by default; anybody who reaches the machine could use it otherwise.
    """
    given = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not given and not TOKEN_FILE.expanduser().exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # stays: Ray remembers the first one that it sees


def _check_form(address: str) -> None:
    host, _, port = address.rpartition(":")
    if address in (AUTO, LOCAL):
        return
    if "://" in address:
        raise OptionError(
            f"`ray` {address}: expected HOST:PORT, {AUTO} or {LOCAL}: run the command on a node of the cluster, which "
            "need not compute (ray start --address HOST:PORT --num-cpus 0)"
        )
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise OptionError(f"`ray` {address}: expected HOST:PORT of a head node, {AUTO} or {LOCAL}")


def _check_answer(address: str) -> None:
    """Raise ClusterError if no Ray answers at an address."""
    until = time.monotonic() + ANSWER_SECONDS
    if address != AUTO:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ClusterError(
                f"`ray` {address}: nothing answers there ({error.strerror or error}); check the address, which ray "
                "start prints on the head node"
            ) from None
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRY, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=until - time.monotonic(),
        )
    except subprocess.TimeoutExpired as error:
        if NO_TOKEN in (error.stderr or b""):
            raise _refused(address, NO_TOKEN.decode()) from None
        raise ClusterError(
            f"`ray` {address}: no Ray answered within {ANSWER_SECONDS:.0f} s; check the head node with ray status"
        ) from None
    if tried.returncode:
        raise _refused(address, tried.stderr)


def _refused(address: str, said: str) -> ClusterError:
    """Say why Ray could not be reached, by what it said."""
    if "ersion mismatch" in said:
        told = " ".join(line.strip() for line in said.splitlines() if "Ray:" in line or "Python:" in line)
        return ClusterError(
            f"`ray` {address}: the cluster has another version of Ray or Python ({told}; this is Python "
            f"{sys.version.split()[0]}); use the same on all nodes"
        )
    if NO_TOKEN.decode() in said:
        return ClusterError(
            f"`ray` {address}: the cluster expects a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if it is not "
            f"that in {TOKEN_FILE}"
        )
    if "not find any running Ray instance" in said:
        return ClusterError(
            f"`ray` {address}: this machine belongs to no Ray cluster; start one with ray start, or use `ray` {LOCAL}"
        )
    if "matching raylet" in said or "node_ip_address" in said or "can not be found" in said:
        return ClusterError(
            f"`ray` {address}: this machine is not a node of that cluster; run ray start --address {address} "
            "--num-cpus 0 here first"
        )
    what = "the cluster that this machine belongs to" if address == AUTO else "what answers there"
    return ClusterError(f"`ray` {address}: {what} is not a Ray cluster that works; check its head node with ray status")


def nodes_of(ray: ModuleType) -> list[Node]:
    """Return the nodes that are alive and compute."""
    return [
        Node(
            id=node["NodeID"],
            name=f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})",
            cores=int(node["Resources"]["CPU"]),
            memory_bytes=int(node["Resources"].get("memory", 0)),
        )
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]


def check_nodes(ray: ModuleType, pickled: bytes, tasks_at_once: Mapping[Node, int]) -> None:
    """Have nodes look around; those that are lost meanwhile are left out.

    pickled: the ShardWork
    tasks_at_once: how many tasks each may have

    Raises ClusterError for the first node that cannot do its part.
    """
    errors, called = ray.exceptions, call_nodes(ray, LOOK, pickled, tasks_at_once)
    done, late = ray.wait(list(called), num_returns=len(called), timeout=LOOK_SECONDS)
    for reference in late:
        raise ClusterError(
            f"node {called[reference].name}: did not start a process within {LOOK_SECONDS:.0f} s; check it with "
            "ray status, or take it out of the cluster"
        )
    for reference in done:
        node = called[reference].name
        try:
            _, problem = ray.get(reference)
        except (errors.NodeDiedError, errors.TaskUnschedulableError):
            continue
        except errors.RayError as error:
            raise ClusterError(f"node {node}: cannot run a task: {last_line(error)}") from None
        if problem is not None:
            raise ClusterError(f"node {node}: {problem}")


def call_nodes(ray: ModuleType, question: str, pickled: bytes, numbers: Mapping[Node, int]) -> dict[Any, Node]:
    """Ask nodes something beside their tasks, and return the node of each of Ray's references to the answers.

    question, pickled, numbers: what worker.answer takes on each node
    """
    call, common = ray.remote(num_cpus=0, max_retries=MOST_RETRIES)(remote_call()), ray.put(pickled)
    on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return {
        call.options(scheduling_strategy=on_node(node_id=node.id, soft=False)).remote(
            VERSIONS, question, common, number
        ): node
        for node, number in numbers.items()
    }


def last_line(error: BaseException) -> str:
    """Return what an error of Ray says last, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
