"""The choice of the device that computes: the one that the user asked for, checked, or the best one of the machine."""

from __future__ import annotations

import ctypes
import importlib.util
import os

import numpy as np

from pqweights.errors import DeviceError, MissingDependencyError
from pqweights.installing import pip_install
from pqweights.kernels import BLOCK_SIZE, DEVICES, BlockCoding, EncodedArrays, load_backend
from pqweights.kernels.codebook import codebook_from_levels

AUTO = "auto"
GPU_PACKAGES = ("torch", "triton")
INTERPRETER = "TRITON_INTERPRET"  # if it is 1, Triton runs its kernels on the CPU: for tests


def resolve_device(asked: str) -> str:
    """The key of DEVICES to use.

    asked: a key of DEVICES, or "auto", which is cuda if there are a GPU and the packages for it, and cpu otherwise.

    Raises DeviceError if `asked` is neither, or if it is cuda and the GPU cannot be used, and MissingDependencyError
    if it is cuda and a package is missing.
    """
    if asked not in (AUTO, *DEVICES):
        raise DeviceError(f"device {asked!r}: expected {', '.join(DEVICES)} or {AUTO}")
    if asked == "cpu":
        return asked
    problem = _why_no_gpu()
    if problem is not None and asked == "cuda":
        raise problem
    return "cpu" if problem is not None else "cuda"


def _why_no_gpu() -> DeviceError | MissingDependencyError | None:
    """The reason why the GPU cannot be used, or None. Imports torch, which takes seconds, only if there is a GPU."""
    missing = [package for package in GPU_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        return MissingDependencyError(
            f"--device cuda: needs {' and '.join(missing)}: {pip_install('cuda')}, or use --device cpu"
        )
    if os.environ.get(INTERPRETER) == "1":
        return None
    if not _gpu_count():
        return DeviceError("--device cuda: expected an NVIDIA GPU with its driver, found none; use --device cpu")
    import torch

    if not torch.cuda.is_available():
        return DeviceError(
            f"--device cuda: torch {torch.__version__} cannot use the GPU; "
            "install a CUDA build of torch, or use --device cpu"
        )
    try:
        _encode_one_block()
    except RuntimeError as error:  # from torch or Triton: no C compiler, a GPU that is too old, no memory left on it
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        return DeviceError(f"--device cuda: the GPU failed to compute ({reason}); use --device cpu")
    return None


def _encode_one_block() -> None:
    """Compile a kernel for the GPU and run it, so that it fails now if it fails at all."""
    book = codebook_from_levels(5, np.linspace(-1, 1, 32, dtype=np.float32))
    sums = np.empty((2, 1), np.float64)
    out = EncodedArrays(np.empty((1, 80), np.uint8), np.empty(1, np.uint16), sums[0], sums[1])
    load_backend("gpu").encode(np.zeros(BLOCK_SIZE * 2, np.uint8), "BF16", BlockCoding(codebook=book), out)


def _gpu_count() -> int:
    """The number of GPUs that the NVIDIA driver offers, found without importing torch, which takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
