"""Kernels in a process of another kind: on an emulated processor, or compiled with sanitizers.

`Runner.call` takes the place of `pqweights.kernels.native.call`. Every array is sent to kernel_runner.cpp, which keeps
it in memory of exactly its size, and what the kernel wrote comes back.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import build_kernels

from pqweights.kernels import native

SOURCE = Path(__file__).with_suffix(".cpp")
FREESTANDING = SOURCE.with_name("freestanding.cpp")


class RunnerError(Exception):
    """The process ended: what it wrote to stderr."""


class Runner:
    """A process that calls kernels."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )

    def call(self, name: str, *arguments: Any, threads: int = 1) -> None:
        """Call a function of the library in one thread."""
        types, _ = native.functions()[name]
        native.packed(name, types, arguments)  # checks them
        sent = [struct.pack("<I", len(name)), name.encode()]
        for kind, argument in zip(types, arguments, strict=True):
            if kind == "integer":
                sent.append(struct.pack("<q", argument))
            elif kind == "number":
                sent.append(struct.pack("<d", argument))
            elif argument is None:
                sent.append(struct.pack("<q", -1))
            else:
                memory = content_of(argument)
                sent += [struct.pack("<q", len(memory)), memory]
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(b"".join(sent))
            for argument in arguments:
                if isinstance(argument, native.Array) and argument.written:
                    _receive(stdout, argument)
            if self._process.poll() is not None:
                raise EOFError
        except (BrokenPipeError, EOFError):
            raise RunnerError(self._errors()) from None

    def _errors(self) -> str:
        assert self._process.stderr is not None
        text = self._process.stderr.read().decode(errors="replace")
        return f"exit status {self._process.wait()}\n{text}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def size_of(array: native.Array) -> int:
    """The bytes of an argument."""
    return array.size * int(array.dtype[1:])


def content_of(array: native.Array) -> bytes:
    """The bytes in the memory of an argument."""
    return ctypes.string_at(array.address, size_of(array))


def _receive(stdout: Any, argument: native.Array) -> None:
    """Fill the memory of an argument with what comes."""
    memory = memoryview((ctypes.c_char * size_of(argument)).from_address(argument.address)).cast("B")
    while len(memory):
        count = stdout.readinto(memory)
        if not count:
            raise EOFError
        memory = memory[count:]


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[Runner]:
    """Let all kernels of this process run in another one."""
    runner, own = Runner(command), native.call
    native.call = runner.call
    try:
        yield runner
    finally:
        native.call = own
        runner.close()


def emulated_command(emulator: str, folder: Path) -> list[str]:
    """The command that runs kernels on an emulated aarch64; the program is made in the folder.

    Its objects are those of the library for Linux; freestanding.cpp has the few functions of C that they call.
    """
    compiler = build_kernels.Compiler("linux-aarch64")
    (objects,) = build_kernels.compiled({compiler: ["aarch64"]})
    own = [folder / f"{source.stem}.o" for source in (SOURCE, FREESTANDING)]
    for source, out in zip((SOURCE, FREESTANDING), own, strict=True):
        own_flags = ["-fno-builtin", f"-I{build_kernels.SOURCES}"]
        build_kernels.run_to([*compiler.compile(None), *own_flags, "-c", str(source)], out)
    program = folder / "runner-aarch64"
    link = [*compiler.zig("cc"), "-nostdlib", "-static", "-s"]
    build_kernels.run_to([*link, *map(str, [*own, *objects["aarch64"]])], program)
    return [emulator, str(program)]


def sanitized_command() -> list[str]:
    """The same for the best level of this processor, with the sanitizer of addresses, of which g++ brings the library.

    What C++ leaves undefined (indices of arrays, conversions, shifts, ...) ends the program as well.
    The program stays beside the objects of the kernels until a source changes.
    """
    linker, own = shutil.which("g++"), build_kernels.own_target()
    if linker is None:
        raise SystemExit("error: g++ is not installed, whose library of the sanitizer is linked")
    compiler = build_kernels.Compiler(own)
    kinds = "undefined,float-cast-overflow,local-bounds"
    sanitizing = [f"-fsanitize={kinds}", f"-fsanitize-trap={kinds}", "-fsanitize=address", "-O1"]
    sanitizing += ["-fsanitize-address-outline-instrumentation"]  # a call for each check is compiled in half the time
    defined = ["-DPQWEIGHTS_LEVEL=0", '-DPQWEIGHTS_SOURCES=""', f"-I{build_kernels.SOURCES}"]
    command = [*compiler.compile(build_kernels.levels_of(own, "own")[-1]), *sanitizing, *defined]
    sources = [*sorted(build_kernels.SOURCES.glob("*.?pp")), *sorted(build_kernels.SOURCES.glob("*.inc")), SOURCE]
    key = hashlib.sha256(repr((compiler.version, command[1:], [path.read_bytes() for path in sources])).encode())
    folder = build_kernels.OBJECTS / f"sanitized-{key.hexdigest()[:24]}"
    program = folder / "runner"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        cpp = [path for path in sources if path.suffix == ".cpp"]
        jobs = [build_kernels.Job(command, path, folder / f"{path.stem}.o") for path in cpp]
        build_kernels.compile_all(jobs)
        build_kernels.run_to([linker, "-fsanitize=address", *(str(job.object) for job in jobs)], program)
    return [str(program)]
