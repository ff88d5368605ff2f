"""The compiled kernels: the same bytes from every level of processor, one checked way to call them, and what is there
where none were compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import build_kernels
import kernel_runner
import numpy as np
import pytest
import run_commands
import run_kernels
import torch
from commands import raises
from external_runtimes import EMULATOR
from gguf_files import write_llama

from pqweights import kernels
from pqweights.errors import DeviceError, MissingDependencyError, PqweightsWarning
from pqweights.kernels import load_backend, native, reference

DIGESTS = json.loads((Path(__file__).parents[1] / "golden/kernels.json").read_bytes())["digests"]
OWN = build_kernels.own_target()
LEVELS = build_kernels.levels_of(OWN, "all")
HERE = LEVELS[: LEVELS.index(build_kernels.levels_of(OWN, "own")[-1]) + 1]  # what this processor has


def run(*arguments: str, program: str = run_kernels.__file__, **environment: str) -> dict[str, Any]:
    """The answer of a fresh process that runs kernels; warnings are errors."""
    command = [sys.executable, "-W", "error", program, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(build_kernels.__file__).parent)} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All levels that this processor can run; objects that an earlier run compiled are used again."""
    folder = tmp_path_factory.mktemp("libraries")
    build_kernels.build(OWN, HERE, folder)
    return folder


# --- the same bytes ---


def test_every_kernel_has_a_digest() -> None:
    assert set(DIGESTS) == run_kernels.KERNELS.keys() | run_kernels.BOUNDED.keys() == set(native.functions())


@pytest.mark.parametrize("level", HERE)
def test_every_level_computes_the_golden_bytes(level: str, libraries: Path) -> None:
    answer = run("--libraries", str(libraries), PQWEIGHTS_LEVEL=level)
    assert answer["level"] == level
    assert answer["digests"] == DIGESTS


def test_an_emulated_aarch64_computes_the_golden_bytes(tmp_path: Path) -> None:
    assert EMULATOR is not None, "qemu-aarch64 is not installed: make runtimes"
    command = kernel_runner.emulated_command(EMULATOR, tmp_path)
    assert run("--runner", *command)["digests"] == DIGESTS


def test_whole_commands_write_the_same_bytes_on_every_level_with_any_number_of_threads(
    libraries: Path, tmp_path: Path
) -> None:
    """A GGUF file and an export for vLLM of a master without loss are those of the source."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    source = write_llama(tmp_path / "src", sizes=sizes)
    results = []
    for level in HERE:
        places = (str(source), str(tmp_path / level), "--libraries", str(libraries))
        answer = run(*places, program=run_commands.__file__, PQWEIGHTS_LEVEL=level)
        assert answer["level"] == level
        results += answer["results"]
    first = results[0]
    assert len(results) == 3 * len(HERE) and all(result == first for result in results)
    assert all(first[f"{target} of lossless"] == first[f"{target} of source"] for target in ("gguf", "vllm"))
    assert len({*first.values()}) == len(first) - 2


# --- levels ---


def test_a_level_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.LEVEL_VARIABLE, "x86-64-v9")
    with raises(DeviceError, "PQWEIGHTS_LEVEL=x86-64-v9"):
        native.level.__wrapped__()


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "sources_digest", lambda: "of other sources")
    with raises(MissingDependencyError, "make kernels LEVELS="):
        native.functions.__wrapped__()


def test_a_file_that_is_no_library_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x86-64-v3.so").write_bytes(b"\x7fELF and nothing more")
    assert native._library("x86-64-v3", tmp_path) is None


# --- without kernels ---


def test_without_kernels_the_reference_computes_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: None)
    monkeypatch.setattr(kernels, "_said", threading.Lock())
    kernels.load_backend.cache_clear()
    with pytest.warns(PqweightsWarning, match="slowly"):
        assert load_backend() is reference
    kernels.load_backend.cache_clear()  # as for two threads that ask at once
    assert load_backend() is reference  # warnings are errors
    kernels.load_backend.cache_clear()


def test_without_kernels_what_has_no_reference_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: None)
    monkeypatch.delenv(native.LEVEL_VARIABLE, raising=False)
    with raises(MissingDependencyError, "kernels"):
        native.functions.__wrapped__()


# --- arguments ---


@pytest.mark.parametrize(
    ("values", "written"),
    [
        (np.zeros((4, 4), np.float32)[:, :2], False),
        (np.zeros(7, np.float32), False),
        (np.zeros(8, np.float64), False),
        (np.zeros(8, ">f4"), False),
        (np.frombuffer(bytes(32), np.float32), True),
        (np.frombuffer(bytes(33), np.float32, 8, 1), False),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(8, dtype=torch.float64), False),
        (torch.zeros(8, dtype=torch.bool), False),
        (torch.zeros(8, device="meta"), False),
    ],
)
def test_arrays_that_do_not_fit_are_refused(values: Any, written: bool) -> None:
    """The kernels only see where an array begins."""
    with pytest.raises(ValueError, match="expected"):
        native.array(values, np.float32, 8, written=written)
    assert native.array(np.zeros(8, np.float32), np.float32, 8, written=written).address > 0
    assert native.array(torch.zeros(8), np.float32, 8, written=written).address > 0


def test_arguments_of_other_types_are_refused() -> None:
    values = np.zeros(128, np.float32)
    written = native.array(values, np.float32, 128, written=True)
    for arguments, *named in [
        ((written,), 2, 1),
        ((native.array(values, np.float32, 128), 1), "'w f4'"),
        ((native.array(values.view(np.int32), np.int32, 128, written=True), 1), "'w f4'"),
        ((values.ctypes.data, 1), "'w f4'"),
        ((written, 1.5),),
    ]:
        with raises(TypeError, "rotate", *named):
            native.call("rotate", *arguments)
    with raises(TypeError, "'rotated'"):
        native.call("rotated", written, 1)
    with raises(TypeError, "rotate", "thread"):
        native.call("rotate", written, 1, threads=2)


# --- building ---


def test_a_source_that_does_not_compile_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "wrong.cpp").write_text("int wrong(")
    command = build_kernels.Compiler(OWN).compile(None)
    with pytest.raises(SystemExit, match=r"wrong\.cpp"):
        build_kernels.run_to([*command, "-c", str(tmp_path / "wrong.cpp")], tmp_path / "wrong.o")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wrong.cpp"]


@pytest.mark.parametrize("level", LEVELS[1:] or LEVELS)
def test_nothing_is_fused_by_the_compiler_alone(level: str, tmp_path: Path) -> None:
    """On processors that can fuse; without the flag the compiler does."""
    source, fuses = tmp_path / "sum.cpp", dict[str, bool]()
    source.write_text("float sum(float a, float b, float c) { return a * b + c; }\n")
    command = build_kernels.Compiler(OWN).compile(level)
    for kind, more in (("ours", []), ("fast", ["-ffp-contract=fast"])):
        build_kernels.run_to([*command, *more, "-S", str(source)], tmp_path / kind)
        fuses[kind] = "fmadd" in (tmp_path / kind).read_text()
    assert fuses == {"ours": False, "fast": True}
