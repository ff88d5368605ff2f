"""fsspec's object storage in memory, whose operations tests watch, count and let fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from converting import Killed
from fsspec.implementations.memory import MemoryFileSystem
from helpers import folder_bytes, run_command

from pqweights.convert.report import RewriteReport
from pqweights.convert.run import parse_mark

CHANGES = ("pipe_file", "put_file", "cp_file", "rm_file")
READS = ("find", "info", "cat_file")
Operation = tuple[str, str]  # what is done, and to which object

STORE = MemoryFileSystem.store


def objects(address: str) -> dict[str, bytes]:
    """Every object below an address, by relative name."""
    root = "/" + address.removeprefix("memory://").strip("/") + "/"
    return {name.removeprefix(root): file.getvalue() for name, file in list(STORE.items()) if name.startswith(root)}


def visible(address: str) -> dict[str, bytes]:
    """The objects of the result, without those of the work folder."""
    return {name: data for name, data in objects(address).items() if not name.startswith(".pqweights/")}


def put(address: str, files: dict[str, bytes]) -> None:
    """Write objects below an address, in place of all that were there."""
    root = address.removeprefix("memory://").strip("/")
    system = MemoryFileSystem(skip_instance_cache=True)
    for name in objects(address):
        system.rm_file(f"/{root}/{name}")
    for name, data in files.items():
        system.pipe_file(f"/{root}/{name}", data)


class Place:
    """Where a result goes: a folder, or a bucket in memory."""

    def __init__(self, out: Path | str) -> None:
        self.out = out

    def files(self) -> dict[str, bytes]:
        """Every file by name, those of an unfinished run included."""
        if isinstance(self.out, str):
            return objects(self.out)
        return {name: data for name, data in folder_bytes(self.out).items() if not name.endswith("/")}

    def change(self, changes: dict[str, bytes | None]) -> None:
        """Write files, or remove them where there is None."""
        files = self.files() | changes
        if isinstance(self.out, str):
            put(self.out, {name: data for name, data in files.items() if data is not None})
            return
        for name, data in changes.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_bytes(data or b"")
            if data is None:
                (self.out / name).unlink()


def run_into(
    work: dict[str, Any], address: str, scratch: Path, monkeypatch: pytest.MonkeyPatch, threads: int = 2
) -> RewriteReport:
    """One quantize or export into an address, from a machine with this scratch folder."""
    with monkeypatch.context() as patch:
        patch.setenv("PQWEIGHTS_SCRATCH", str(scratch))
        return run_command(work, address, threads=threads)


@contextmanager
def each_operation(act: Callable[[Operation, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have every operation done by `act`, which is given what it is and what does it. One is done at a time."""
    nested = threading.local()
    originals = {name: getattr(MemoryFileSystem, name) for name in (*CHANGES, *READS)}

    def patched(name: str) -> Callable[..., Any]:
        def operation(self: MemoryFileSystem, *paths: Any, **options: Any) -> Any:
            def do() -> Any:
                return originals[name](self, *paths, **options)

            if getattr(nested, "inside", False):
                return do()
            nested.inside = True
            try:
                return act((name, str(paths[1] if name in ("put_file", "cp_file") else paths[0])), do)
            finally:
                nested.inside = False

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(MemoryFileSystem, name, patched(name))
        yield


class Kill:
    """Ends the process, as far as the storage can tell, before or after the change with a number (from 1).

    seen: the changes until then
    """

    def __init__(self, number: int = 0, *, after: bool = False) -> None:
        self.number, self.after, self.seen = number, after, list[Operation]()

    def __call__(self, operation: Operation, do: Callable[[], Any]) -> Any:
        """Do a change of the storage, unless the process is killed before it."""
        if 0 < self.number <= len(self.seen):
            raise Killed
        if operation[0] not in CHANGES:
            return do()
        self.seen.append(operation)
        if len(self.seen) == self.number:
            if self.after:
                do()
            raise Killed
        return do()


def staged_tensors(address: str) -> set[str]:
    """The tensors of the shards that are marked as complete."""
    marks = (data for name, data in objects(address).items() if name.endswith(".safetensors.json"))
    return {record.name for mark in map(parse_mark, marks) if mark is not None for record in mark[0]}
