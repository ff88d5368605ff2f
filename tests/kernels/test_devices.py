"""Devices: which one is chosen, which requests are refused, and that the output does not depend on it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from blocks import needs_triton
from commands import invoke
from helpers import folder_bytes, run_command, small_checkpoint
from pqweights_cli.options import Device

from pqweights import kernels
from pqweights.errors import DeviceError, MissingDependencyError, PqweightsError
from pqweights.kernels import DEVICES, devices, load_backend
from pqweights.kernels.devices import AUTO, GPU_PACKAGES, INTERPRETER, resolve_device
from pqweights.kernels.workers import backend, compute_on, scratch
from pqweights.rewrite import jobs
from pqweights.rewrite.workspace import Workspace

MAIN = "from pqweights_cli.main import main; main()"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def master(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("master") / "out"
    run_command({"quantize": source}, out)
    return out


@pytest.fixture(scope="module")
def exported(master: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    run_command({"export": master, "target": "bf16"}, out)
    return out


def refusal(asked: str) -> PqweightsError:
    """The error that is raised for a device; its message is one line."""
    with pytest.raises(PqweightsError) as caught:
        resolve_device(asked)
    assert "\n" not in str(caught.value)
    return caught.value


# --- which device is chosen ---


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the packages, but without a GPU, and with the interpreter turned off."""
    monkeypatch.delenv(INTERPRETER, raising=False)
    monkeypatch.setattr(devices, "_gpu_count", lambda: 0)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name in devices.GPU_PACKAGES else found(name)
    )


@pytest.fixture
def unusable_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and its driver, and a torch that was built without CUDA."""
    monkeypatch.setattr(devices, "_gpu_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def usable_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "_encode_one_block", lambda: None)


def test_cpu_is_chosen_without_looking_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def looking() -> None:
        raise AssertionError

    monkeypatch.setattr(devices, "_why_no_gpu", looking)
    assert resolve_device("cpu") == "cpu"


def test_without_a_gpu_auto_is_cpu_and_cuda_is_refused(no_gpu: None) -> None:
    assert resolve_device(AUTO) == "cpu"
    error = refusal("cuda")
    assert isinstance(error, DeviceError)
    assert "--device cuda" in str(error) and "--device cpu" in str(error)


def test_gpu_that_torch_cannot_use_is_refused(unusable_gpu: None) -> None:
    assert resolve_device(AUTO) == "cpu"
    error = refusal("cuda")
    assert isinstance(error, DeviceError)
    assert torch.__version__ in str(error) and "--device cpu" in str(error)


def test_gpu_that_torch_can_use_is_chosen(usable_gpu: None) -> None:
    assert resolve_device(AUTO) == resolve_device("cuda") == "cuda"


@pytest.mark.parametrize("missing", [("triton",), ("torch",), ("torch", "triton")])
def test_missing_packages_are_named(
    missing: tuple[str, ...], usable_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    assert resolve_device(AUTO) == "cpu"
    error = refusal("cuda")
    assert isinstance(error, MissingDependencyError)
    assert "pip install 'torch>=2.8' 'triton>=3.4'" in str(error) and "--device cpu" in str(error)
    assert [package for package in GPU_PACKAGES if f" {package}" in str(error)] == list(missing)


def test_interpreter_counts_as_a_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRETER, "1")
    assert resolve_device("cuda") == "cuda"
    monkeypatch.setenv(INTERPRETER, "0")
    assert isinstance(refusal("cuda"), DeviceError)


@pytest.mark.parametrize("asked", ["gpu", "CUDA", "cuda:1", ""])
def test_unknown_devices_are_refused(asked: str, usable_gpu: None) -> None:
    error = refusal(asked)
    assert isinstance(error, DeviceError)
    assert repr(asked) in str(error) and all(known in str(error) for known in (*DEVICES, AUTO))


class Driver:
    """A stand-in for libcuda.so.1."""

    def __init__(self, started: int, counted: int, count: int) -> None:
        self.cuInit: Callable[[int], int] = lambda flags: started
        self._answer = counted, count

    def cuDeviceGetCount(self, pointer: Any) -> int:
        result, pointer._obj.value = self._answer
        return result


@pytest.mark.parametrize(
    ("driver", "count"),
    [
        (Driver(0, 0, 2), 2),
        (Driver(0, 0, 0), 0),
        (Driver(100, 0, 3), 0),  # CUDA_ERROR_NO_DEVICE
        (Driver(0, 3, 3), 0),
        (None, 0),
    ],
)
def test_gpus_are_counted_by_the_driver(driver: Driver | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert devices._gpu_count() == count


# --- the setting ---


@pytest.fixture
def another_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a device that every machine has; it computes with the reference."""
    monkeypatch.setitem(DEVICES, "another", "reference")
    return "another"


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_device_is_set_per_thread(another_device: str) -> None:
    cpu, reference = load_backend("cpu"), load_backend("reference")

    def elsewhere() -> tuple[kernels.Backend, kernels.Backend]:
        compute_on(another_device)
        return backend(), in_a_thread(backend)

    assert in_a_thread(elsewhere) == (reference, cpu)
    assert backend() is cpu  # as it was here


