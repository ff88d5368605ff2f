"""Runs in parts: pickled tasks give the bytes of plain runs, and parts and plain runs continue each other."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import language_models
import pytest
from helpers import folder_bytes
from hypothesis import given
from hypothesis import strategies as st
from memory_storage import objects, put
from parts_here import TasksHere, use_parts_here
from random_moments import write_random_moments

import pqweights
from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.distributed import engine
from pqweights.distributed.parts import grouped
from pqweights.distributed.rewriting import DistributedRewrite
from pqweights.errors import OutputError, SourceChangedError, StrictError
from pqweights.rewrite import part_files, parts
from pqweights.rewrite.file_lock import take_lock
from pqweights.rewrite.part_files import PART_LOCK, part_prefix
from pqweights.rewrite.staging import ShardUploads, Staging
from pqweights.rewrite.workspace import Workspace

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

SHARD = 30_000
FEW = "model.layers.*.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, its moments and its master."""
    folder = tmp_path_factory.mktemp("parts")
    language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder / "source"))
    write_random_moments(folder / "source", folder / "moments.safetensors")
    pqweights.quantize(folder / "source", folder / "master", max_shard_size=SHARD)
    return folder


def both(monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Path) -> list[int]:
    """Run plainly and in parts, compare every byte, and return the parts."""
    run(tmp_path / "plain", ray=None)
    ran = use_parts_here(monkeypatch)
    run(tmp_path / "parts", ray="here")
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "plain")
    assert not (tmp_path / "parts" / WORK_FOLDER).exists()
    return ran


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fold": "equalize"},
        {"fold": "equalize", "calibration": "moments.safetensors"},
        {"target_bpw": 4.5},
        {"recipe": "t4", "keep": FEW},
        {"bits": 3, "set_bits": {FEW: 6}},
    ],
    ids=str,
)
def test_masters_in_parts_have_the_bytes_of_plain_ones(
    options: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "calibration" in options:
        options = options | {"calibration": base / options["calibration"]}
    ran = both(
        monkeypatch,
        lambda out, ray: pqweights.quantize(base / "source", out, max_shard_size=SHARD, ray=ray, **options),
        tmp_path,
    )
    assert len(ran) == len(set(ran)) > 2


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("bf16", {}),
        ("bf16", {"dtype": "source"}),
        ("gguf", {"type": "q4_k_m"}),
        ("gguf", {"target_size": 500_000}),
        ("gguf", {"type": "q3_k_l", "imatrix": True, "calibration": "moments.safetensors"}),
        ("gguf", {"type": "q3_k_m", "calibration": "moments.safetensors"}),
        ("torchao-int4", {"group_size": 32}),
        ("vllm", {"group_size": 32}),
        ("vllm", {"group_size": 32, "rounding": "gptq", "calibration": "moments.safetensors"}),
        ("vllm", {"group_size": 32, "source": "source"}),
        ("mlx", {"group_size": 32}),
        ("mlx", {"group_size": 32, "fold": "equalize"}),
    ],
    ids=str,
)
def test_exports_in_parts_have_the_bytes_of_plain_ones(
    target: str, options: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: base / options[name] for name in ("calibration", "source") if name in options}
    ran = both(
        monkeypatch,
        lambda out, ray: pqweights.export(
            base / "master", out, target, max_shard_size=SHARD, ray=ray, **{**options, **paths}
        ),
        tmp_path,
    )
    assert len(ran) == len(set(ran)) > 1


class Killed(BaseException):
    """A stand-in for a kill."""


def killed_after(monkeypatch: pytest.MonkeyPatch, tensors: int, run: Any) -> None:
    """Kill a run when it notes its next tensor after some."""
    left, record = iter(range(tensors)), Workspace.record

    def record_or_die(self: Workspace, finished: Any) -> None:
        if next(left, None) is None:
            raise Killed
        record(self, finished)

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "record", record_or_die)
        with pytest.raises(Killed):
            run()


def quantize(base: Path, out: Path, ray: str | None, **options: Any) -> Any:
    return pqweights.quantize(base / "source", out, max_shard_size=SHARD, ray=ray, threads=1, **options)


