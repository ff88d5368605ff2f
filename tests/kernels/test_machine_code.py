"""The machine code of the CPU kernels: compiled once, cached, found again, not trusted if damaged, never required."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
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

import llvmlite.binding as llvm
import numpy as np
import pytest
import run_kernels
from blocks import examples
from hypothesis import given
from hypothesis import strategies as st

from pqweights.kernels import cpu
from pqweights.kernels.product_task import TASK_KERNELS

KERNELS = tuple(run_kernels.DIGESTS)
# What compiled code may ask of its process: C's memory and mathematics.
LIBC = {"memcpy", "memmove", "memset", "sqrtf", "rintf"}


def start(cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Run kernels in a fresh process, which keeps machine code in `cache`; warnings are errors."""
    command = [sys.executable, "-W", "error", run_kernels.__file__, *arguments]
    variables = os.environ | {"PQWEIGHTS_CACHE": str(cache)} | environment
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The answer of a process, which must have printed nothing else."""
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    answer: dict[str, Any] = json.loads(output)
    return answer


def run(cache: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    return finish(start(cache, *arguments, **environment))


@functools.cache
def digest(kernel: str) -> str:
    """The digest of the reference; for "round" and "round_floats", which have none, that of this process."""
    return run_kernels.DIGESTS[kernel]("reference")


def expected(*kernels: str) -> dict[str, str]:
    return {kernel: digest(kernel) for kernel in kernels}


def names(folder: Path) -> list[str]:
    """The files of a folder, without the part of their names that differs between machines."""
    return sorted(path.name.partition("-")[0] + path.suffix for path in folder.iterdir())


def own_code(kernel: str) -> tuple[str, bytes]:
    """The symbol and the object file that this process, or one before it, compiled."""
    return cpu._kept(kernel) or cpu._compiled(kernel)


@dataclass(frozen=True)
class ColdRuns:
    """Two processes that started together with an empty cache and the same two kernels, and what they left in it.

    folder: the cache, to which the machine code of the other kernels was added afterwards.
    """

    folder: Path
    answers: list[dict[str, Any]]
    kept: list[str]


COMPILED_COLD = ("decode", "rotate")


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> ColdRuns:
    folder = tmp_path_factory.mktemp("cold") / "not" / "there" / "yet"
    processes = [start(folder, *COMPILED_COLD) for _ in range(2)]
    answers = [finish(process) for process in processes]
    kept = names(folder)
    for kernel in set(KERNELS) - set(COMPILED_COLD):
        path = folder / cpu._cache_name(kernel)
        path.write_bytes(cpu._packed(*own_code(kernel)))
        path.chmod(0o644)
    return ColdRuns(folder, answers, kept)


def kept_file(folder: Path, kernel: str) -> Path:
    (path,) = folder.glob(f"{kernel}-*.kernel")
    return path


# --- kept and found ---


def test_processes_that_start_together_compile_each_kernel_once(cold: ColdRuns) -> None:
    assert [answer["digests"] for answer in cold.answers] == [expected(*COMPILED_COLD)] * 2
    assert sorted(name for answer in cold.answers for name in answer["compiled"]) == sorted(COMPILED_COLD)
    assert all(("numba" in answer["imported"]) is bool(answer["compiled"]) for answer in cold.answers)
    assert cold.kept == sorted(f"{kernel}.kernel" for kernel in COMPILED_COLD)


def test_a_run_with_a_full_cache_imports_no_numba_and_computes_the_same(cold: ColdRuns) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cold.folder.iterdir()}
    warm = run(cold.folder, *KERNELS)
    assert not {"numba", "torch", "triton"} & set(warm["imported"])
    assert "llvmlite" in warm["imported"]
    assert warm["compiled"] == []
    assert warm["digests"] == expected(*KERNELS)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cold.folder.iterdir()} == before


def test_kept_code_runs_where_numba_cannot_be_imported(cold: ColdRuns) -> None:
    """Nothing in it refers to numba's runtime: an address that is missing would end the process."""
    assert run(cold.folder, "--without", "numba", *KERNELS)["digests"] == expected(*KERNELS)


def undefined_symbols(machine_code: bytes) -> set[str]:
    """What an object file expects to find in the process (ELF, chapter 4: section headers, symbol table)."""
    if machine_code[:6] != b"\x7fELF\x02\x01":
        pytest.skip("the object files of this system are not little-endian 64-bit ELF")
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