def test_scratch_comes_from_the_device_that_computes(another_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def empty(byte_count: int) -> npt.NDArray[np.uint8]:
        asked.append(byte_count)
        return np.zeros(byte_count, np.uint8)

    monkeypatch.setattr("pqweights.kernels.reference.empty", empty)

    def elsewhere() -> None:
        compute_on(another_device)
        scratch("a test of its own", 500)

    in_a_thread(elsewhere)
    scratch("a test of its own", 700)  # this thread computes on the CPU
    assert asked == [500]


def test_gpu_that_fails_to_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler or too little memory is one line before anything is written, and auto takes the CPU."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.delenv(INTERPRETER, raising=False)
    monkeypatch.setattr(devices, "_gpu_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "load_backend", lambda name: SimpleNamespace(encode=fail))
    assert "(Failed to find C compiler.)" in str(refusal("cuda"))
    assert resolve_device(AUTO) == "cpu"


# --- commands ---


def test_device_option_lists_every_device() -> None:
    """cli/options.py repeats the list, because --help must not import the library."""
    assert [device.value for device in Device] == [*DEVICES, AUTO]
    for command in ("quantize", "export"):
        assert "--device" in invoke(command, "--help").stdout
        assert invoke(command, "somewhere", "out", "--device", "tpu").exit_code == 2


def test_cuda_without_a_gpu_is_one_line_and_leaves_nothing(
    source: Path, master: Path, tmp_path: Path, no_gpu: None
) -> None:
    for command in (("quantize", source), ("export", master, "--target", "bf16")):
        for extra in ((), ("--json",), ("--overwrite",)):
            result = invoke(*command[:2], tmp_path / "out", *command[2:], "--device", "cuda", *extra)
            assert (result.exit_code, result.stdout) == (1, "")
            lines = result.stderr.splitlines()
            assert len(lines) == 1 and lines[0].startswith("error: --device cuda: ")
            assert list(tmp_path.iterdir()) == []


def test_auto_without_a_gpu_writes_the_bytes_of_the_cpu(
    source: Path, master: Path, tmp_path: Path, no_gpu: None
) -> None:
    assert invoke("quantize", source, tmp_path / "out", "--device", "auto").exit_code == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(master)


@pytest.mark.skipif(devices._gpu_count() > 0, reason="with a GPU, torch is asked whether it can be used")
def test_auto_without_a_gpu_imports_neither_torch_nor_triton(source: Path, master: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-c", MAIN, "quantize", str(source), str(tmp_path / "out")]
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    done = subprocess.run([*command, "--device", "auto"], env=environment, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "llvmlite" in imported
    assert not imported & {"torch", "triton"}
    assert folder_bytes(tmp_path / "out") == folder_bytes(master)


# The rest computes with the GPU kernels: on a GPU, or interpreted (conftest.py).


@needs_triton
def test_commands_write_the_same_bytes_on_every_device(
    source: Path, master: Path, exported: Path, tmp_path: Path
) -> None:
    quantized = invoke("quantize", source, tmp_path / "master", "--device", "cuda", "--threads", "3")
    assert quantized.exit_code == 0
    assert folder_bytes(tmp_path / "master") == folder_bytes(master)
    result = invoke("export", tmp_path / "master", tmp_path / "out", "--target", "bf16", "--device", "cuda")
    assert result.exit_code == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(exported)
    assert backend() is load_backend("cpu")


@needs_triton
def test_gpu_kernels_are_called_only_with_cuda(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the option were ignored, all tests that compare bytes would still pass."""
    from pqweights.kernels import gpu

    encode, calls = gpu.encode, []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[1])
        return encode(*arguments)

    monkeypatch.setattr(gpu, "encode", counted)
    run_command({"quantize": source, "device": "cpu"}, tmp_path / "cpu")
    assert not calls
    run_command({"quantize": source, "device": "cuda"}, tmp_path / "cuda")
    assert set(calls) == {"BF16"} and len(calls) >= 6


@needs_triton
def test_fresh_process_on_the_gpu_prints_only_progress(source: Path, master: Path, tmp_path: Path) -> None:
    """Warnings are errors; progress may be printed, because the imports take long."""
    command = [sys.executable, "-W", "error", "-c", MAIN, "quantize", str(source), str(tmp_path / "out")]
    done = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(("quantizing ", "quantizing: ")) for line in done.stderr.splitlines())
    assert folder_bytes(tmp_path / "out") == folder_bytes(master)


class Killed(BaseException):
    """A stand-in for a kill."""


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", 4096)


@needs_triton
@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("kind", ["quantize", "export"])
def test_run_interrupted_on_one_device_resumes_on_another(
    kind: str,
    first: str,
    second: str,
    source: Path,
    master: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_chunks(monkeypatch)
    work: dict[str, Any] = {"quantize": source} if kind == "quantize" else {"export": master, "target": "bf16"}
    left, record = iter(range(4)), Workspace.record

    def record_or_die(self: Workspace, finished: Any) -> None:
        if next(left, None) is None:
            raise Killed
        record(self, finished)

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "record", record_or_die)
        with pytest.raises(Killed):
            run_command(work | {"device": first}, tmp_path / "out")
    assert backend() is load_backend("cpu")
    report = run_command(work | {"device": second}, tmp_path / "out")
    assert report.resumed == 4
    assert folder_bytes(tmp_path / "out") == folder_bytes(master if kind == "quantize" else exported)


@needs_triton
def test_finished_folder_is_recognised_on_every_device(source: Path, master: Path, tmp_path: Path) -> None:
    run_command({"quantize": source, "device": "cuda"}, tmp_path / "out")
    assert run_command({"quantize": source, "device": "cpu"}, tmp_path / "out").already_done
    assert run_command({"quantize": source, "device": "cuda"}, master).already_done
