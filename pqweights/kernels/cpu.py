"""The CPU backend: machine code that is compiled once for this machine, kept on disk, and called without the GIL.

cpu_kernels.py and cpu_groups.py are compiled by numba, which takes seconds, and whose import alone takes more time and
memory than a small model; so the object code is kept, and later runs load it with llvmlite. Callers bring the threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import math
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

from pqweights.buffers import pageable
from pqweights.dtypes import item_bytes
from pqweights.kernels import (
    BLOCK_SIZE,
    ORTHONORMAL,
    SIGNS,
    VALUE_DTYPES,
    BlockCoding,
    EncodedArrays,
    EncodeStats,
)
from pqweights.kernels.codebook import Codebook

# What the machine code is made from.
SOURCES = ("compiler.py", "cpu_groups.py", "cpu_kernels.py", "lanes.py", "vector.py")

# Cells of the level search for widths up to 5, then 6, 7 and 8; vector.py has the same.
_CELLS = {5: 32, 6: 64, 7: 128, 8: 512}


@functools.lru_cache(maxsize=32)
def _encode_table(
    levels: tuple[float, ...], thresholds: tuple[float, ...]
) -> tuple[npt.NDArray[np.float32], np.float32, np.float32]:
    """The table of vector.quantize for symmetric levels, cells per unit, and the magnitude that the last cell begins with.

    Magnitudes are rounded to whole cells that are narrower than the smallest gap between thresholds, so that at most one
    threshold lies in a cell or so near to its ends that rounding could place a value on the wrong side of one.
    """
    half = len(levels) // 2
    upper, lower = np.array(levels[half:], dtype=np.float32), np.array(levels[:half], dtype=np.float32)
    limits = np.array(thresholds[half:], dtype=np.float64)
    assert np.array_equal(upper, -lower[::-1]) and thresholds[half - 1] == 0
    bits = max(5, len(levels).bit_length() - 1)
    cells = _CELLS[bits]
    width = float(limits[-1]) / (cells - 2)
    slack = width / 1000
    assert len(limits) == 1 or width + 2 * slack < np.diff(limits).min()
    below = np.searchsorted(limits, (np.arange(cells) - 0.5) * width - slack, side="right").astype(np.int32)
    threshold_of = np.append(limits, np.inf).astype(np.float32)[below]
    unused = np.zeros((1 << bits) - 2 * half, dtype=np.float32)
    table = np.concatenate([threshold_of, below.view(np.float32), upper, unused, lower])
    return table, np.float32(1 / width), np.float32((cells - 1) * width)


def _padded_levels(codebook: Codebook) -> npt.NDArray[np.float32]:
    """The levels, filled up to the 32 that the smallest look-up takes."""
    levels = np.zeros(max(32, len(codebook.levels)), dtype=np.float32)
    levels[: len(codebook.levels)] = codebook.levels
    return levels


empty = pageable  # see `pqweights.kernels.Backend.empty`


def encode(values: npt.NDArray[np.uint8], dtype: str, coding: BlockCoding, out: EncodedArrays) -> EncodeStats:
    """See `pqweights.kernels.Backend.encode`."""
    book, exponent = coding.codebook, coding.norm_exponent
    table, cells_per_unit, most = _encode_table(tuple(book.levels.tolist()), tuple(book.thresholds.tolist()))
    blocks, stats = len(out.codes), np.empty(3, dtype=np.float64)
    pointers = (
        _address(values, np.uint8, blocks * BLOCK_SIZE * item_bytes(dtype)),
        table.ctypes.data,
        SIGNS.ctypes.data,
        _address(out.codes, np.uint8, blocks * 16 * book.bits, written=True),
        _address(out.norms, np.uint16, blocks, written=True),
        _address(out.energies, np.float64, blocks, written=True),
        _address(out.errors, np.float64, blocks, written=True),
        stats.ctypes.data,
    )
    settings = (blocks, VALUE_DTYPES[dtype], book.bits, coding.signed)
    scales = (math.ldexp(1, -exponent), math.ldexp(1, exponent), cells_per_unit, most)
    _kernel("encode")(*_IGNORED_ADDRESSES, *pointers, *settings, *scales)
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
        _address(codes, np.uint8, blocks * 16 * coding.codebook.bits),
        _address(norms, np.uint16, blocks),
        levels.ctypes.data,
        SIGNS.ctypes.data,
        _address(values, np.uint8, blocks * BLOCK_SIZE * item_bytes(dtype), written=True),
    )
    settings = (blocks, VALUE_DTYPES[dtype], coding.codebook.bits, coding.signed, coding.rotate)
    exponent = coding.norm_exponent
    scale = math.ldexp(1, exponent - 7) if coding.rotate else math.ldexp(ORTHONORMAL, exponent)
    _kernel("decode")(*_IGNORED_ADDRESSES, *pointers, *settings, scale)


def fit_groups(
    values: npt.NDArray[np.float32],
    settings: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.float32],
    energies: npt.NDArray[np.float64],
    errors: npt.NDArray[np.float64],
    bits: int,
    symmetric: bool,
    middle: bool,
) -> None:
    """Groups [groups * size] to codes [groups, size], scales, offsets, sums of squares and of squared errors [groups].

    settings: where the fit starts, see lanes.py. size: 16, 32, ..., 256.
    """
    groups, size = codes.shape
    assert size % 16 == 0 and 16 <= size <= 256 and 2 <= bits <= 8
    _kernel("fit")(
        *_IGNORED_ADDRESSES,
        _address(values, np.float32, groups * size),
        _address(settings, np.float32, 7),
        _address(codes, np.uint8, groups * size, written=True),
        _address(scales, np.float32, groups, written=True),
        _address(offsets, np.float32, groups, written=True),
        _address(energies, np.float64, groups, written=True),
        _address(errors, np.float64, groups, written=True),
        groups, size, bits, symmetric, middle,
    )  # fmt: skip


def round_groups(
    values: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.float32],
    energies: npt.NDArray[np.float64],
    errors: npt.NDArray[np.float64],
    bits: int,
    rule: int,
) -> None:
    """The same by the rule of a runtime, a number of cpu_groups.py."""
    groups, size = codes.shape
    _kernel("round")(
        *_IGNORED_ADDRESSES,
        _address(values, np.float32, groups * size),
        _address(codes, np.uint8, groups * size, written=True),
        _address(scales, np.float32, groups, written=True),
        _address(offsets, np.float32, groups, written=True),
        _address(energies, np.float64, groups, written=True),
        _address(errors, np.float64, groups, written=True),
        groups, size, bits, rule,
    )  # fmt: skip


def round_floats(
    values: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    energies: npt.NDArray[np.float64],
    errors: npt.NDArray[np.float64],
    mode: int,
) -> None:
    """Groups to the codes of small floats and the bytes of their scales, by a mode of mlx, a number of cpu_groups.py."""
    groups, size = codes.shape
    assert size <= 32  # the kernel's room
    _kernel("round_floats")(
        *_IGNORED_ADDRESSES,
        _address(values, np.float32, groups * size),
        _address(codes, np.uint8, groups * size, written=True),
        _address(scales, np.float32, groups, written=True),
        _address(energies, np.float64, groups, written=True),
        _address(errors, np.float64, groups, written=True),
        groups, size, mode,
    )  # fmt: skip


def rotate(values: npt.NDArray[np.float32], factor: float) -> None:
    """Multiply each run of 128 values by H and the factor, in place."""
    blocks = len(values) // BLOCK_SIZE
    _kernel("rotate")(
        *_IGNORED_ADDRESSES, _address(values, np.float32, blocks * BLOCK_SIZE, written=True), blocks, factor
    )


def pack_bits(codes: npt.NDArray[np.uint8], bits: int, packed: npt.NDArray[np.uint8]) -> None:
    """Codes [8 * n] below 2**bits as one stream of bits [n * bits], the lowest first."""
    eights = len(codes) // 8
    _kernel("pack_bits")(
        *_IGNORED_ADDRESSES,
        _address(codes, np.uint8, eights * 8),
        _address(packed, np.uint8, eights * bits, written=True),
        eights, bits,
    )  # fmt: skip


def pack_tiles(codes: npt.NDArray[np.uint8], order: npt.NDArray[np.int32], packed: npt.NDArray[np.uint8]) -> None:
    """4-bit codes [8 * m, 128 * n] in tiles of 8 x 128, whose nibbles come from the places in `order` [1024]."""
    rows, columns = codes.shape
    _kernel("pack_tiles")(
        *_IGNORED_ADDRESSES,
        _address(codes, np.uint8, rows // 8 * 8 * (columns // 128) * 128),
        _address(order, np.int32, 1024),
        _address(packed, np.uint8, rows * columns // 2, written=True),
        rows // 8, columns // 128,
    )  # fmt: skip


# Where numba's calling convention puts a result (a null pointer) and an exception (none).
_IGNORED = np.zeros(2, dtype=np.uint64)
_IGNORED_ADDRESSES = (_IGNORED.ctypes.data, _IGNORED.ctypes.data + 8)


def _address(array: npt.NDArray[Any], dtype: type, count: int, written: bool = False) -> int:
    """Of an array for which the kernels take it; they check nothing themselves.

    Raises ValueError for one of another dtype or size, with gaps, or that must not be written.
    """
    if array.dtype != dtype or array.size != count or not array.flags.c_contiguous:
        raise ValueError(
            f"expected {count} contiguous elements of {np.dtype(dtype)}, found {array.size} of {array.dtype}"
        )
    if written and not array.flags.writeable:
        raise ValueError("expected an array that may be written")
    return array.ctypes.data


# name -> types of its arguments: two pointers of numba's own, ours, then numbers
_ARGUMENTS: dict[str, list[Any]] = {
    "encode": [ctypes.c_void_p] * (2 + 8) + [ctypes.c_int64] * 4 + [ctypes.c_double] * 2 + [ctypes.c_float] * 2,
    "decode": [ctypes.c_void_p] * (2 + 5) + [ctypes.c_int64] * 5 + [ctypes.c_double],
    "fit": [ctypes.c_void_p] * (2 + 7) + [ctypes.c_int64] * 5,
    "round": [ctypes.c_void_p] * (2 + 6) + [ctypes.c_int64] * 4,
    "round_floats": [ctypes.c_void_p] * (2 + 5) + [ctypes.c_int64] * 3,
    "rotate": [ctypes.c_void_p] * (2 + 1) + [ctypes.c_int64, ctypes.c_float],
    "pack_bits": [ctypes.c_void_p] * (2 + 2) + [ctypes.c_int64] * 2,
    "pack_tiles": [ctypes.c_void_p] * (2 + 3) + [ctypes.c_int64] * 2,
}
_loading = threading.Lock()
_loaded: dict[str, Any] = {}
_engines: list[Any] = []  # own the machine code


def _kernel(name: str) -> Any:
    """The function of that name; loaded, or compiled, on the first call."""
    if name not in _loaded:
        with _loading:
            if name not in _loaded:
                symbol, machine_code = _kept(name) or _compiled(name)
                _loaded[name] = _linked(name, symbol, machine_code)
    return _loaded[name]


def _kept(name: str) -> tuple[str, bytes] | None:
    """Symbol and object file from an earlier run."""
    for folder in _cache_folders():
        with contextlib.suppress(OSError), open(folder / _cache_name(name), "rb") as stream:
            status = os.fstat(stream.fileno())
            ours = status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if ours and (found := _unpacked(stream.read())) is not None:  # it is code: nobody else may have written it
                return found
    return None


def _compiled(name: str) -> tuple[str, bytes]:
    """Compile, and keep the result in the first folder that can be written; without one, every run compiles."""
    from pqweights.kernels.compiler import compile_kernel

    symbol, machine_code = compile_kernel(name)
    for folder in _cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{_cache_name(name)}.{os.getpid()}"
            try:
                partial.write_bytes(_packed(symbol, machine_code))
                partial.chmod(0o644)  # whatever the umask: what others may write is not used
                os.replace(partial, folder / _cache_name(name))
            finally:
                partial.unlink(missing_ok=True)
            break
    return symbol, machine_code


def _linked(name: str, symbol: str, machine_code: bytes) -> Any:
    """The function of an object file, callable."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    _engines.append(engine)
    return ctypes.CFUNCTYPE(ctypes.c_int32, *_ARGUMENTS[name])(engine.get_function_address(symbol))


def _cache_folders() -> list[Path]:
    """Where machine code may be kept: PQWEIGHTS_CACHE if it is set; else beside the sources, else in the user's cache."""
    chosen = os.environ.get("PQWEIGHTS_CACHE")
    if chosen:
        return [Path(chosen)]
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    beside = [] if sys.dont_write_bytecode else [Path(__file__).parent / "__pycache__"]
    return [*beside, *([Path(users) / "pqweights"] if os.path.isabs(users) else [])]  # without a home, ~ stays ~


@functools.cache
def _cache_name(name: str) -> str:
    """Names everything that the machine code depends on: our sources, the compiler and its settings, and the processor."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((Path(__file__).parent / source).read_bytes())
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite", "numpy")]
    settings = sorted((key, value) for key, value in os.environ.items() if key.startswith("NUMBA_"))
    machine = (llvm.get_default_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    digest.update(repr((versions, settings, machine)).encode())
    return f"{name}-{digest.hexdigest()[:32]}.kernel"


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
