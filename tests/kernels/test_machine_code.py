"""The machine code of the CPU kernels: compiled once, kept, found again; never trusted when damaged, never required."""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import groups_reference
import llvmlite.binding as llvm
import numpy as np
import pytest
import run_kernels
from blocks import examples
from hypothesis import given
from hypothesis import strategies as st

from pqweights.kernels import cpu

DIGESTS = run_kernels.DIGESTS | groups_reference.DIGESTS
KERNELS = tuple(DIGESTS)
QUICK = (
    "round",
    "round_floats",
    "rotate",
    "pack_bits",
    "pack_tiles",
)  # compiled in a second, together; "fit" takes twenty
# What compiled code may ask of its process: C's memory and mathematics.
LIBC = {"memcpy", "memmove", "memset", "sqrtf", "rintf"}


# run_kernels.py with the kernels of groups, too; with ASSEMBLY, it keeps there how what it compiles reads.
PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
import groups_reference, llvmlite.binding as llvm, run_kernels
from pqweights.kernels import cpu

if "ASSEMBLY" in os.environ:
    names, compiled, emit_object = [], cpu._compiled, llvm.TargetMachine.emit_object

    def compiled_with_a_name(name):
        names.append(name)
        return compiled(name)

    def emit_both(machine, module):
        text = machine.emit_assembly(module.clone())
        (Path(os.environ["ASSEMBLY"]) / names[-1]).write_text(text)
        return emit_object(machine, module)

    cpu._compiled, llvm.TargetMachine.emit_object = compiled_with_a_name, emit_both
run_kernels.DIGESTS |= groups_reference.DIGESTS
run_kernels._main()
"""


def start(cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The kernels in a fresh process, which keeps machine code in `cache`; warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(Path(run_kernels.__file__).parent), *arguments]
    variables = os.environ | {"PQWEIGHTS_CACHE": str(cache)} | environment
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Its answer; it may have said nothing else."""
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    answer: dict[str, Any] = json.loads(output)
    return answer


def run(cache: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    return finish(start(cache, *arguments, **environment))


@functools.cache
def digest(kernel: str) -> str:
    """By the reference; for "round" and "round_floats", which have none, by this process."""
    return DIGESTS[kernel]("reference")


def expected(*kernels: str) -> dict[str, str]:
    return {kernel: digest(kernel) for kernel in kernels}


def names(folder: Path) -> list[str]:
    """Without what is not the same on every machine."""
    return sorted(path.name.partition("-")[0] + path.suffix for path in folder.iterdir())


@dataclass(frozen=True)
class ColdRuns:
    """Two processes, the first of which found an empty cache and decoded; the second did all that is left but "fit"."""

    folder: Path
    answers: list[dict[str, Any]]
    kept: list[list[str]]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> ColdRuns:
    folder = tmp_path_factory.mktemp("cold") / "not" / "there" / "yet"
    runs = ColdRuns(folder, [], [])
    for kernels in (["decode"], ["encode", *QUICK]):
        runs.answers.append(run(folder, *kernels))
        runs.kept.append(names(folder))
    # What this process, or an earlier one, compiled.
    symbol, machine_code = cpu._kept("fit") or cpu._compiled("fit")
    (folder / cpu._cache_name("fit")).write_bytes(cpu._packed(symbol, machine_code))
    return runs


def kept_file(folder: Path, kernel: str) -> Path:
    (path,) = folder.glob(f"{kernel}-*.kernel")
    return path


# --- kept and found ---


def test_a_cold_run_compiles_and_keeps_the_kernels_that_it_used(cold: ColdRuns) -> None:
    assert all("numba" in answer["imported"] for answer in cold.answers)
    assert [answer["digests"] for answer in cold.answers] == [expected("decode"), expected("encode", *QUICK)]
    assert cold.kept == [["decode.kernel"], sorted(f"{name}.kernel" for name in ("decode", "encode", *QUICK))]


def test_a_warm_run_needs_no_numba_and_computes_the_same(cold: ColdRuns) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cold.folder.iterdir()}
    warm = run(cold.folder, *KERNELS)
    assert not {"numba", "torch", "triton"} & set(warm["imported"])
    assert "llvmlite" in warm["imported"]
    assert warm["digests"] == expected(*KERNELS)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cold.folder.iterdir()} == before


