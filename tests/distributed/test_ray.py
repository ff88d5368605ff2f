"""Runs on a Ray cluster of several nodes on this machine: the bytes of one machine, whatever is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import raises, refused
from helpers import bf16, folder_bytes, gaussian, write_checkpoint
from ray_cluster import QUIET, Faulty, RayCluster, kill_process, wait_until
from remote_server import SECRETS, ObjectServer

import pqweights
from pqweights.checkpoint.names import WORK_FOLDER
from pqweights.common.options import Options
from pqweights.convert.convert import convert
from pqweights.convert.distributed import cluster as clusters
from pqweights.convert.distributed.engine import engine_of
from pqweights.convert.plan import Plan
from pqweights.errors import ClusterError, MissingDependencyError, OptionError, StorageError
from pqweights.planning.recipe import load_recipe
from pqweights.storage import open_store
from pqweights.targets.master import plan_quantize

LAYERS, SHARD = 8, 45_000  # a shard for each layer


def weight(layer: int) -> str:
    return f"model.layers.{layer}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {weight(n): bf16(gaussian(256, 256, seed=n)) for n in range(LAYERS)}
    return write_checkpoint(tmp_path_factory.mktemp("ray") / "model", tensors)


@pytest.fixture(scope="module")
def plain(source: Path) -> dict[str, bytes]:
    out = source.parent / "plain"
    pqweights.quantize(source, out, max_shard_size=SHARD)
    return folder_bytes(out)


@pytest.fixture
def cluster(ray_cluster: RayCluster) -> RayCluster:
    return ray_cluster


def faulty_run(source: Path | str, marker: Path, fault: str) -> Plan:
    """A plan in which something happens at the fifth layer, which then makes a marker."""
    planned = plan_quantize(source, load_recipe("q5"), Options(max_shard_size=SHARD))
    return replace(planned, encode=Faulty(encode=planned.encode, tensor=weight(4), marker=marker, fault=fault))


def test_results_of_a_cluster_have_the_bytes_of_one_machine(
    source: Path, plain: dict[str, bytes], cluster: RayCluster, tmp_path: Path
) -> None:
    shown: list[tuple[int, int, str]] = []
    out = tmp_path / "master"
    report = pqweights.quantize(
        source, out, max_shard_size=SHARD, ray=cluster.address, progress=lambda *state: shown.append(state)
    )
    assert folder_bytes(out) == plain
    total = LAYERS * 256 * 256 * 2
    assert shown == [(n * total // LAYERS, total, f"{n} of {LAYERS} files") for n in range(LAYERS + 1)]
    assert report.source_bytes_read >= LAYERS * 256 * 256 * 2
    assert pqweights.quantize(source, out, max_shard_size=SHARD, ray=cluster.address).already_done
    pqweights.export(out, tmp_path / "plain", "bf16", max_shard_size=SHARD)
    pqweights.export(out, tmp_path / "parts", "bf16", max_shard_size=SHARD, ray=cluster.address)
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "plain")


def test_a_worker_that_is_killed_costs_its_task_alone(
    source: Path, plain: dict[str, bytes], cluster: RayCluster, tmp_path: Path
) -> None:
    planned = faulty_run(source, tmp_path / "marker", "kill")
    with engine_of(cluster.address) as engine:
        convert(planned, open_store(tmp_path / "out"), Options(engine=engine))
    assert (tmp_path / "marker").exists()
    assert folder_bytes(tmp_path / "out") == plain


def test_the_task_of_a_node_that_is_killed_goes_to_another(
    source: Path, plain: dict[str, bytes], cluster: RayCluster, tmp_path: Path
) -> None:
    """It hangs until all others are made, which do not wait for it."""
    planned, marker = faulty_run(source, tmp_path / "marker", "hang"), tmp_path / "marker"

    def progress(done: int, total: int, name: str) -> None:
        if name == f"{LAYERS - 1} of {LAYERS} files":
            (node,) = [node for node in cluster.nodes if node.id == marker.read_text().split()[0]]
            cluster.kill(node)

    with engine_of(cluster.address) as engine:
        convert(planned, open_store(tmp_path / "out"), Options(engine=engine, progress=progress))
    assert len(cluster.nodes) == 1
    assert folder_bytes(tmp_path / "out") == plain


def test_a_command_that_is_killed_is_continued(
    source: Path, plain: dict[str, bytes], cluster: RayCluster, tmp_path: Path
) -> None:
    """The driver and its workers die while a task hangs; a plain run goes on from what the others finished."""
    code = f"""
from pathlib import Path
from test_ray import faulty_run
from pqweights.convert.distributed.engine import engine_of
from pqweights.convert.convert import convert
from pqweights.common.options import Options
from pqweights.storage import open_store
marker = Path({str(tmp_path / "marker")!r})
plan = faulty_run(Path({str(source)!r}), marker, "hang")
def progress(done, total, name):
    if name == "{LAYERS - 1} of {LAYERS} files":
        (marker.parent / "ALMOST").touch()
