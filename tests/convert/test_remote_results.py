"""Results in object storage: the same bytes, nothing visible too early, and the same refusals as for folders."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import quantize
from commands import answer, done, raises, refused
from converting import SHARD_BYTES, command
from helpers import folder_bytes, run_command
from memory_storage import Operation, Place, each_operation, objects, put, run_into, visible

from pqweights.common.options import Options
from pqweights.errors import OptionError, OutputError
from pqweights.planning.recipe import load_recipe
from pqweights.storage import open_store
from pqweights.storage.store import Store
from pqweights.targets.master import plan_quantize

OUT = "memory://results/model"


@pytest.fixture(autouse=True)
def _empty_storage() -> None:
    put(OUT, {})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """One run into OUT."""
    return lambda work, **options: run_into(work, OUT, tmp_path / "scratch", monkeypatch, **options)


def test_objects_are_the_files_of_the_local_result(
    source: Path, final: dict[str, bytes], tmp_path: Path, run: Callable[..., Any]
) -> None:
    report = run(command(source), threads=4)
    assert objects(OUT) == final and not report.already_done and report.resumed == 0
    run_command(command(source), tmp_path / "master")
    export = {"export": str(tmp_path / "master"), "target": "bf16", "max_shard_bytes": 2 * SHARD_BYTES}
    run_command(export, tmp_path / "export")
    put(OUT, {})
    run(export)
    assert objects(OUT) == Place(tmp_path / "export").files()
    assert folder_bytes(tmp_path / "scratch") == {}


def watching(look: Callable[[Operation], None]) -> Any:
    """Look at the storage after each of its operations."""

    def act(operation: Operation, do: Callable[[], Any]) -> Any:
        result = do()
        look(operation)
        return result

    return each_operation(act)


def test_finished_result_is_left_alone(source: Path, run: Callable[..., Any]) -> None:
    run(command(source))
    operations: list[Operation] = []
    with watching(operations.append):
        report = run(command(source))
    assert report.already_done
    assert report.source_bytes_read < 60_000
    assert {name for name, _ in operations} <= {"find", "info", "cat_file", "modified"}


def test_files_are_complete_when_they_are_visible(
    source: Path, final: dict[str, bytes], run: Callable[..., Any]
) -> None:
    """Whoever lists the place at any moment finds only what stays; the manifest comes last."""
    states: list[set[str]] = []

    def look(operation: Operation) -> None:
        assert visible(OUT).items() <= final.items()
        states.append(set(visible(OUT)))

    with watching(look):
        run(command(source))
    weights = {name for name in final if name.endswith(".safetensors")}
    assert len({frozenset(state) for state in states}) == len(final) + 1
    for state in states:
        assert "pqweights.json" not in state or state == final.keys()
        assert "config.json" not in state or weights <= state


def test_few_shards_are_on_this_machine(source: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    """Slow uploads hold the run back."""
    held: list[int] = []
    with watching(lambda operation: held.append(len(list((tmp_path / "scratch").rglob("model-*"))))):
        report = run({"quantize": str(source), "max_shard_bytes": 1000, "recipe": "q5"})
    assert len(report.plan.shards) > 5
    assert max(held) == 2


def test_result_that_is_replaced_stays_until_the_new_one_is_complete(
    source: Path, final: dict[str, bytes], run: Callable[..., Any]
) -> None:
    run(command(source, max_shard_bytes=SHARD_BYTES // 2, recipe="q4"))
    old, at_first_change = objects(OUT), list[set[str]]()
    assert old.keys() - final.keys()
    with raises(OutputError, OUT, "max_shard_size"):
        run(command(source))
    assert objects(OUT) == old

    def look(operation: Operation) -> None:
        if visible(OUT) != old and not at_first_change:
            at_first_change.append({name.rpartition("/")[2] for name in objects(OUT)})

    with watching(look):
        run(command(source, overwrite=True))
    assert {name for name in final if name.endswith(".safetensors")} <= at_first_change[0]
    assert objects(OUT) == final


def test_manifest_cannot_make_overwrite_remove_objects_elsewhere(source: Path, run: Callable[..., Any]) -> None:
    run(command(source, recipe="q4"))
    put("memory://results/other", {"model.txt": b"another"})
    manifest = json.loads(objects(OUT)["pqweights.json"])
    manifest["files"]["../other/model.txt"] = {"bytes": 7, "sha256": "0" * 64}
    put(OUT, objects(OUT) | {"pqweights.json": json.dumps(manifest).encode()})
    run(command(source, overwrite=True))
    assert objects("memory://results/other") == {"model.txt": b"another"}


def test_scratch_folder_needs_room_for_two_shards(
    source: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_quantize(source, load_recipe("q5"), Options(max_shard_size=SHARD_BYTES))
    room = sum(sorted(shard.file_bytes for shard in plan.shards)[-2:])
    assert room < plan.output_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room - 1))
    with raises(OutputError, room):
        run(command(source))
    assert objects(OUT) == {}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room))
    run(command(source))


def test_stores_of_texts_and_paths(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)) == open_store(f"file://{tmp_path}") == Store(tmp_path)
    assert open_store(Path("s3/bucket")) == Store(Path("s3/bucket"))
    assert str(open_store("s3://bucket/model/")) == "s3://bucket/model"
    store = open_store("s3://bucket/model")
    copy = pickle.loads(pickle.dumps(store))
    assert (str(copy), copy.work) == (str(store), store.work)
    with raises(OptionError, "s3"):
        open_store(Path("s3://bucket/model"))
    with raises(OptionError, "hf://org/name"):
        open_store("hf://org/name")


@pytest.mark.parametrize("out", ["memory://results", "memory://results/source", "memory://results/source/q5"])
def test_output_must_lie_outside_the_source(out: str, source: Path, run: Callable[..., Any]) -> None:
    put("memory://results/source", Place(source).files())
    with raises(OutputError, out, "memory://results/source"):
        quantize("memory://results/source", out, load_recipe("q5"))


def test_source_and_result_in_object_storage(
    source: Path, final: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as of local folders; a change of the source shows in its time."""
    address, files = "memory://results/source", Place(source).files()
    put(address, files)
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path))
    options = Options(max_shard_size=SHARD_BYTES)
    assert not quantize(address, OUT, load_recipe("q5"), options=options).already_done
    assert objects(OUT) == final
    assert quantize(address, OUT, load_recipe("q5"), options=options).already_done
    weights = next(name for name in files if name.endswith(".safetensors"))
    data = bytearray(files[weights])
    data[len(data) // 2] ^= 1
    put(address, files | {weights: bytes(data)})
    with raises(OutputError, OUT, "`overwrite`"):
        quantize(address, OUT, load_recipe("q5"), options=options)


def test_commands_take_addresses(
    source: Path, final: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    words = ("quantize", source, OUT, "--max-shard-size", SHARD_BYTES, "--quiet")
    planned = answer(*words, "--dry-run")["totals"]
    assert objects(OUT) == {} and 0 < planned["scratch_bytes"] < planned["output_bytes"]
    assert planned["peak_memory_bytes"] > answer("plan", source)["totals"]["peak_memory_bytes"]
    text = done("quantize", source, OUT, "--dry-run").stdout
    assert "in object storage" in text and "of disk space on this machine" in text
    assert answer(*words)["output"] == OUT
    assert objects(OUT) == final
    assert f"{OUT}: " in done(*words[:-1]).stderr
    assert "pqweights push" in refused("quantize", source, "hf://org/name", code=2)
