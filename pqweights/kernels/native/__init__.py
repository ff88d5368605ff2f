"""The compiled kernels: which library this processor gets, and the one way to call what is in it.

The C++ is beside this file. kernels.inc lists the kernels with the types of their arguments, which the library tells
when it is loaded. An array becomes an argument by `array`, which checks it. The kernels check nothing themselves, start
no threads, and run without the GIL. docs/kernels.md says how one is written.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.errors import DeviceError, MissingDependencyError
from pqweights.kernels.native.sources import FOLDER, sources_digest
from pqweights.kernels.openmp import TASK_FUNCTION, run_in_threads
from pqweights.kernels.workers import scratch

LEVEL_VARIABLE = "PQWEIGHTS_LEVEL"
# Of each kind of processor, the best first.
LEVELS = ("x86-64-v4-vnni", "x86-64-v4", "x86-64-v3", "x86-64-v2", "aarch64")
LIBRARIES = FOLDER / "lib"
# Tiles are cut so that each thread gets at least this many, and a slow one delays the others by one tile.
TILES_PER_THREAD = 4
# What an array is taken for where only its address counts; it may be empty.
_MEMORY: Any = ctypes.c_char * 0

# What torch calls an element -> what numpy calls one of the same size; numpy has no bfloat16.
_TORCH_DTYPES = {
    "torch.bfloat16": "u2",
    "torch.float16": "u2",
    "torch.float32": "f4",
    "torch.float64": "f8",
    "torch.uint8": "u1",
    "torch.int8": "i1",
    "torch.int16": "i2",
    "torch.int32": "i4",
    "torch.int64": "i8",
}


@dataclass(slots=True)
class Array:
    """The memory of an array or tensor, which was checked; it must be kept alive by `owner` until the call ends."""

    address: int
    kind: str  # r or w, for read or written, and numpy's short name of an element: "r u1", "w f4", ...
    size: int
    owner: Any

    @property
    def dtype(self) -> str:
        """numpy's short name of an element."""
        return self.kind[2:]

    @property
    def written(self) -> bool:
        """Whether a kernel may write it."""
        return self.kind[0] == "w"


def array(values: Any, dtype: Any, count: int, *, written: bool = False) -> Array:
    """Check a numpy array, or a tensor on the CPU, that a kernel is to read or, if `written`, to write.

    dtype: numpy's; a tensor of 16-bit floats counts as uint16. count: the number of elements that the kernel expects.

    Raises ValueError if the array has another dtype or size, has gaps, is not aligned, is on another device, or is
    `written` and must not be.
    """
    kind = _kind(dtype, written)
    if isinstance(values, np.ndarray):
        flags = values.flags
        if values.size == count and _kind(values.dtype, written) == kind:
            if flags.carray:  # contiguous, aligned and writable
                return Array(ctypes.addressof(_MEMORY.from_buffer(values)), kind, count, values)
            if flags.c_contiguous and flags.aligned and not written:
                return Array(values.ctypes.data, kind, count, values)  # which takes six times as long
        contiguous, writable = flags.c_contiguous, flags.writeable
        size, where = values.size, "writable memory" if writable else "read-only memory"
    else:
        contiguous = values.is_contiguous()
        address, fits = values.data_ptr(), values.numel() == count and contiguous and not values.is_neg()
        if fits and values.is_cpu and _kind(values.dtype, written) == kind and not address % values.element_size():
            return Array(address, kind, count, values)
        size, where = values.numel(), f"the device {values.device}"
    raise ValueError(
        f"expected {count} elements of {np.dtype(dtype)} without gaps in {'writable' if written else 'CPU'} memory, "
        f"found {size} of {values.dtype} {'without' if contiguous else 'with'} gaps in {where}"
    )


def room(purpose: str, dtype: type[np.number[Any]], count: int) -> Array:
    """Return memory of the thread in which a kernel computes; its contents mean nothing before and after."""
    memory = scratch(purpose, count * np.dtype(dtype).itemsize).view(dtype)
    return array(memory, dtype, count, written=True)


@functools.cache
def _kind(dtype: Any, written: bool) -> str:
    """`Array.kind` of a type of numpy or torch; another name for types that numpy does not have."""
    name = str(dtype)
    if name.startswith("torch."):
        name = _TORCH_DTYPES.get(name, name)
    else:
        own: np.dtype[Any] = np.dtype(dtype)
        name = own.str[1:] if own.isnative else own.str
    return f"{'w' if written else 'r'} {name}"


def counter() -> Array:
    """A zero from which the threads of a call count up together."""
    zero = ctypes.c_int64(0)
    return Array(ctypes.addressof(zero), "w i8", 1, zero)


