"""The CPU backend: machine code that is compiled once for this machine, kept on disk, and called without the GIL.

compiler.py makes the code from cpu_kernels.py and cpu_groups.py. That takes seconds, and merely importing numba for
it takes more time and memory than a small model. So the object code is kept, and later runs load it with llvmlite
alone. The kernels start no threads: callers bring their own, and products (openmp.py) those of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.buffers import pageable
from pqweights.dtypes import item_bytes
from pqweights.kernels import BLOCK_SIZE, ORTHONORMAL, SIGNS, VALUE_DTYPES, BlockCoding, EncodedArrays, EncodeStats
from pqweights.kernels.codebook import Codebook
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.openmp import TASK_FUNCTION, run_in_threads
from pqweights.kernels.product_task import TASK_KERNELS
from pqweights.notices import COMPILING, slow_step
from pqweights.user_cache import read_trusted, users_cache, write_trusted

# The files that machine code is made from, beside this one.
SOURCES = (
    "attention_task.py",
    "code_levels.py",
    "compiler.py",
    "conversions.py",
    "cpu_compensation.py",
    "cpu_factors.py",
    "cpu_gguf_affine.py",
    "cpu_gguf_symmetric.py",
    "cpu_groups.py",
    "cpu_hadamard_scores.py",
    "cpu_importance.py",
    "cpu_kernels.py",
    "cpu_nearest.py",
    "cpu_polar_scores.py",
    "cpu_products.py",
    "cpu_restoring.py",
    "cpu_sums.py",
    "cpu_weighted_values.py",
    "emit.py",
    "encoding.py",
    "gguf_affine_alone.py",
    "gguf_affine_blocks.py",
    "gguf_affine_formats.py",
    "gguf_affine_packing.py",
    "gguf_affine_parts.py",
    "gguf_halves.py",
    "gguf_symmetric_formats.py",
    "gguf_symmetric_lanes.py",
    "gguf_symmetric_tiles.py",
    "gguf_types.py",
    "jit.py",
    "lanes.py",
    "packing.py",
    "prescaling.py",
    "product_task.py",
    "sixteen.py",
    "token_codes.py",
    "trellis_codes.py",
    "trellis_decoding.py",
    "trellis_encoding.py",
    "trellis_entropy.py",
    "trellis_search.py",
    "trellis_step.py",
    "trellis_tiles.py",
    "vector.py",
)

# Degrees of the polynomials of the level search for widths up to 5, then 6, 7 and 8; encoding.py has the same.
_DEGREES = {5: 2, 6: 2, 7: 4, 8: 4}


@functools.lru_cache(maxsize=32)
def _encode_table(levels: tuple[float, ...], thresholds: tuple[float, ...]) -> npt.NDArray[np.float32]:
    """The table that encoding.py reads, for symmetric levels (see encoding._Search)."""
    half, bits = len(levels) // 2, len(levels).bit_length() - 1
    upper, lower = np.array(levels[half:], dtype=np.float32), np.array(levels[:half], dtype=np.float32)
    limits = np.array(thresholds[half - 1 :], dtype=np.float64)
    if not np.array_equal(upper, -lower[::-1]) or limits[0] != 0:
        raise ValueError("expected levels that are symmetric around 0: blocks cannot be encoded with others")
    if bits < 6:  # by code modulo the size of the table; codes count from the middle
        unused = np.zeros((16 if bits < 5 else 32) - 2 * half)
        tables = [thresholds[half:], [np.inf], unused, thresholds[:half], upper, unused, lower]
    else:
        tables = [limits, upper]
    coefficients = _counting_polynomial(limits, _DEGREES[max(bits, 5)])
    head = np.zeros(16, dtype=np.float32)
    head[0], head[1], head[2], head[3 : 3 + len(coefficients)] = (
        -1,
        np.int32(1).view(np.float32),
        limits[-1],
        coefficients,
    )
    return np.concatenate([head, *tables]).astype(np.float32)


def _counting_polynomial(limits: npt.NDArray[np.float64], degree: int) -> npt.NDArray[np.float64]:
    """The coefficients, highest power first, of a polynomial without a constant that is about k at limits[k].

    The largest deviation is what counts, so fits by least squares follow each other, in which limits weigh more if the
    one before missed them (Lawson's algorithm).
    """
    powers = np.arange(degree, 0, -1)
    matrix, wanted = (limits[:, None] / limits[-1]) ** powers, np.arange(len(limits), dtype=np.float64)
    weights, best = np.ones(len(limits)), (np.inf, np.zeros(degree))
    for _ in range(40):
        root = np.sqrt(weights)
        solution = np.linalg.lstsq(matrix * root[:, None], wanted * root, rcond=None)[0]
        missed = np.abs(matrix @ solution - wanted)
        best = min(best, (missed.max(), solution), key=lambda pair: pair[0])
        weights *= missed + 1e-9
        weights /= weights.max()
    scaled = best[1]
    steps = np.diff((np.linspace(0, 1, 1000)[:, None] ** powers) @ scaled)
    if not (best[0] < 0.45 and steps.min() > 0):
        raise ValueError("expected levels whose distances change slowly: blocks cannot be encoded with others")
    return np.asarray(scaled / limits[-1] ** powers)


def _padded_levels(codebook: Codebook) -> npt.NDArray[np.float32]:
    """The levels, followed by zeros up to the 32 entries that the smallest look-up takes."""
    levels = np.zeros(max(32, len(codebook.levels)), dtype=np.float32)
    levels[: len(codebook.levels)] = codebook.levels
    return levels


empty = pageable  # see `pqweights.kernels.Backend.empty`


def encode(values: npt.NDArray[np.uint8], dtype: str, coding: BlockCoding, out: EncodedArrays) -> EncodeStats:
    """See `pqweights.kernels.Backend.encode`."""
    book, exponent = coding.codebook, coding.norm_exponent
    table = _encode_table(tuple(book.levels.tolist()), tuple(book.thresholds.tolist()))
    blocks, stats = len(out.codes), np.empty(3, dtype=np.float64)
    pointers = (
        address(values, np.uint8, blocks * BLOCK_SIZE * item_bytes(dtype)),
        table.ctypes.data,
        SIGNS.ctypes.data,
        address(out.codes, np.uint8, blocks * 16 * book.bits, written=True),
        address(out.norms, np.uint16, blocks, written=True),
        address(out.energies, np.float64, blocks, written=True),
        address(out.errors, np.float64, blocks, written=True),
        stats.ctypes.data,
    )
    settings = (blocks, VALUE_DTYPES[dtype], book.bits, coding.signed)
    scales = (math.ldexp(1, -exponent), math.ldexp(1, exponent))
    run("encode", *pointers, *settings, *scales)
    return EncodeStats(float(stats[0]), float(stats[1]), int(stats[2]))


def decode(
    encoded: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]],
    coding: BlockCoding,
    dtype: str,
    values: npt.NDArray[np.uint8],
) -> None:
    """See `pqweights.kernels.Backend.decode`."""
    codes, norms = encoded
    blocks, levels = len(codes), _padded_levels(coding.codebook)
    pointers = (
        address(codes, np.uint8, blocks * 16 * coding.codebook.bits),
        address(norms, np.uint16, blocks),
        levels.ctypes.data,
        SIGNS.ctypes.data,
        address(values, np.uint8, blocks * BLOCK_SIZE * item_bytes(dtype), written=True),
    )
    settings = (blocks, VALUE_DTYPES[dtype], coding.codebook.bits, coding.signed, coding.rotate)
    exponent = coding.norm_exponent
    scale = math.ldexp(1, exponent - 7) if coding.rotate else math.ldexp(ORTHONORMAL, exponent)
    run("decode", *pointers, *settings, scale)


def add_in_order(total: float, values: npt.NDArray[np.float64]) -> float:
    """Return total + values[0] + values[1] + ..., added one after the other."""
    result, values = np.array([total]), np.ascontiguousarray(values)
    run("sum", address(values, np.float64, len(values)), result.ctypes.data, len(values))
    return float(result[0])


# --- calling machine code ---

# Where numba's calling convention puts a result (a null pointer) and an exception (none).
_IGNORED = np.zeros(2, dtype=np.uint64)
_IGNORED_ADDRESSES = (_IGNORED.ctypes.data, _IGNORED.ctypes.data + 8)

# name -> types of its arguments: numba's own two pointers, ours, then numbers
_ARGUMENTS: dict[str, list[Any]] = {
    "encode": [ctypes.c_void_p] * (2 + 8) + [ctypes.c_int64] * 4 + [ctypes.c_double] * 2,
    "decode": [ctypes.c_void_p] * (2 + 5) + [ctypes.c_int64] * 5 + [ctypes.c_double],
    "sum": [ctypes.c_void_p] * (2 + 2) + [ctypes.c_int64],
    "fit": [ctypes.c_void_p] * (2 + 7) + [ctypes.c_int64] * 5,
    "round": [ctypes.c_void_p] * (2 + 6) + [ctypes.c_int64] * 4,
    "round_floats": [ctypes.c_void_p] * (2 + 5) + [ctypes.c_int64] * 3,
    "rotate": [ctypes.c_void_p] * (2 + 1) + [ctypes.c_int64, ctypes.c_float],
    "pack_bits": [ctypes.c_void_p] * (2 + 2) + [ctypes.c_int64] * 2,
    "pack_tiles": [ctypes.c_void_p] * (2 + 3) + [ctypes.c_int64] * 2,
    "multiply": [ctypes.c_void_p] * (2 + 4) + [ctypes.c_int64] * 3,
    "squares": [ctypes.c_void_p] * (2 + 5) + [ctypes.c_int64] * 4,
    "factor": [ctypes.c_void_p] * (2 + 3) + [ctypes.c_int64] * 2,
    "compensate": [ctypes.c_void_p] * (2 + 9) + [ctypes.c_int64] * 7,
    "fit_by_importance": [ctypes.c_void_p] * (2 + 5) + [ctypes.c_int64] * 6,
    "output_errors": [ctypes.c_void_p] * (2 + 3) + [ctypes.c_int64] * 3,
    **{f"encode_trellis_{states}": [ctypes.c_void_p] * (2 + 18) + [ctypes.c_int64] * 6 for states in (8, 64, 256)},
    **{f"encode_gguf_{name.lower()}": [ctypes.c_void_p] * (2 + 6) + [ctypes.c_int64] * 3 for name in BLOCK_TYPES},
    "prepare": [ctypes.c_void_p] * (2 + 5) + [ctypes.c_int64] * 6,
    "decode_trellis": [ctypes.c_void_p] * (2 + 11) + [ctypes.c_int64] * 6,
}
# Kernels that are called with the GIL: getting it back would take longer than they do.
_SHORT = ("sum",)
_loading = threading.Lock()
_loaded: dict[str, Any] = {}
_engines: list[Any] = []  # own the machine code


def address(array: npt.NDArray[Any], dtype: type, count: int, *, written: bool = False) -> int:
    """The address of an array, checked here because the kernels check nothing.

    Raises ValueError if the array has another dtype or size, has gaps, or is `written` to and must not be.
    """
    contiguous = array.flags.c_contiguous
    if array.dtype != dtype or array.size != count or not contiguous:
        found = f"{array.size} of {array.dtype}{'' if contiguous else ' with gaps'}"
        raise ValueError(f"expected {count} contiguous elements of {np.dtype(dtype)}, found {found}")
    if written and not array.flags.writeable:
        raise ValueError("expected a writable array, found one that is read-only")
    return array.ctypes.data


def run(name: str, *arguments: float) -> None:
    """Call a kernel (a key of compiler.KERNELS) with the addresses and numbers that it takes."""
    _kernel(name)(*_IGNORED_ADDRESSES, *arguments)


def run_task(name: str, task: int, threads: int) -> None:
    """Call a kernel of TASK_KERNELS with the address of its task, in several threads at once."""
    run_in_threads(_kernel(name), task, threads)


def _kernel(name: str) -> Any:
    """The function of that name, loaded or compiled on the first call."""
    if name not in _loaded:
        with _loading:
            if name not in _loaded:
                symbol, machine_code = _kept(name) or _compiled(name)
                _loaded[name] = _linked(name, symbol, machine_code)
    return _loaded[name]


def _linked(name: str, symbol: str, machine_code: bytes) -> Any:
    """The function of an object file, ready to be called."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    _engines.append(engine)
    if name in TASK_KERNELS:
        return TASK_FUNCTION(engine.get_function_address(symbol))
    kind = ctypes.PYFUNCTYPE if name in _SHORT else ctypes.CFUNCTYPE
    return kind(ctypes.c_int32, *_ARGUMENTS[name])(engine.get_function_address(symbol))


# --- keeping machine code ---

# For how long to wait, at most, while another process compiles the same kernel. Compiling takes a few seconds.
_MOST_SECONDS_OF_WAITING = 60.0


def _kept(name: str) -> tuple[str, bytes] | None:
    """The symbol and the object file that an earlier run kept; None if there are none, or none to be trusted."""
    for folder in _cache_folders():
        with contextlib.suppress(OSError):
            # It is code that will run, so nobody else may have been able to write it.
            file = read_trusted(folder / _cache_name(name))
            if file is not None and (found := _unpacked(file)) is not None:
                return found
    return None


def _compiled(name: str) -> tuple[str, bytes]:
    """Compile a kernel and keep it, unless another process has done so while this one waited for it."""
    with _alone(name):
        found = _kept(name)
        if found is None:
            with slow_step(COMPILING):
                from pqweights.kernels.compiler import compile_kernel

                found = compile_kernel(name)
            _keep(name, *found)
    return found


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep other processes from compiling the same kernel meanwhile, if there is a folder in which to lock a file."""
    for folder in _cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{_cache_name(name)}.lock"
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            break
    else:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            _wait_for(lock)
        yield
    finally:
        # A process that waits has the file open; one that comes now finds the kernel.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(lock)


def _wait_for(lock: int) -> None:
    """Lock an open file, but do not wait longer than _MOST_SECONDS_OF_WAITING: the other process may be suspended."""
    deadline = time.monotonic() + _MOST_SECONDS_OF_WAITING
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.02)
        else:
            return


def _keep(name: str, symbol: str, machine_code: bytes) -> None:
    """Write a compiled kernel to the first folder that can be written; without one, every run compiles."""
    for folder in _cache_folders():
        with contextlib.suppress(OSError):
            write_trusted(folder / _cache_name(name), _packed(symbol, machine_code))
            break


def _cache_folders() -> list[Path]:
    """Where machine code may be kept: PQWEIGHTS_CACHE if set, or else beside the sources or in the user's cache."""
    users = users_cache()
    beside_sources = not (os.environ.get("PQWEIGHTS_CACHE") or sys.dont_write_bytecode)
    beside = [Path(__file__).parent / "__pycache__"] if beside_sources else []
    return [*beside, *([users] if users else [])]


@functools.cache
def _cache_name(name: str) -> str:
    """The name of a kernel's file, which changes with everything that the machine code depends on."""
    import importlib.metadata

    import llvmlite.binding as llvm

    sources = {source: hashlib.sha256((Path(__file__).parent / source).read_bytes()).hexdigest() for source in SOURCES}
    depends_on = {
        "sources": sources,
        "versions": {package: importlib.metadata.version(package) for package in ("numba", "llvmlite", "numpy")},
        "settings": {key: value for key, value in sorted(os.environ.items()) if key.startswith("NUMBA_")},
        "triple": llvm.get_default_triple(),
        "processor": llvm.get_host_cpu_name(),
        "features": llvm.get_host_cpu_features().flatten(),
    }
    return f"{name}-{hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:32]}.kernel"


def _packed(symbol: str, machine_code: bytes) -> bytes:
    """One file: the sha256 of the rest, the symbol on a line, the object file."""
    content = symbol.encode() + b"\n" + machine_code
    return hashlib.sha256(content).digest() + content


def _unpacked(file: bytes) -> tuple[str, bytes] | None:
    """The inverse of _packed; None for a damaged file."""
    digest, content = file[:32], file[32:]
    if hashlib.sha256(content).digest() != digest:
        return None
    symbol, _, machine_code = content.partition(b"\n")
    return symbol.decode(), machine_code