with engine_of({cluster.address!r}) as engine:
    convert(plan, open_store(Path({str(tmp_path / "out")!r})), Options(engine=engine, progress=progress))
"""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parent / "support"), *filter(None, sys.path)]
    driver = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"], stderr=subprocess.PIPE
    )
    wait_until((tmp_path / "ALMOST").exists, "the other tasks did not end")
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert (tmp_path / "out" / WORK_FOLDER).exists()
    report = pqweights.quantize(source, tmp_path / "out", max_shard_size=SHARD)
    assert report.resumed >= LAYERS - 1
    assert folder_bytes(tmp_path / "out") == plain


def test_a_damaged_source_is_refused_in_the_line_of_one_machine(cluster: RayCluster, tmp_path: Path) -> None:
    values = gaussian(256, 256)
    values[3, 5] = np.nan
    write_checkpoint(tmp_path / "model", {weight(0): bf16(gaussian(256, 256)), weight(1): bf16(values)})
    command = ("quantize", tmp_path / "model", tmp_path / "out", "--max-shard-size", SHARD)
    alone, on_cluster = refused(*command), refused(*command, "--ray", cluster.address)
    assert alone == on_cluster and f"{weight(1)!r}" in alone and "NaN" in alone
    assert not (tmp_path / "out").exists()


def test_what_no_node_can_do_is_refused(source: Path, cluster: RayCluster, tmp_path: Path) -> None:
    with raises(ClusterError, 5):
        pqweights.quantize(source, tmp_path / "out", ray=cluster.address, threads=5)
    assert not (tmp_path / "out").exists()


def test_addresses_where_no_ray_answers_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "ANSWER_SECONDS", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with raises(ClusterError, address):
            pqweights.quantize(source, tmp_path / "out", ray=address)
    with raises(ClusterError, address):
        pqweights.quantize(source, tmp_path / "out", ray=address)
    with raises(OptionError, "nonsense"):
        pqweights.quantize(source, tmp_path / "out", ray="nonsense")
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(MissingDependencyError, "pip install 'ray"):
        pqweights.quantize(source, tmp_path / "out", ray="local")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (None, "RAY_AUTH_MODE=token"),
        ("Version mismatch: Ray: 2.40\n  Python: 3.9", "Ray: 2.40 Python: 3.9"),
        ("Could not find any running Ray instance", "start one with ray start"),
        ("did not find a matching raylet", "run ray start --address"),
    ],
)
def test_refusals_of_ray_are_one_clear_line(
    said: str | None, named: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **options: object) -> Any:
        if said is None:
            raise subprocess.TimeoutExpired("ray", 9, stderr=b"Unauthenticated: RPC error: InvalidAuthToken: ...")
        return subprocess.CompletedProcess((), 1, "", said)

    monkeypatch.setattr(clusters.subprocess, "run", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server, raises(ClusterError, named):
        pqweights.quantize(source, tmp_path / "out", ray=f"127.0.0.1:{server.getsockname()[1]}")


def test_a_local_cluster_writes_nothing_into_the_home_folder(
    source: Path, plain: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path / "home")}
    code = (
        f"import pqweights; pqweights.quantize({str(source)!r}, {str(tmp_path / 'out')!r}, max_shard_size={SHARD}, "
        "ray='local')"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert folder_bytes(tmp_path / "out") == plain
    assert not (tmp_path / "home" / ".ray").exists()


LOSING = """
import sys, time
from pathlib import Path

from pqweights.convert.distributed.cluster import connected

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


def test_driver_is_silent_about_a_lost_worker(cluster: RayCluster) -> None:
    command = [sys.executable, "-c", LOSING, cluster.address]
    environment = {name: value for name, value in os.environ.items() if name not in QUIET}  # what users have
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    kill_process(cluster.wait_for_worker("waits"))
    assert process.communicate(timeout=60) == ("lost\n", "")


def test_a_run_between_buckets_survives_a_lost_worker(
    source: Path,
    plain: dict[str, bytes],
    session_cluster: RayCluster,
    server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    session_cluster.restore(0)
    session_cluster.restore(2)  # nodes have the environment of the process that starts them
    address, marker = server.put(source, "model"), tmp_path / "marker"
    planned = faulty_run(address, marker, "kill")
    with engine_of(session_cluster.address) as engine:
        convert(planned, open_store("s3://models/master"), Options(engine=engine))
    assert marker.exists()
    assert server.contents("master") == plain
    assert folder_bytes(tmp_path / "scratch") == {}
    assert pqweights.verify("s3://models/master").ok

    server.fault = lambda request: (403, "AccessDenied") if "other" in request["PATH_INFO"] else None
    with raises(StorageError, "s3://models/other") as refused:
        pqweights.quantize(address, "s3://models/other", ray=session_cluster.address)
    assert not any(secret in str(refused.value) for secret in SECRETS)
    server.fault = None
    session_cluster.restore(0)