def tile_length(items: int, *, heads: int, threads: int, least: int) -> int:
    """Into runs of how many items those of each head are cut to be shared out among threads, `least` or more."""
    tiles = -(-TILES_PER_THREAD * threads // heads)
    return max(least, -(-items // tiles))


@functools.cache
def _slots(types: tuple[str, ...]) -> tuple[struct.Struct, list[tuple[int, str]]]:
    """How arguments of these types lie in memory, and which of them are arrays, with the types of these."""
    codes = {"integer": "q", "number": "d"}
    arrays = [(index, kind) for index, kind in enumerate(types) if kind not in codes]
    return struct.Struct("@" + "".join(codes.get(kind, "P") for kind in types)), arrays


def packed(name: str, types: tuple[str, ...], arguments: tuple[Array | float | None, ...]) -> bytes:
    """The arguments as the slots from which a kernel takes them: an address of 0 for None.

    types: those of the kernel's arguments, as interface.hpp names them

    Raises TypeError if their number or a type is not that of the kernel.
    """
    if len(arguments) != len(types):
        raise TypeError(f"{name}: expected {len(types)} arguments, found {len(arguments)}")
    numbers: list[Any] = list(arguments)
    slots, arrays = _slots(types)
    for index, kind in arrays:
        given = numbers[index]
        if given is None:
            numbers[index] = 0
        elif given.__class__ is Array and given.kind == kind:
            numbers[index] = given.address
        else:
            found = repr(given.kind if isinstance(given, Array) else given)
            raise TypeError(f"{name}: expected memory of type {kind!r}, found {found}")
    try:
        return slots.pack(*numbers)
    except struct.error as error:
        raise TypeError(f"{name}: {error}") from None


def call(name: str, *arguments: Array | float | None, threads: int = 1) -> None:
    """Call a kernel of native/kernels.inc.

    arguments: what `array` returned, or None for memory that is not there, and numbers.
    threads: in how many threads at once, among which the kernel shares out its work.

    Raises MissingDependencyError without a library for this processor, and TypeError for other arguments than the
    kernel takes, or threads that it cannot share its work with.
    """
    if name not in functions():
        raise TypeError(f"there is no kernel {name!r}: expected one of {', '.join(functions())}")
    types, function = functions()[name]
    if threads != 1 and types[0] != "w i8":
        raise TypeError(f"{name}: expected one thread: it has no counter from which threads take their share")
    run_in_threads(function, packed(name, types, arguments), threads)


@functools.cache
def level() -> str | None:
    """The level of the library that this process uses: a value of LEVELS, or None where there is none.

    Raises DeviceError if the environment variable PQWEIGHTS_LEVEL asks for one that is not there.
    """
    wanted = os.environ.get(LEVEL_VARIABLE)
    for name in [wanted] if wanted else LEVELS:
        library = _library(name, LIBRARIES)
        if library is not None and library.pqweights_runs_here():
            return name
    if wanted and wanted != "none":
        there = ", ".join(path.stem for path in sorted(LIBRARIES.glob("*.so"))) or "none"
        raise DeviceError(
            f"{LEVEL_VARIABLE}={wanted}: expected a level that this processor has and that is built: {there}"
        )
    return None


@functools.cache
def _library(name: str, folder: Path) -> Any:
    """The library of a level; None if it is not there, or of another system or kind of processor."""
    path = folder / f"{name}.so"
    try:
        return ctypes.CDLL(str(path)) if path.exists() else None
    except OSError:
        return None


class _KernelEntry(ctypes.Structure):
    """`Kernel` of interface.hpp."""

    _fields_ = (("name", ctypes.c_char_p), ("types", ctypes.POINTER(ctypes.c_char_p)), ("call", ctypes.c_void_p))


@functools.cache
def functions() -> dict[str, tuple[tuple[str, ...], Any]]:
    """The types of the arguments of all kernels of the library, and what calls each, by name.

    Raises MissingDependencyError if there is no library, or one that was built from other sources than those beside it.
    """
    chosen = level()
    if chosen is None:
        if os.environ.get(LEVEL_VARIABLE):
            raise MissingDependencyError(f"{LEVEL_VARIABLE} is none, and this needs the compiled kernels")
        raise MissingDependencyError(
            "the kernels are not compiled for this processor; in a checkout: make kernels; else: pip install pqweights"
        )
    library = _library(chosen, LIBRARIES)
    _check_sources(library, chosen)
    library.pqweights_kernels.restype = ctypes.POINTER(_KernelEntry)
    functions = {}
    for entry in _until_null(library.pqweights_kernels(), lambda entry: entry.name):
        types = tuple(kind.decode() for kind in _until_null(entry.types, lambda kind: kind))
        functions[entry.name.decode()] = types, TASK_FUNCTION(entry.call)
    return functions


def _until_null(pointer: Any, is_there: Callable[[Any], Any]) -> Iterator[Any]:
    """The elements of an array that ends with one that is not there."""
    index = 0
    while is_there(pointer[index]):
        yield pointer[index]
        index += 1


def _check_sources(library: Any, level: str) -> None:
    """Refuse a library that was built from other sources than those of this checkout; installed, there are none."""
    digest = sources_digest()
    library.pqweights_sources.restype = ctypes.c_char_p
    if digest is not None and library.pqweights_sources().decode() != digest:
        raise MissingDependencyError(
            f"{level}.so was compiled from other sources than those beside it: make kernels LEVELS={level}"
        )
