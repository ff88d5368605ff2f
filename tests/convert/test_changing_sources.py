"""Sources that change or fail while they are read: no result mixes two of them, and what is finished is not lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import quantize
from commands import raises
from converting import Killed, command, finished, interrupt, marks, watched
from fsspec.implementations.memory import MemoryFileSystem
from helpers import folder_bytes, run_command
from memory_storage import put

from pqweights.checkpoint import storage
from pqweights.convert.run import Run
from pqweights.errors import MasterError, SourceChangedError, SourceError, SourceReadError
from pqweights.planning.recipe import load_recipe
from pqweights.storage.store import Store
from pqweights.targets import master

FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def flipped(path: Path) -> bytes:
    """The content of a file with one bit changed in its middle, which no fingerprint covers in a large file."""
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    return bytes(data)


def in_place(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.write(flipped(path))


def by_rename(path: Path) -> None:
    path.with_suffix(".new").write_bytes(flipped(path))
    path.with_suffix(".new").rename(path)


def by_rename_with_the_same_time(path: Path) -> None:
    status = path.stat()
    by_rename(path)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


CHANGES = [in_place, by_rename, by_rename_with_the_same_time, Path.unlink]


def once(act: Callable[[], None], at: int = 1) -> Callable[..., None]:
    """A function that shows progress, which does something when so many tensors were named.

    How often it is called for a tensor depends on the threads.
    """
    named, acts = set[str](), iter([act])

    def progress(done: int, total: int, name: str) -> None:
        named.add(name)
        if len(named) == at:
            next(acts, lambda: None)()

    return progress


@pytest.mark.parametrize("file", [FIRST, LAST, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("change", CHANGES)
def test_source_that_changes_during_a_run_ends_it(
    change: Callable[[Path], None], file: str, own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place or under its name, before or after it was read, with its file still open or not."""
    if (own_source / file).stat().st_size < 2000:
        (own_source / file).write_text("{" + " " * 4000 + "}")
    monkeypatch.setattr(storage, "MOST_OPEN_FILES", 8 if (CHANGES.index(change) + len(file)) % 2 else 1)
    out, act = tmp_path / "out", once(lambda: change(own_source / file))
    with raises(SourceChangedError, file):
        run_command(command(own_source, progress=act), out)
    assert not (out / "pqweights.json").exists()


def test_last_moment_is_checked(own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes when all tensors are written, and only small files are left."""
    write, out = Store.write, tmp_path / "out"

    def changing(self: Store, name: str, pieces: Any) -> Any:
        if name == "config.json":
            in_place(own_source / FIRST)
        return write(self, name, pieces)

    monkeypatch.setattr(Store, "write", changing)
    with raises(SourceChangedError, FIRST):
        run_command(command(own_source), out)
    assert not (out / "pqweights.json").exists()


def test_finished_tensors_stay_for_the_source_as_it_was(
    own_source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    former, changed, out = tmp_path / "former", tmp_path / "changed", tmp_path / "out"
    shutil.copytree(own_source, former)
    with pytest.raises(SourceChangedError):
        run_command(command(own_source, progress=once(lambda: by_rename(own_source / LAST), at=8)), out)
    with raises(SourceChangedError, LAST, "`overwrite`"):
        run_command(command(own_source), out)
    shutil.copytree(own_source, changed)
    shutil.copy2(former / LAST, own_source / LAST)
    again = shutil.copytree(out, tmp_path / "again")
    assert run_command(command(own_source), again).resumed > 0
    assert folder_bytes(again) == undisturbed
    for folder in (out, tmp_path / "fresh"):
        run_command(command(changed, overwrite=True), folder)
    assert folder_bytes(out) == folder_bytes(tmp_path / "fresh") != undisturbed


@pytest.mark.parametrize("most", [2, 99])
@pytest.mark.parametrize(("file", "at"), [(FIRST, 1), (FIRST, 4), (LAST, 1)])
def test_no_tensor_of_a_changed_file_is_recorded(
    most: int, file: str, at: int, own_source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """The file gets its old content and time again: what was read meanwhile must not count.

    most: so many shards are recorded at most before the run is killed, and cannot notice the change at its end
    """
    status, data = (own_source / file).stat(), (own_source / file).read_bytes()
    out, add = tmp_path / "out", Run.add

    def add_or_die(*given: Any) -> None:
        add(*given)
        if len(marks(out)) == most:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "add", add_or_die)
        with pytest.raises((SourceChangedError, Killed)):
            run_command(command(own_source, progress=once(lambda: in_place(own_source / file), at)), out)
    (own_source / file).write_bytes(data)
    os.utime(own_source / file, ns=(status.st_mtime_ns, status.st_mtime_ns))
    run_command(command(own_source), out)
    assert folder_bytes(out) == undisturbed


@pytest.mark.parametrize("changed", ["master", "source"])
def test_every_checkpoint_that_is_read_is_checked(changed: str, own_source: Path, tmp_path: Path) -> None:
    master, out = tmp_path / "master", tmp_path / "out"
    run_command({"quantize": str(own_source)}, master)
    file = master / "model-00001-of-00001.safetensors" if changed == "master" else own_source / FIRST
    work: dict[str, Any] = {"export": str(master if changed == "master" else own_source), "target": "vllm"}
    with raises((SourceChangedError, MasterError), file.name):  # the bytes of a master have hashes
        run_command(work | {"progress": once(lambda: in_place(file))}, out)
    assert not (out / "pqweights.json").exists()


@pytest.mark.parametrize("file", [FIRST, "tokenizer.json", "config.json"])
def test_object_that_is_replaced_ends_the_run(file: str, own_source: Path, tmp_path: Path) -> None:
    """A storage that says nothing of versions in its replies is asked before the result is published."""
    address = "memory://changing/source"
    put(address, {path.relative_to(own_source).as_posix(): path.read_bytes() for path in own_source.rglob("*.*")})
    data = flipped(own_source / FIRST) if file == FIRST else b"{}"
    change = once(lambda: MemoryFileSystem(skip_instance_cache=True).pipe_file(f"/changing/source/{file}", data))
    with raises(SourceChangedError, f"{address}/{file}"):
        quantize(address, tmp_path / "out", load_recipe("q5"), threads=2, progress=change)
    assert not (tmp_path / "out/pqweights.json").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_run_continues_after_a_read_that_failed(
    fails: bool, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read returns nothing, as of a file server that was cut off, or fails, when shards are finished."""
    out = tmp_path / "out"

    def read(*given: Any) -> int:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 0

    with monkeypatch.context() as patch:
        cut_off = once(lambda: patch.setattr(os, "preadv", read), 6)
        with raises(SourceReadError, "-of-00002.safetensors"):
            run_command(command(source, progress=cut_off), out, threads=1)
    known = finished(out)
    report, begun = watched(monkeypatch, command(source), out)
    assert known and report.resumed == len(known) and not begun & known
    assert folder_bytes(out) == undisturbed


def test_bad_weight_leaves_the_tensors_of_earlier_runs(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(planned: Any, tensor: Any, **given: Any) -> Any:
        raise SourceError(f"tensor {planned.name!r}: NaN")

    interrupt(monkeypatch, command(source), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(master, "encode", bad)
        with raises(SourceError, "NaN"):
            run_command(command(source), tmp_path / "out")
    assert run_command(command(source), tmp_path / "out").resumed == 5
    assert folder_bytes(tmp_path / "out") == undisturbed