def needed_by(files: list[Path]) -> set[str]:
    """The undefined symbols of kept kernels."""
    needed: set[str] = set()
    for file in files:
        found = cpu._unpacked(file.read_bytes())
        assert found is not None
        needed |= undefined_symbols(found[1])
    return needed


def test_machine_code_refers_only_to_libc(cold: ColdRuns) -> None:
    assert needed_by([kept_file(cold.folder, kernel) for kernel in KERNELS]) <= LIBC


def test_a_run_that_can_keep_nothing_works(tmp_path: Path) -> None:
    """Not even root can make a folder below a file."""
    (tmp_path / "file").write_bytes(b"")
    answer = run(tmp_path / "file" / "cache", "rotate")
    assert (answer["digests"], answer["compiled"]) == (expected("rotate"), ["rotate"])
    assert (tmp_path / "file").read_bytes() == b""


# --- other processors ---

FUSING = "this one without AVX-512"  # which can fuse if this one can
OTHER_PROCESSORS: dict[str, tuple[list[str], dict[str, str]]] = {
    "a plain one": ([], {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
    FUSING: (["--hide", "avx512"], {}),
}


@dataclass(frozen=True)
class OtherRun:
    """All kernels compiled for another processor: the answer, the kept files, and the instructions of each kernel."""

    answer: dict[str, Any]
    files: list[Path]
    instructions: dict[str, list[str]]


@pytest.fixture(scope="module")
def others(lasting_folder: Path) -> dict[str, OtherRun]:
    """The kernels are compiled when their sources have changed, once for all workers, which takes half a minute."""
    folder = lasting_folder / "other-processors"
    started = {
        processor: start(folder, "--instructions", *arguments, *KERNELS, **environment)
        for processor, (arguments, environment) in OTHER_PROCESSORS.items()
    }
    runs = {}
    for processor, process in started.items():
        answer = finish(process)
        instructions = {
            kernel: run_kernels.instructions_file(folder, file).read_text().splitlines()
            for kernel, file in answer["files"].items()
        }
        runs[processor] = OtherRun(answer, [folder / file for file in answer["files"].values()], instructions)
    return runs


@pytest.mark.parametrize("processor", OTHER_PROCESSORS)
def test_code_for_another_processor_computes_the_same_bytes(processor: str, others: dict[str, OtherRun]) -> None:
    """With shorter vectors, look-ups without permutations, with and without fused operations."""
    arguments, _ = OTHER_PROCESSORS[processor]
    if arguments and not llvm.get_host_cpu_features().get("avx512f", False):
        pytest.skip("this processor has no AVX-512 that could be hidden")
    run = others[processor]
    assert run.answer["digests"] == expected(*KERNELS)
    assert run.answer["permutes"] is False
    assert run.answer["fuses"] is (bool(arguments) and bool(llvm.get_host_cpu_features().get("fma", False)))
    assert not {cpu._cache_name(kernel) for kernel in KERNELS} & {file.name for file in run.files}
    needed = needed_by(run.files)
    assert needed <= LIBC
    if processor == "a plain one" and platform.machine() in ("x86_64", "AMD64"):
        assert "rintf" in needed  # so undefined symbols are found if there are any


def fused(instructions: list[str]) -> list[str]:
    """The instructions that multiply and add in one, of x86 and of ARM."""
    return [name for name in instructions if re.fullmatch(r"v?fn?m(?:add|sub|la|ls)\w*", name)]


def test_operations_are_fused_only_where_that_changes_no_result(others: dict[str, OtherRun]) -> None:
    """The target could fuse everywhere. Butterflies multiply by 1 and -1, and encode estimates numbers of levels.

    Products, whose sums are in an order of each processor's own, are fused.
    """
    run = others[FUSING]
    found = {kernel: bool(fused(instructions)) for kernel, instructions in run.instructions.items()}
    fuses = run.answer["fuses"]
    rotating = (
        "encode",
        "decode",
        "rotate",
        "prepare",
        *(name for name in TASK_KERNELS if name not in ("restore_levels", "nearest_levels")),
        "decode_trellis",
        *(f"encode_trellis_{n}" for n in (8, 64, 256)),
    )
    assert found == dict.fromkeys(KERNELS, False) | dict.fromkeys(rotating, fuses)
    assert {"vmulps", "mulps", "fmul"} & set(run.instructions["fit"])


# --- in this process, with a stub for the compiler ---


@dataclass
class Compiler:
    """Stands for compile_kernel: returns what a real compilation gave."""

    code: dict[str, tuple[str, bytes]]
    calls: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> tuple[str, bytes]:
        self.calls.append(name)
        return self.code[name]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """The stub, in a process that has loaded no kernel and keeps them in tmp_path."""
    stub = Compiler({name: own_code(name) for name in ("encode", "decode")})
    monkeypatch.setattr("pqweights.kernels.compiler.compile_kernel", stub)
    monkeypatch.setattr(cpu, "_loaded", {})
    monkeypatch.setenv("PQWEIGHTS_CACHE", str(tmp_path))
    return stub


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start again, like a new process."""
    monkeypatch.setattr(cpu, "_loaded", {})


def assert_decodes() -> None:
    assert run_kernels.decode_digest("cpu") == digest("decode")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda file: b"",
    "cut": lambda file: file[: len(file) // 2],
    "short by a byte": lambda file: file[:-1],
    "long by a byte": lambda file: file + b"\0",
    "a bit of the code": lambda file: file[:-100] + bytes([file[-100] ^ 4]) + file[-99:],
    "a bit of the hash": lambda file: bytes([file[0] ^ 1]) + file[1:],
    "zeros": lambda file: bytes(len(file)),
    "text": lambda file: b"this is not machine code, but it is longer than a hash",
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
def test_property_any_change_of_a_file_is_noticed(symbol: str, machine_code: bytes, data: st.DataObject) -> None:
    file = cpu._packed(symbol, machine_code)
    at = data.draw(st.integers(0, len(file) - 1))
    flipped = bytes([file[at] ^ data.draw(st.integers(1, 255))])
    assert cpu._unpacked(file[:at] + flipped + file[at + 1 :]) is None
    assert cpu._unpacked(file[:at]) is None
    assert cpu._unpacked(file + data.draw(st.binary(min_size=1))) is None


def test_threads_that_need_a_kernel_at_once_load_it_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)
    linked, linkings = cpu._linked, []

    def slow(name: str, *arguments: Any) -> Any:
        time.sleep(0.1)  # until the other threads wait
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


# --- while another process compiles ---


@contextlib.contextmanager
def locked_by_another(folder: Path, kernel: str) -> Iterator[None]:
    """Hold the lock that a process holds while it compiles a kernel."""
    with open(folder / f"{cpu._cache_name(kernel)}.lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def test_a_process_waits_for_another_that_compiles_the_same_kernel(compiler: Compiler, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with locked_by_another(tmp_path, "decode"):
            waiting = pool.submit(cpu._compiled, "decode")
            time.sleep(0.1)
            assert not waiting.done()
            cpu._keep("decode", *compiler.code["decode"])
        assert waiting.result(60) == compiler.code["decode"]
    assert compiler.calls == []
    assert names(tmp_path) == ["decode.kernel"]


def test_a_process_does_not_wait_for_one_that_compiles_another_kernel(compiler: Compiler, tmp_path: Path) -> None:
    with locked_by_another(tmp_path, "encode"):
        assert_decodes()
    assert compiler.calls == ["decode"]


def test_a_process_compiles_if_the_other_one_never_ends(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process can be suspended while it holds the lock."""
    monkeypatch.setattr(cpu, "_MOST_SECONDS_OF_WAITING", 0.05)
    with locked_by_another(tmp_path, "decode"):
        assert_decodes()
    assert compiler.calls == ["decode"]


def test_a_process_compiles_if_the_other_one_kept_nothing(compiler: Compiler, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with locked_by_another(tmp_path, "decode"):
            waiting = pool.submit(cpu._compiled, "decode")
            time.sleep(0.1)
        assert waiting.result(60) == compiler.code["decode"]
    assert compiler.calls == ["decode"]


def test_a_file_system_without_locks_will_do(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert_decodes()
    assert compiler.calls == ["decode"]
    assert names(tmp_path) == ["decode.kernel"]


# --- where code is kept ---


@pytest.fixture
def impossible_folder(tmp_path: Path) -> Path:
    """A folder that cannot be made."""
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "folder"


def test_the_second_folder_is_used_if_the_first_cannot_be(
    compiler: Compiler, impossible_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only installation: the user's own cache is written and read."""
    monkeypatch.setattr(cpu, "_cache_folders", lambda: [impossible_folder, tmp_path / "own"])
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
    shutil.move(tmp_path / "one", tmp_path / "two")  # as if an earlier run could write only there
    assert_decodes()
    assert compiler.calls == ["decode"]
    assert not (tmp_path / "one").exists()


def test_without_any_folder_every_process_compiles(
    compiler: Compiler, impossible_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_cache_folders", lambda: [impossible_folder])
    for _ in range(2):
        forget(monkeypatch)
        assert_decodes()
    assert compiler.calls == ["decode", "decode"]


def test_a_full_disk_leaves_no_file_and_does_not_stop_the_run(
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


def test_processes_that_write_at_once_do_not_disturb_each_other(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process writes and finishes while the first one is half way through its file."""
    pid, write, (symbol, machine_code) = os.getpid(), Path.write_bytes, compiler.code["decode"]
    other_code = machine_code + b"compiled elsewhere"

    def half_way(path: Path, data: bytes) -> int:
        with open(path, "wb", buffering=0) as stream:
            stream.write(data[: len(data) // 2])
            with monkeypatch.context() as patch:
                patch.setattr(Path, "write_bytes", write)
                patch.setattr(os, "getpid", lambda: pid + 1)
                cpu._keep("decode", symbol, other_code)
            assert cpu._kept("decode") == (symbol, other_code)
            return stream.write(data[len(data) // 2 :])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half_way)
        cpu._keep("decode", symbol, machine_code)
    assert cpu._kept("decode") == (symbol, machine_code)
    assert names(tmp_path) == ["decode.kernel"]


def test_the_cache_is_chosen_or_beside_the_sources_or_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    monkeypatch.setenv("PQWEIGHTS_CACHE", "")  # how shells unset a variable
    assert cpu._cache_folders() == [beside, tmp_path / "xdg" / "pqweights"]


def test_without_a_home_no_folder_is_named_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs as a bare user id: no HOME, no entry in /etc/passwd."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("PQWEIGHTS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert all(folder.is_absolute() for folder in cpu._cache_folders())


# --- what code depends on ---


@pytest.fixture
def fresh_names() -> Iterator[Callable[[str], str]]:
    """cpu._cache_name without its cache."""
    yield cpu._cache_name.__wrapped__
    cpu._cache_name.cache_clear()


def test_the_file_of_a_kernel_has_the_same_name_in_every_process(
    fresh_names: Callable[[str], str], cold: ColdRuns
) -> None:
    for answer in cold.answers:
        assert answer["files"] == {kernel: fresh_names(kernel) for kernel in COMPILED_COLD}


@pytest.mark.parametrize("source", cpu.SOURCES)
def test_changing_a_source_changes_the_name(
    source: str, fresh_names: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in Path(cpu.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path)
    before = fresh_names("encode")
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    assert fresh_names("encode") == before  # whatever their folder
    with open(tmp_path / source, "a") as stream:
        stream.write("\n")
    assert fresh_names("encode") != before


def test_every_source_of_machine_code_is_in_the_name() -> None:
    """cpu.SOURCES lists all that is loaded of this library when kernels are compiled."""
    listed = "import sys; from pqweights.kernels import compiler; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("pqweights.")}
    sources = {f"pqweights.kernels.{source.removesuffix('.py')}" for source in cpu.SOURCES}
    # The packages pqweights and pqweights.kernels import these, which nothing that is compiled uses.
    unused = {"pqweights.kernels", "pqweights.autoload", "pqweights.errors", "pqweights.kernels.codebook"}
    assert loaded == sources | unused


def test_kernels_are_called_with_the_types_that_they_were_compiled_for() -> None:
    """After two pointers of numba's own, ctypes and numba have to agree."""
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
    alone = {name: called.pop(name) for name in TASK_KERNELS}
    assert called == cpu._ARGUMENTS
    assert {*called, *alone} == set(KERNELS)
    # A kernel that takes a task is called through a function of C that takes nothing else.
    assert {tuple(kinds) for kinds in alone.values()} == {(ctypes.c_void_p,) * 3}


@pytest.mark.parametrize("package", ["numba", "llvmlite", "numpy"])
def test_another_version_of_a_package_changes_the_name(
    package: str, fresh_names: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = fresh_names("decode"), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == package else version(name))
    assert fresh_names("decode") != before


def test_settings_of_numba_change_the_name(fresh_names: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    """The kernels only see where an array begins."""
    with pytest.raises(ValueError, match="expected"):
        cpu.address(array, np.float32, 8, written=written)
    assert cpu.address(np.zeros(8, np.float32), np.float32, 8, written=written) > 0


def test_code_that_other_users_could_have_written_is_not_used(compiler: Compiler, tmp_path: Path) -> None:
    cpu._compiled("decode")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644 and cpu._kept("decode") is not None
    file.chmod(0o664)
    assert cpu._kept("decode") is None
