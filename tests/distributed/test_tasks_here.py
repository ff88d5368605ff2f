"""Runs in tasks: pickled tasks give the bytes of plain runs, and runs in tasks and plain ones continue each other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import families
import language_models
import pytest
from commands import raises
from converting import finished, killed_after
from helpers import folder_bytes
from memory_storage import objects, put
from tasks_here import use_tasks_here

import pqweights
from pqweights.checkpoint.names import WORK_FOLDER
from pqweights.convert.distributed import worker
from pqweights.convert.run import Run
from pqweights.errors import OutputError, PqweightsError, SourceChangedError, StrictError
from pqweights.targets import master

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

SHARD = 30_000
FEW = "model.layers.*.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source and its master."""
    folder = tmp_path_factory.mktemp("parts")
    language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder / "source"))
    pqweights.quantize(folder / "source", folder / "master", max_shard_size=SHARD)
    return folder


def both(monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Path) -> list[int]:
    """Run plainly and in tasks, compare every byte, and return the shards that tasks made."""
    run(tmp_path / "plain", ray=None)
    ray = use_tasks_here(monkeypatch)
    run(tmp_path / "tasks", ray="here")
    assert folder_bytes(tmp_path / "tasks") == folder_bytes(tmp_path / "plain")
    assert not (tmp_path / "tasks" / WORK_FOLDER).exists()
    return ray.made


@pytest.mark.parametrize(
    "options",
    [{}, {"target_bpw": 4.5}, {"recipe": "t4", "keep": FEW}, {"bits": 3, "set_format": {FEW: 6}}, {"lossless": True}],
    ids=str,
)
def test_masters_in_tasks_have_the_bytes_of_plain_ones(
    options: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = both(
        monkeypatch,
        lambda out, ray: pqweights.quantize(base / "source", out, max_shard_size=SHARD, ray=ray, **options),
        tmp_path,
    )
    assert len(ran) == len(set(ran)) > 2


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("bf16", {"dtype": "source"}),
        ("gguf", {"target_size": 500_000, "without_tokenizer": True}),
        ("gguf", {"type": "q3_k_l", "without_tokenizer": True}),
        ("torchao", {"group_size": 32}),
        ("vllm", {"group_size": 32, "of": "source"}),
        ("vllm", {"format": "gptq"}),
        ("gguf", {"type": "q4_k_m,q8_0", "of": "source"}),
        ("mlx", {"group_size": 32}),
    ],
    ids=str,
)
def test_exports_in_tasks_have_the_bytes_of_plain_ones(
    target: str, options: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(options)
    exported = base / given.pop("of", "master")
    ran = both(
        monkeypatch,
        lambda out, ray: pqweights.export(exported, out, target, max_shard_size=SHARD, ray=ray, **given),
        tmp_path,
    )
    assert len(ran) == len(set(ran)) > 1


def quantize(base: Path, out: Path, ray: str | None, **options: Any) -> Any:
    return pqweights.quantize(base / "source", out, **{"max_shard_size": SHARD, "ray": ray, "threads": 1, **options})


@pytest.mark.parametrize(("first", "then", "shards"), [("here", None, 2), (None, "here", 1), ("here", "here", 3)])
def test_runs_in_tasks_and_plain_ones_continue_each_other(
    first: str | None, then: str | None, shards: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a mark states is made again."""
    use_tasks_here(monkeypatch)
    out, made = tmp_path / "out", []
    killed_after(monkeypatch, shards, lambda: quantize(base, out, first))
    known = finished(out)
    job = master.EncodeJob
    monkeypatch.setattr(master, "EncodeJob", lambda p, t, **more: made.append(p.name) or job(p, t, **more))
    assert quantize(base, out, then).resumed == len(known) >= shards
    assert made and not known & set(made)
    assert folder_bytes(out) == folder_bytes(base / "master")


def test_a_task_of_a_run_that_has_ended_fails(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a driver that is gone: another run may have finished the result since."""
    use_tasks_here(monkeypatch)
    made, out = worker.ShardWork.make, tmp_path / "out"

    def after_another_run(work: worker.ShardWork, number: int) -> Any:
        shutil.rmtree(out)
        shutil.copytree(base / "master", out)
        return made(work, number)

    with monkeypatch.context() as patch:
        patch.setattr(worker.ShardWork, "make", after_another_run)
        with pytest.raises(PqweightsError):
            quantize(base, out, "here")
    assert folder_bytes(out) == folder_bytes(base / "master")


@pytest.mark.parametrize("ray", [None, "here"])
def test_a_strict_run_refuses_in_tasks_as_in_a_plain_run(
    ray: str | None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes itself, leaving nothing, and what an earlier run finished, before it begins."""
    made, out = use_tasks_here(monkeypatch).made, tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("pqweights.convert.plan.exceeds", lambda planned, record: planned.codec is not None)
        with raises(StrictError, "tensor", "`strict`"):
            quantize(base, out, ray, strict=True)
        assert not out.exists()
        killed_after(monkeypatch, 3, lambda: quantize(base, out, "here"))
        made.clear()
        patch.setattr(master, "EncodeJob", lambda planned, tensor, **given: made.append(0))
        with raises(StrictError, "`strict`"):
            quantize(base, out, ray, strict=True)
    assert not made
    assert quantize(base, out, ray).resumed > 0  # a run that is not strict continues
    assert folder_bytes(out) == folder_bytes(base / "master")


@pytest.mark.parametrize(("file", "by_rename"), [("model.safetensors", False), ("tokenizer.json", True)])
def test_a_source_that_changes_between_tasks_ends_the_run(
    by_rename: bool, file: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(base / "source", tmp_path / "source")
    shutil.copytree(base / "source", tmp_path / "former")
    use_tasks_here(monkeypatch)
    path, add, added = tmp_path / "source" / file, Run.add, []

    def changing(self: Run, shard: str, *given: Any) -> None:
        add(self, shard, *given)
        added.append(shard)
        if len(added) == 2:
            data = path.read_bytes()
            target = path.with_suffix(".new") if by_rename else path
            target.write_bytes(data[:-1] + b" ")
            target.rename(path)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "add", changing)
        with raises(SourceChangedError, file):
            quantize(tmp_path, tmp_path / "out", "here")
    assert not (tmp_path / "out/pqweights.json").exists()
    shutil.copy2(tmp_path / "former" / file, path)
    report = quantize(tmp_path, tmp_path / "out", "here")
    assert report.resumed > 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(base / "master")


def test_tasks_continue_in_a_bucket_and_a_lost_shard_is_made_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = "memory://tasks/model"
    put(out, {})
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    killed_after(monkeypatch, 2, lambda: pqweights.quantize(base / "source", out, max_shard_size=SHARD, threads=1))
    ran, publish = use_tasks_here(monkeypatch).made, Run.publish

    def after_a_loss(run: Run) -> None:
        run.store.remove([run.name(next(iter(run.shards)))])
        publish(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "publish", after_a_loss)
        with raises(OutputError, "missing"):
            pqweights.quantize(base / "source", out, max_shard_size=SHARD, ray="here")
    assert "pqweights.json" not in objects(out)
    assert len(ran) == len(list((base / "master").glob("*.safetensors"))) - 2
    pqweights.quantize(base / "source", out, max_shard_size=SHARD, ray="here")
    assert objects(out) == {name: data for name, data in folder_bytes(base / "master").items() if name[-1] != "/"}
    assert folder_bytes(tmp_path / "scratch") == {}