@pytest.mark.parametrize("tensors", range(0, 12, 2))
@pytest.mark.parametrize(("first", "then"), [("here", None), (None, "here"), ("here", "here")])
def test_parts_and_plain_runs_continue_each_other(
    first: str | None, then: str | None, tensors: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_parts_here(monkeypatch)
    monkeypatch.setattr("pqweights.rewrite.stream.SAVE_SECONDS", 0.0)
    killed_after(monkeypatch, tensors, lambda: quantize(base, tmp_path / "out", first))
    assert (tmp_path / "out" / WORK_FOLDER / JOURNAL_FILE).exists()
    report = quantize(base, tmp_path / "out", then)
    assert report.resumed >= tensors // 2  # a tensor may be noted twice: by its part, and by the run
    assert folder_bytes(tmp_path / "out") == folder_bytes(base / "master")


def test_a_part_goes_on_from_what_another_process_left(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of a part counts, though the run has not joined it, and nothing that it states is made again."""
    use_parts_here(monkeypatch)
    monkeypatch.setattr("pqweights.rewrite.stream.SAVE_SECONDS", 0.0)
    killed_after(monkeypatch, 3, lambda: quantize(base, tmp_path / "out", "here"))
    work = tmp_path / "out" / WORK_FOLDER
    lines = [line for path in work.glob("part-*-journal.jsonl") for line in path.read_text().splitlines()]
    lines += (work / JOURNAL_FILE).read_text().splitlines()[1:]
    finished = {json.loads(line)["name"] for line in lines}
    assert finished
    made: list[str] = []
    job = pqweights.quantizing.Quantize.job
    monkeypatch.setattr(pqweights.quantizing.Quantize, "job", lambda self, p, t: made.append(p.name) or job(self, p, t))
    quantize(base, tmp_path / "out", "here")
    assert made
    assert not finished & set(made)


def test_a_run_waits_for_parts_that_other_processes_write(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_parts_here(monkeypatch)
    killed_after(monkeypatch, 2, lambda: quantize(base, tmp_path / "out", "here"))
    out = tmp_path / "out"
    lock = take_lock(out / WORK_FOLDER / (part_prefix(0) + PART_LOCK), out)
    monkeypatch.setattr(part_files, "WAIT_SECONDS", 0.0)
    with pytest.raises(OutputError, match="another run is writing there"):
        quantize(base, out, None)
    os.close(lock)
    quantize(base, out, None)
    assert folder_bytes(out) == folder_bytes(base / "master")


def test_a_part_of_a_run_that_has_ended_is_refused(base: Path, tmp_path: Path) -> None:
    inputs = parts.PartInputs(number=0, work="other", key="", token="", shards={}, known={})
    for out in (tmp_path / "nothing", base / "master"):
        with pytest.raises(OutputError, match="no longer under way"), parts.open_part(out, inputs):
            pass
        assert not (out / WORK_FOLDER).exists()


def test_what_a_strict_run_refuses_in_a_part_is_refused_as_in_a_plain_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_parts_here(monkeypatch)
    monkeypatch.setattr("pqweights.quantizing.exceeds", lambda planned, record: planned.codec is not None)
    messages = []
    for ray in (None, "here"):
        with pytest.raises(StrictError) as refused:
            quantize(base, tmp_path / "out", ray, strict=True)
        messages.append(str(refused.value).split(": relative error")[0].split("'")[0])
        assert not (tmp_path / "out").exists()
    assert messages[0] == messages[1]


@pytest.mark.parametrize("ray", [None, "here"])
def test_a_strict_run_refuses_what_an_earlier_one_finished_before_it_begins(
    ray: str | None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, out = use_parts_here(monkeypatch), tmp_path / "out"
    monkeypatch.setattr("pqweights.rewrite.stream.SAVE_SECONDS", 0.0)
    killed_after(monkeypatch, 12, lambda: quantize(base, out, "here"))
    monkeypatch.setattr("pqweights.quantizing.exceeds", lambda planned, record: planned.codec is not None)
    ran.clear()
    made: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(pqweights.quantizing.Quantize, "job", lambda self, planned, tensor: made.append(planned.name))
        with pytest.raises(StrictError, match="--strict"):
            quantize(base, out, ray, strict=True)
    assert not ran and not made
    assert quantize(base, out, ray).resumed > 0  # a run that is not strict continues
    assert folder_bytes(out) == folder_bytes(base / "master")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("by_rename", [False, True])
def test_a_source_that_changes_between_parts_ends_the_run(
    by_rename: bool, file: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(base / "source", tmp_path / "source")
    shutil.copytree(base / "source", tmp_path / "former")
    use_parts_here(monkeypatch)
    path, join, joined = tmp_path / "source" / file, DistributedRewrite._join, []

    def changing(self: DistributedRewrite, task: Any, result: Any) -> None:
        join(self, task, result)
        joined.append(task.number)
        if len(joined) == 2:
            data = path.read_bytes()
            target = path.with_suffix(".new") if by_rename else path
            target.write_bytes(data[:-1] + b" ")
            target.rename(path)

    with monkeypatch.context() as patch:
        patch.setattr(DistributedRewrite, "_join", changing)
        with pytest.raises(SourceChangedError, match=f"{file}: the source changed while .*--overwrite"):
            quantize(tmp_path, tmp_path / "out", "here")
    assert not (tmp_path / "out/pqweights.json").exists()
    shutil.copy2(tmp_path / "former" / file, path)
    report = quantize(tmp_path, tmp_path / "out", "here")
    assert report.resumed > 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(base / "master")


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50), st.integers(1, 200))
def test_files_are_grouped_in_order_and_only_large_ones_are_alone(sizes: list[int], most: int) -> None:
    runs = grouped(sizes, most)
    assert [place for run in runs for place in run] == list(range(len(sizes)))
    assert all(run for run in runs)
    assert all(sum(sizes[run.start : run.stop]) <= most or len(run) == 1 for run in runs)
    pairs = itertools.pairwise(runs)
    assert all(sum(sizes[a.start : b.start + 1]) > most for a, b in pairs)


def test_shards_that_a_killed_run_had_not_sent_are_sent_by_one_in_parts(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, shards = "memory://parts/model", {path.name for path in (base / "master").glob("*.safetensors")}
    put(out, {})
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    with monkeypatch.context() as patch:
        patch.setattr(ShardUploads, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pqweights.quantize(base / "source", out, max_shard_size=SHARD, threads=1)
    finished = {path.name for path in (tmp_path / "scratch").rglob("*.safetensors")}
    assert finished
    assert not objects(out).keys() & {f"{WORK_FOLDER}/{name}" for name in shards}
    ran = use_parts_here(monkeypatch)
    monkeypatch.setattr(engine, "tidy_nodes", lambda ray, place: pickle.loads(place).tidy_scratch())
    pqweights.quantize(base / "source", out, max_shard_size=SHARD, ray="here")
    assert len(ran) == len(shards) - len(finished)
    assert objects(out) == {name: data for name, data in folder_bytes(base / "master").items() if name[-1] != "/"}
    assert folder_bytes(tmp_path / "scratch") == {}


def interrupted(*given: object) -> None:
    raise KeyboardInterrupt


def test_a_result_without_one_of_its_shards_is_not_published(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = "memory://parts/model"
    put(out, {})
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    publish = Staging.publish

    def after_a_loss(staging: Staging, shards: Mapping[str, int]) -> None:
        staging.folder.remove([staging.name(next(iter(shards)))])
        publish(staging, shards)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "publish", after_a_loss)
        with pytest.raises(OutputError, match=r"shard .* is no longer there as this run"):
            pqweights.quantize(base / "source", out, max_shard_size=SHARD)
    assert "pqweights.json" not in objects(out)
    pqweights.quantize(base / "source", out, max_shard_size=SHARD)
    assert objects(out) == {name: data for name, data in folder_bytes(base / "master").items() if name[-1] != "/"}


def test_parts_of_an_earlier_run_are_not_begun(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that has the folder is another process of the same command."""
    seen = []

    def begin(self: Any, tasks: Any, take: Any) -> None:
        work = tmp_path / "out" / WORK_FOLDER
        order = tasks[0].said
        for inputs in (order.inputs, replace(order.inputs, token="that of an earlier one")):
            try:
                with parts.open_part(tmp_path / "out", inputs):
                    seen.append("begun")
            except OutputError as error:
                seen.append(str(error))
        assert len(list(work.glob("run-*"))) == 1
        raise KeyboardInterrupt

    use_parts_here(monkeypatch)
    monkeypatch.setattr(TasksHere, "run", begin)
    with pytest.raises(KeyboardInterrupt):
        pqweights.quantize(base / "source", tmp_path / "out", max_shard_size=SHARD, ray="here")
    assert seen == ["begun", f"{tmp_path / 'out'}: the run that this part belongs to is no longer under way there"]
