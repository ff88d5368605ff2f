"""A Ray cluster: how it is reached, which nodes it has, and what each of them can do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pqweights import __version__
from pqweights.distributed.worker import NodeState, Surroundings, python_version
from pqweights.errors import ClusterError, MissingDependencyError, OptionError
from pqweights.installing import pip_install
from pqweights.notices import slow_step
from pqweights.rewrite.identity import SAME_BYTES_SINCE

if TYPE_CHECKING:
    from types import ModuleType

AUTO, LOCAL = "auto", "local"
# A head node that is there accepts a connection at once, and answers before this time since the start is over.
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 9.0
# How long nodes may take to start a process and look around.
LOOK_SECONDS = 60.0
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
    # Whatever log_to_driver is, Ray prints what it knows of lost workers to stdout, where results of --json go. Lines
    # that are repeated are held back, and with them all that match this expression.
    os.environ["RAY_DEDUP_LOGS"] = "1"
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(f"--ray needs Ray ({error}): {pip_install('ray')}") from None
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
    with slow_step("connecting to Ray"):
        _connect(ray, address, cores)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: ModuleType, address: str, cores: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        ray.init(address=LOCAL, num_cpus=cores, include_dashboard=False, **quiet)
        return
    _check_answer(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _refused(address, str(error)) from None


def _check_form(address: str) -> None:
    host, _, port = address.rpartition(":")
    if address in (AUTO, LOCAL):
        return
    if "://" in address:
        raise OptionError(
            f"--ray {address}: expected HOST:PORT, {AUTO} or {LOCAL}: run the command on a node of the cluster, which "
            "need not compute (ray start --address HOST:PORT --num-cpus 0)"
        )
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise OptionError(f"--ray {address}: expected HOST:PORT of a head node, {AUTO} or {LOCAL}")


def _check_answer(address: str) -> None:
    """Raise ClusterError if no Ray answers at an address."""
    until = time.monotonic() + ANSWER_SECONDS
    if address != AUTO:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ClusterError(
                f"--ray {address}: nothing answers there ({error.strerror or error}); check the address, which ray "
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
    except subprocess.TimeoutExpired:
        raise _no_ray(address) from None
    if tried.returncode:
        raise _refused(address, tried.stderr)


def _refused(address: str, said: str) -> ClusterError:
    """Say why Ray could not be reached, by what it said."""
    if "ersion mismatch" in said:
        told = " ".join(line.strip() for line in said.splitlines() if "Ray:" in line or "Python:" in line)
        return ClusterError(
            f"--ray {address}: the cluster has another version of Ray or Python ({told}; this is Python "
            f"{sys.version.split()[0]}); use the same on all nodes"
        )
    if "not find any running Ray instance" in said:
        return ClusterError(
            f"--ray {address}: this machine belongs to no Ray cluster; start one with ray start, or use --ray {LOCAL}"
        )
    if "matching raylet" in said or "node_ip_address" in said or "can not be found" in said:
        return ClusterError(
            f"--ray {address}: this machine is not a node of that cluster; run ray start --address {address} "
            "--num-cpus 0 here first"
        )
    return _no_ray(address)


def _no_ray(address: str) -> ClusterError:
    what = "the cluster that this machine belongs to" if address == AUTO else "what answers there"
    return ClusterError(f"--ray {address}: {what} is not a Ray cluster that works; check its head node with ray status")


def nodes_of(ray: ModuleType) -> list[Node]:
    """Return the nodes that are alive and compute."""
    alive = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU", 0) >= 1]
    return [
        Node(
            id=each["NodeID"],
            name=f"{each['NodeManagerHostname']} ({each['NodeManagerAddress']}, {each['NodeID'][:8]})",
            cores=int(each["Resources"]["CPU"]),
            memory_bytes=int(each["Resources"].get("memory", 0)),
        )
        for each in alive
    ]


def check_nodes(ray: ModuleType, nodes: list[Node], asked: Surroundings, *, room: int) -> None:
    """Have every node look around.

    room: bytes that a node must have free in the scratch folder

    Raises ClusterError for the first node that cannot do its part.
    """
    look = ray.remote(num_cpus=0, max_retries=0)(_remote_look())
    by_node = _on_node(ray)
    asked_for = {look.options(scheduling_strategy=by_node(node)).remote(asked): node for node in nodes}
    done, late = ray.wait(list(asked_for), num_returns=len(asked_for), timeout=LOOK_SECONDS)
    for reference in late:
        raise ClusterError(
            f"node {asked_for[reference].name}: did not start a process within {LOOK_SECONDS:.0f} s; check it with "
            "ray status, or take it out of the cluster"
        )
    for reference in done:
        node = asked_for[reference]
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"node {node.name}: cannot run a task: {first_line(error)}") from None
        problem = f"no module {found!r}" if isinstance(found, str) else _problem(found, asked, room)
        if isinstance(found, str):
            problem = f"has no pqweights ({found}); run pip install 'pqweights=={__version__}' there"
        if problem:
            raise ClusterError(f"node {node.name}: {problem}")


def _remote_look() -> Callable[[Surroundings], NodeState | str]:
    """Return a function that is sent to nodes as it is, because pqweights may not be there."""

    def look(asked: Any) -> Any:
        try:
            from pqweights.distributed.worker import look_around
        except ImportError as error:
            return str(error)
        return look_around(asked)

    return look


def _on_node(ray: ModuleType) -> Callable[[Node], Any]:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return lambda node: strategy(node_id=node.id, soft=False)


def _problem(found: NodeState, asked: Surroundings, room: int) -> str | None:
    """Say what keeps a node from doing its part, and what to do; None if nothing does."""
    if found.python != python_version():
        return f"has Python {found.python}, this is {python_version()}; use the same on all nodes"
    if (found.version, found.same_bytes_since) != (__version__, SAME_BYTES_SINCE):
        return f"has pqweights {found.version}, this is {__version__}; run pip install 'pqweights=={__version__}' there"
    if not found.shares:
        assert asked.shared is not None
        return (
            f"does not see what this machine writes into {asked.shared[0].parent.parent}; choose a folder that all "
            "nodes share, or an address such as s3://BUCKET/NAME"
        )
    if found.missing is not None:
        return (
            f"does not see {found.missing} as it is here; give a source that all nodes reach by the same path, or an "
            "address such as s3://BUCKET/NAME"
        )
    if found.free_bytes is not None and found.free_bytes < room:
        return (
            f"has {found.free_bytes} bytes free in {asked.scratch}, but its part may need {room}; free some space, "
            "set PQWEIGHTS_SCRATCH to a folder on another disk, or pass a smaller --max-shard-size"
        )
    return None


def first_line(error: BaseException) -> str:
    """Return what an error of Ray says first, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