def test_kept_code_runs_where_numba_cannot_be_imported(cold: ColdRuns) -> None:
    """Nothing of numba's runtime is left in it: an address that it lacked would end the process."""
    assert run(cold.folder, "--without", "numba", *KERNELS)["digests"] == expected(*KERNELS)


def undefined_symbols(machine_code: bytes) -> set[str]:
    """What an object file expects to find in the process (ELF, chapter 4: section headers, symbol table)."""
    if machine_code[:6] != b"\x7fELF\x02\x01":
        pytest.skip("this system's object files are no little-endian 64-bit ELF")
    (table,) = struct.unpack_from("<Q", machine_code, 0x28)
    size, count = struct.unpack_from("<HH", machine_code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", machine_code, table + i * size) for i in range(count)]
    found = set()
    for _, kind, _, _, start, length, link, _, _, entry in sections:
        if kind == 2:
            texts = sections[link][4]
            for at in range(start + entry, start + length, entry):
                name, _, _, section = struct.unpack_from("<IBBH", machine_code, at)
                if section == 0:
                    found.add(machine_code[texts + name : machine_code.index(b"\0", texts + name)].decode())
    return found


def needed_by(folder: Path) -> dict[str, set[str]]:
    """Undefined symbols of the kernels that a folder keeps."""
    result = {}
    for kernel in KERNELS:
        found = cpu._unpacked(kept_file(folder, kernel).read_bytes())
        assert found is not None
        result[kernel] = undefined_symbols(found[1])
    return result


def test_machine_code_refers_to_nothing_but_libc(cold: ColdRuns) -> None:
    assert set().union(*needed_by(cold.folder).values()) <= LIBC


def test_two_processes_that_compile_at_once_both_work(tmp_path: Path) -> None:
    processes = [start(tmp_path / "cache", "decode") for _ in range(2)]
    for answer in [finish(process) for process in processes]:
        assert answer["digests"] == expected("decode")
        assert "numba" in answer["imported"]  # neither waited for the other
    assert names(tmp_path / "cache") == ["decode.kernel"]
    assert cpu._unpacked(kept_file(tmp_path / "cache", "decode").read_bytes()) is not None


def test_a_run_that_can_keep_nothing_works(tmp_path: Path) -> None:
    """No folder can be made below a file, not even by root."""
    (tmp_path / "file").write_bytes(b"")
    assert run(tmp_path / "file" / "cache", "decode")["digests"] == expected("decode")
    assert (tmp_path / "file").read_bytes() == b""


# --- other processors ---

FUSING = "this one without AVX-512"  # which can fuse, where this one can
OTHER_PROCESSORS: dict[str, tuple[list[str], dict[str, str]]] = {
    "a plain one": ([], {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
    FUSING: (["--hide", "avx512"], {}),
}


@dataclass(frozen=True)
class OtherRun:
    """All kernels compiled for another processor: the answer, and how machine code that could fuse reads, by kernel."""

    cache: Path
    answer: dict[str, Any]
    assembly: dict[str, str]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OtherRun]:
    """Both at once: compiling takes seconds."""
    started = []
    for processor, (arguments, environment) in OTHER_PROCESSORS.items():
        cache, assembly = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("assembly")
        if processor == FUSING:
            environment = environment | {"ASSEMBLY": str(assembly)}
        started.append((cache, assembly, start(cache, *arguments, *KERNELS, **environment)))
    return {
        processor: OtherRun(cache, finish(process), {path.name: path.read_text() for path in assembly.iterdir()})
        for processor, (cache, assembly, process) in zip(OTHER_PROCESSORS, started, strict=True)
    }


@pytest.mark.parametrize("processor", OTHER_PROCESSORS)
def test_code_for_another_processor_gives_the_same_bytes(processor: str, others: dict[str, OtherRun]) -> None:
    """Shorter vectors, look-ups without permutations, with and without fused operations."""
    arguments, _ = OTHER_PROCESSORS[processor]
    if arguments and not llvm.get_host_cpu_features().get("avx512f", False):
        pytest.skip("this processor has no AVX-512 that could be hidden")
    run = others[processor]
    assert run.answer["digests"] == expected(*KERNELS)
    assert run.answer["permutes"] is False
    assert run.answer["fuses"] is (bool(arguments) and bool(llvm.get_host_cpu_features().get("fma", False)))
    assert not any((run.cache / cpu._cache_name(kernel)).exists() for kernel in KERNELS)
    needed = set().union(*needed_by(run.cache).values())
    assert needed <= LIBC
    if processor == "a plain one" and platform.machine() in ("x86_64", "AMD64"):
        assert "rintf" in needed  # that symbols are found where there are some


def fused(assembly: str) -> set[str]:
    """The operations that multiply and add in one, of x86 and of ARM."""
    return set(re.findall(r"\bv?fn?m(?:add|sub|la|ls)\w*", assembly))


def test_nothing_is_fused_but_where_it_cannot_show(others: dict[str, OtherRun]) -> None:
    """On a processor that could. Butterflies multiply by 1 and -1, and encode finds a cell of its table."""
    run = others[FUSING]
    found = {kernel: bool(fused(assembly)) for kernel, assembly in run.assembly.items()}
    fuses = run.answer["fuses"]
    assert found == dict.fromkeys(KERNELS, False) | dict.fromkeys(("encode", "decode", "rotate"), fuses)
    assert re.search(r"\b(vmulps|mulps|fmul)\b", run.assembly["fit"])


# --- in this process, with a compiler that only pretends ---


@dataclass
class Compiler:
    """Stands for compile_kernel: gives what a real run kept."""

    kept: dict[str, tuple[str, bytes]]
    calls: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> tuple[str, bytes]:
        self.calls.append(name)
        return self.kept[name]


@pytest.fixture
def compiler(cold: ColdRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """With it, a process that has loaded no kernel, and keeps them in tmp_path."""
    kept = {}
    for name in ("encode", "decode"):
        found = cpu._unpacked(kept_file(cold.folder, name).read_bytes())
        assert found is not None
        kept[name] = found
    stub = Compiler(kept)
    monkeypatch.setattr("pqweights.kernels.compiler.compile_kernel", stub)
    monkeypatch.setattr(cpu, "_loaded", {})
    monkeypatch.setenv("PQWEIGHTS_CACHE", str(tmp_path))
    return stub


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(cpu, "_loaded", {})


def assert_decodes() -> None:
    assert run_kernels.decode_digest("cpu") == run_kernels.decode_digest("reference")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda file: b"",
    "cut": lambda file: file[: len(file) // 2],
    "short by a byte": lambda file: file[:-1],
    "long by a byte": lambda file: file + b"\0",
    "a bit of the code": lambda file: file[:-100] + bytes([file[-100] ^ 4]) + file[-99:],
    "a bit of the hash": lambda file: bytes([file[0] ^ 1]) + file[1:],
    "zeros": lambda file: bytes(len(file)),
    "text": lambda file: b"no machine code at all, but longer than a hash",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_replaced(
    damage: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_decodes()
    path = kept_file(tmp_path, "decode")
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    for _ in range(2):
        forget(monkeypatch)
        assert_decodes()
        assert compiler.calls == ["decode", "decode"]  # once for the empty cache, once for the damage
        assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


symbols = st.text(st.characters(exclude_characters="\n", codec="utf-8"), min_size=1)


@examples(100)
@given(symbols, st.binary())
def test_property_unpacking_is_the_inverse_of_packing(symbol: str, machine_code: bytes) -> None:
    assert cpu._unpacked(cpu._packed(symbol, machine_code)) == (symbol, machine_code)


@examples(200)
@given(symbols, st.binary(), st.data())
def test_property_any_change_of_a_file_is_seen(symbol: str, machine_code: bytes, data: st.DataObject) -> None:
    file = cpu._packed(symbol, machine_code)
    at = data.draw(st.integers(0, len(file) - 1))
    flipped = bytes([file[at] ^ data.draw(st.integers(1, 255))])
    assert cpu._unpacked(file[:at] + flipped + file[at + 1 :]) is None
    assert cpu._unpacked(file[:at]) is None
    assert cpu._unpacked(file + data.draw(st.binary(min_size=1))) is None


def test_threads_that_come_first_together_load_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)
    linked, linkings = cpu._linked, []

    def slow(name: str, *arguments: Any) -> Any:
        time.sleep(0.1)  # so that the others have come
        linkings.append(name)
        return linked(name, *arguments)

    def first(_: int) -> Any:
        together.wait(60)
        return cpu._kernel("decode")

    monkeypatch.setattr(cpu, "_linked", slow)
    with ThreadPoolExecutor(8) as pool:
        functions = list(pool.map(first, range(8)))
    assert len({id(function) for function in functions}) == 1
    assert compiler.calls == linkings == ["decode"]
    assert_decodes()


def test_code_that_an_earlier_process_kept_is_not_compiled(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        forget(monkeypatch)
        assert_decodes()
    assert compiler.calls == ["decode"]


# --- where ---


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A folder that cannot be made."""
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "folder"


def test_the_second_folder_serves_where_the_first_cannot(
    compiler: Compiler, nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only installation: the user's own cache is written, and read."""
    monkeypatch.setattr(cpu, "_cache_folders", lambda: [nowhere, tmp_path / "own"])
    for _ in range(2):
        forget(monkeypatch)
        assert_decodes()
    assert compiler.calls == ["decode"]
    assert names(tmp_path / "own") == ["decode.kernel"]


def test_only_the_first_folder_is_written(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_cache_folders", lambda: [tmp_path / "one", tmp_path / "two"])
    assert_decodes()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    forget(monkeypatch)
    shutil.move(tmp_path / "one", tmp_path / "two")  # an earlier run could write only there
    assert_decodes()
    assert compiler.calls == ["decode"]
    assert not (tmp_path / "one").exists()


def test_without_any_folder_every_process_compiles(
    compiler: Compiler, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_cache_folders", lambda: [nowhere])
    for _ in range(2):
        forget(monkeypatch)
        assert_decodes()
    assert compiler.calls == ["decode", "decode"]


def test_a_full_disk_leaves_nothing_and_stops_nothing(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert_decodes()
    assert list(tmp_path.iterdir()) == []


def test_processes_that_write_at_once_do_not_touch_each_other(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one compiles, writes and finishes while the first one is half way through its file."""
    pid, write, (symbol, machine_code) = os.getpid(), Path.write_bytes, compiler.kept["decode"]

    def half_way(path: Path, data: bytes) -> int:
        with open(path, "wb", buffering=0) as stream:
            stream.write(data[: len(data) // 2])
            with monkeypatch.context() as patch:
                patch.setattr(Path, "write_bytes", write)
                patch.setattr(os, "getpid", lambda: pid + 1)
                compiler.kept["decode"] = symbol, machine_code + b"compiled elsewhere"
                cpu._compiled("decode")
            assert cpu._kept("decode") == compiler.kept["decode"]
            return stream.write(data[len(data) // 2 :])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half_way)
        cpu._compiled("decode")
    assert cpu._kept("decode") == (symbol, machine_code)
    assert names(tmp_path) == ["decode.kernel"]


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PQWEIGHTS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    beside = Path(cpu.__file__).parent / "__pycache__"
    assert cpu._cache_folders() == [beside, tmp_path / ".cache" / "pqweights"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cpu._cache_folders() == [beside, tmp_path / "xdg" / "pqweights"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        assert cpu._cache_folders() == [tmp_path / "xdg" / "pqweights"]
    monkeypatch.setenv("PQWEIGHTS_CACHE", str(tmp_path / "chosen"))
    assert cpu._cache_folders() == [tmp_path / "chosen"]
    monkeypatch.setenv("PQWEIGHTS_CACHE", "")  # unset, as shells put it
    assert cpu._cache_folders() == [beside, tmp_path / "xdg" / "pqweights"]


def test_who_has_no_home_gets_no_folder_called_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs as a number: no HOME, no entry in /etc/passwd."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("PQWEIGHTS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert all(folder.is_absolute() for folder in cpu._cache_folders())


# --- what it depends on ---


@pytest.fixture
def fresh_names() -> Iterator[Callable[[str], str]]:
    """cpu._cache_name without its memory."""
    yield cpu._cache_name.__wrapped__
    cpu._cache_name.cache_clear()


def test_the_name_is_that_of_the_kernel_and_is_the_same_in_every_process(
    fresh_names: Callable[[str], str], cold: ColdRuns
) -> None:
    for kernel in set(KERNELS) - {"fit"}:  # which no other process named
        assert fresh_names(kernel) == kept_file(cold.folder, kernel).name


@pytest.mark.parametrize("source", cpu.SOURCES)
def test_a_change_of_a_source_changes_the_name(
    source: str, fresh_names: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in Path(cpu.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path)
    before = fresh_names("encode")
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    assert fresh_names("encode") == before  # where they lie does not matter
    with open(tmp_path / source, "a") as stream:
        stream.write("\n")
    assert fresh_names("encode") != before


def test_every_source_of_machine_code_is_in_the_name() -> None:
    """What the compiler and the compiled modules import of ours; another one would have to be added to cpu.SOURCES."""
    listed = "import sys; from pqweights.kernels import compiler; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    kernels = {name for name in done.stdout.split() if name.startswith("pqweights.")}
    sources = {f"pqweights.kernels.{source.removesuffix('.py')}" for source in cpu.SOURCES}
    assert kernels == sources | {
        "pqweights.kernels",
        # imported by the packages pqweights and pqweights.kernels, and used by nothing that is compiled
        "pqweights.autoload", "pqweights.kernels.codebook",
    }  # fmt: skip


def test_kernels_are_called_with_the_types_that_they_were_compiled_for() -> None:
    """Behind two pointers of numba's own; what ctypes and numba say has to be the same."""
    from numba import types

    from pqweights.kernels.compiler import KERNELS as COMPILED

    same = {
        types.voidptr: ctypes.c_void_p,
        types.int64: ctypes.c_int64,
        types.float64: ctypes.c_double,
        types.float32: ctypes.c_float,
    }
    called = {
        name: [ctypes.c_void_p] * 2 + [same[kind] for kind in signature.args]
        for name, (_, signature) in COMPILED.items()
    }
    assert called == cpu._ARGUMENTS
    assert set(called) == set(KERNELS)


@pytest.mark.parametrize("package", ["numba", "llvmlite", "numpy"])
def test_another_version_of_the_compiler_changes_the_name(
    package: str, fresh_names: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = fresh_names("decode"), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == package else version(name))
    assert fresh_names("decode") != before


def test_settings_of_the_compiler_change_the_name(
    fresh_names: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {fresh_names("decode")}
    for name, value in (("NUMBA_CPU_NAME", "generic"), ("NUMBA_CPU_FEATURES", ""), ("NUMBA_CPU_NAME", "haswell")):
        monkeypatch.setenv(name, value)
        found.add(fresh_names("decode"))
    assert len(found) == 4
    before = fresh_names("decode")
    monkeypatch.setenv("PQWEIGHTS_UNRELATED", "1")
    assert fresh_names("decode") == before


@pytest.mark.parametrize("what", ["get_default_triple", "get_host_cpu_name", "get_host_cpu_features"])
def test_another_processor_changes_the_name(
    what: str, fresh_names: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fresh_names("encode")
    features = llvm.get_host_cpu_features()
    name = next(iter(features))
    features[name] = not features[name]
    monkeypatch.setattr(llvm, what, lambda: features if what == "get_host_cpu_features" else "another")
    assert fresh_names("encode") != before


@pytest.mark.parametrize(
    ("array", "written"),
    [
        (np.zeros((4, 4), np.float32)[:, :2], False),
        (np.zeros(7, np.float32), False),
        (np.zeros(8, np.float64), False),
        (np.frombuffer(bytes(32), np.float32), True),
    ],
)
def test_arrays_that_do_not_fit_are_refused(array: Any, written: bool) -> None:
    """The kernels see only where an array begins."""
    with pytest.raises(ValueError, match="expected"):
        cpu._address(array, np.float32, 8, written)
    assert cpu._address(np.zeros(8, np.float32), np.float32, 8, written) > 0


def test_code_that_others_may_have_written_is_not_used(compiler: Compiler, tmp_path: Path) -> None:
    cpu._compiled("decode")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644 and cpu._kept("decode") is not None
    file.chmod(0o664)
    assert cpu._kept("decode") is None
