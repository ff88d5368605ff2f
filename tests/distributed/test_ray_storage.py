"""A source and a result in object storage, on a cluster of several nodes: a server of S3 that all of them reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import bf16, folder_bytes, gaussian, write_checkpoint
from ray_cluster import Faulty, RayCluster
from remote_server import SECRETS, ObjectServer

import pqweights
from pqweights.errors import StorageError
from pqweights.options import QuantizeOptions
from pqweights.planning.recipe import load_recipe
from pqweights.quantizing import plan_quantize
from pqweights.rewrite.distributed.engine import on_ray
from pqweights.rewrite.driver import rewrite
from pqweights.rewrite.task import Lineage, RewriteTask, RunOptions
from pqweights.storage import open_store

pytest.importorskip("ray")
LAYERS, SHARD = 6, 45_000  # a shard for each layer


def weight(layer: int) -> str:
    return f"model.layers.{layer}.mlp.up_proj.weight"


def test_a_run_between_buckets_survives_a_lost_worker(
    session_cluster: RayCluster, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    session_cluster.restore(0)
    session_cluster.restore(2)  # nodes have the environment of the process that starts them
    tensors = {weight(n): bf16(gaussian(256, 256, seed=n)) for n in range(LAYERS)}
    local = write_checkpoint(tmp_path / "model", tensors)
    source, out = server.put(local, "model"), "s3://models/master"
    pqweights.quantize(local, tmp_path / "plain", max_shard_size=SHARD)

    checkpoint, _, plan = plan_quantize(source, load_recipe("q5"), QuantizeOptions(max_shard_size=SHARD))
    recipe, marker = load_recipe("q5"), tmp_path / "marker"
    task = RewriteTask(
        checkpoint=checkpoint,
        source=None,
        transform=Faulty(recipe=recipe, tensor=weight(3), marker=marker, fault="kill"),
        plan=plan,
        out=open_store(out),
        lineage=Lineage(),
    )
    with on_ray(session_cluster.address) as engine:
        rewrite(task, RunOptions(engine=engine))
    assert marker.exists()
    assert server.contents("master").keys() == {path.name for path in (tmp_path / "plain").iterdir()}
    for name, data in server.contents("master").items():
        if name != "pqweights.json":  # it states where the source is
            assert data == (tmp_path / "plain" / name).read_bytes()
    assert folder_bytes(tmp_path / "scratch") == {}
    assert pqweights.verify(out, ray=session_cluster.address).ok

    server.fault = lambda request: (403, "AccessDenied") if "other" in request["PATH_INFO"] else None
    with pytest.raises(StorageError, match=r"s3://models/other.*: access denied") as refused:
        pqweights.quantize(source, "s3://models/other", ray=session_cluster.address)
    assert not any(secret in str(refused.value) for secret in SECRETS)
    server.fault = None
    session_cluster.restore(0)
