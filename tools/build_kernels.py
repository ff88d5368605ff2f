"""Compile the kernels: one shared library for each level of processor.

    python tools/build_kernels.py [--out FOLDER] [--target linux-x86_64] [--levels own]
    python tools/build_kernels.py --objects

The compiler is the clang inside the PyPI package ziglang, which compiles for every target from any machine, or the
clang that the environment variable CXX names, for this machine alone. Objects are kept in build/kernels, or in the
folder that PQWEIGHTS_OBJECTS names, so what did not change is not compiled again; --objects makes those of all targets
and levels, and no libraries. Needs nothing but the standard library, as setup.py runs it before anything is there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "pqweights" / "kernels" / "native"
LIBRARIES = SOURCES / "lib"
# Nearly all sources begin with it; its names of instructions take half a second to read.
SHARED_HEADER = SOURCES / "lanes.hpp"
OBJECTS = Path(os.environ.get("PQWEIGHTS_OBJECTS") or ROOT / "build" / "kernels")

# The levels of processors of each kind, best last -> zig's name of the processor
LEVELS = {
    "x86_64": {
        "x86-64-v2": "x86_64_v2",
        "x86-64-v3": "x86_64_v3",
        "x86-64-v4": "x86_64_v4",
        "x86-64-v4-vnni": "x86_64_v4+avx512vbmi+avx512vbmi2+avx512vnni",
    },
    "aarch64": {"aarch64": "generic"},
}
# What VBMI, VBMI2 and VNNI make faster; the other sources have the same objects at the last level as at x86-64-v4.
FASTER_WITH_VNNI = ("polar_scores.cpp", "products.cpp", "scalar_encoding.cpp")


class Job(NamedTuple):
    """A source to be compiled to an object, by a command to which the names of both are added."""

    command: list[str]
    source: Path
    object: Path


class Target(NamedTuple):
    """A kind of processor, zig's name of the system, what a wheel for it has in its name, and levels, best last."""

    kind: str
    zig_name: str
    wheel_tag: str
    levels: tuple[str, ...]


_X86, _ARM = tuple(LEVELS["x86_64"]), tuple(LEVELS["aarch64"])
TARGETS = {
    "linux-x86_64": Target("x86_64", "x86_64-linux-gnu.2.17", "manylinux2014_x86_64", _X86),
    "linux-aarch64": Target("aarch64", "aarch64-linux-gnu.2.17", "manylinux2014_aarch64", _ARM),
    # Hardly any Mac has AVX-512.
    "macos-x86_64": Target("x86_64", "x86_64-macos.11.0", "macosx_11_0_x86_64", _X86[:2]),
    "macos-arm64": Target("aarch64", "aarch64-macos.11.0", "macosx_11_0_arm64", _ARM),
}
FLAGS = (
    "-std=c++20", "-O3", "-g0", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti",
    "-fvisibility=hidden", "-fno-sanitize=all", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes",
    "-ftemplate-backtrace-limit=2",
)  # fmt: skip


def own_target() -> str:
    """The target of this machine; one that is not a key of TARGETS has no kernels."""
    system = {"Darwin": "macos"}.get(platform.system(), platform.system().lower())
    machine = {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return f"{system}-{'aarch64' if (system, machine) == ('linux', 'arm64') else machine}"


def levels_of(target: str, asked: str) -> list[str]:
    """The levels that were asked for: "own", "all", or names with commas between them."""
    if asked == "all" or (asked == "own" and target != own_target()):
        return list(TARGETS[target].levels)
    return _own_levels(target) if asked == "own" else asked.split(",")


def _own_levels(target: str) -> list[str]:
    """The best level that this processor has, as far as Linux says; all levels elsewhere."""
    levels = list(TARGETS[target].levels)
    if TARGETS[target].kind != "x86_64":
        return levels
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = set(next(line for line in lines if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return levels
    if {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"} <= flags:
        return levels[3:] if {"avx512vbmi", "avx512_vbmi2", "avx512_vnni"} <= flags else levels[2:3]
    return levels[1:2] if {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"} <= flags else levels[:1]


class Compiler:
    """The commands that compile and link for a target.

    zig_target: zig's name of the system.
    version: what the compiler says of itself
    """

    def __init__(self, target: str) -> None:
        self.kind, self.zig_target = TARGETS[target][:2]
        chosen = shlex.split(os.environ.get("CXX", ""))
        self._clang = chosen if chosen and target == own_target() and _is_clang(chosen) else None
        if self._clang is None and importlib.util.find_spec("ziglang") is None:
            sys.exit("error: compiling the kernels needs clang: pip install ziglang, or name a clang in CXX")
        command = [*self._clang, "--version"] if self._clang else [sys.executable, "-m", "ziglang", "version"]
        self.version = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def compile(self, level: str | None) -> list[str]:
        """The command that compiles for a level, or for the oldest processor of the kind."""
        oldest = "x86_64" if self.kind == "x86_64" else "generic"
        zig_name = LEVELS[self.kind][level] if level else oldest
        wide = ["-mprefer-vector-width=512"] if level and "v4" in level else []
        if self._clang is not None:
            march = [f"-march={(level or 'x86-64').removesuffix('-vnni')}"] if self.kind == "x86_64" else []
            more = [f"-m{feature}" for feature in zig_name.split("+")[1:]]
            return [*self._clang, *march, *more, *wide, *FLAGS]
        return [*self.zig("c++"), f"-mcpu={zig_name}", *wide, *FLAGS]

    def link(self) -> list[str]:
        """The command that links objects to a library; `zig c++` would build the C++ library first, for minutes."""
        if self._clang is not None:
            return [*self._clang, "-shared", "-nostdlib++"]
        # Without the last two, zig first compiles what sanitizers and wide integers need, for each target.
        return [*self.zig("cc"), "-shared", "-s", "-O2", "-rtlib=none"]

    def zig(self, tool: str) -> list[str]:
        """The beginning of a command of zig."""
        return [sys.executable, "-m", "ziglang", tool, "-target", self.zig_target]


def _sources_module() -> Any:
    """The module that names the sources, without importing the library, which may lack what it imports."""
    spec = importlib.util.spec_from_file_location("sources", SOURCES / "sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_clang(command: list[str]) -> bool:
    try:
        found = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return "clang" in found.stdout


def build(target: str, levels: list[str], out: Path) -> list[Path]:
    """Compile what changed, and return the libraries, one for each level."""
    compiler = Compiler(target)
    (objects,) = compiled({compiler: levels})
    out.mkdir(parents=True, exist_ok=True)
    libraries = [out / f"{level}.so" for level in levels]
    for level, library in zip(levels, libraries, strict=True):
        run_to([*compiler.link(), *map(str, objects[level])], library)
    return libraries


def compiled(wanted: dict[Compiler, list[str]]) -> list[dict[str, list[Path]]]:
    """The objects of each level of each compiler, compiled unless they are there."""
    known = [objects_of(compiler, levels) for compiler, levels in wanted.items()]
    OBJECTS.mkdir(parents=True, exist_ok=True)
    compile_all([job for _, jobs in known for job in jobs])
    return [objects for objects, _ in known]


def objects_of(compiler: Compiler, levels: list[str]) -> tuple[dict[str, list[Path]], list[Job]]:
    """The objects of each level, and how to make those of them that are not there."""
    headers = b"".join(path.read_bytes() for path in sorted([*SOURCES.glob("*.hpp"), *SOURCES.glob("*.inc")]))
    own_flags = {"level.cpp": "-DPQWEIGHTS_LEVEL={level}", "interface.cpp": '-DPQWEIGHTS_SOURCES="{digest}"'}
    digest = _sources_module().sources_digest()
    jobs, objects = dict[Path, Job](), {level: list[Path]() for level in levels}
    for level in levels:
        number = list(LEVELS[compiler.kind]).index(level) + 2  # of level.cpp
        for source in sorted(SOURCES.glob("*.cpp")):
            command = compiler.compile(_level_of_source(source.name, level))
            if source.name in own_flags:
                command.append(own_flags[source.name].format(level=number, digest=digest))
            # Not where the compiler is: a build in an environment of its own makes the same objects.
            options = repr((compiler.version, command[1:])).encode()
            key = hashlib.sha256(options + source.read_bytes() + headers).hexdigest()[:24]
            path = OBJECTS / f"{source.stem}-{key}.o"
            objects[level].append(path)
            if not path.exists():
                jobs[path] = Job(command, source, path)
    return objects, list(jobs.values())


def _level_of_source(name: str, level: str) -> str | None:
    """The level that a source is compiled for as a part of the library of a level. None: see Compiler.compile."""
    if name == "level.cpp":
        return None
    return "x86-64-v4" if level == "x86-64-v4-vnni" and name not in FASTER_WITH_VNNI else level


def compile_all(jobs: list[Job]) -> None:
    """Compile on all cores. What takes longest to read is compiled once for all sources with the same options."""
    counts = Counter(tuple(job.command) for job in jobs)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        shared = {command: Path(folder, f"{i}.pch") for i, command in enumerate(counts) if counts[command] > 1}

        def compile_header(command: tuple[str, ...]) -> None:
            # zig's usual cache may have one with paths into another environment, say one of pip's that is gone.
            run_to([*command, "-x", "c++-header", str(SHARED_HEADER)], shared[command], ZIG_GLOBAL_CACHE_DIR=folder)

        list(pool.map(compile_header, shared))

        def compile_one(job: Job) -> None:
            header = shared.get(tuple(job.command))
            including = ["-include-pch", str(header)] if header else []
            run_to([*job.command, *including, "-c", str(job.source)], job.object)

        list(pool.map(compile_one, jobs))


def run_to(command: list[str], path: Path, **variables: str) -> None:
    """Run a command that writes a file, which appears whole or not at all. Ends the program if it fails.

    variables: of the environment, beside those of this process
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    part.replace(path)


def main() -> None:
    """Build what the options say."""
    parser = argparse.ArgumentParser(description="Compile the kernels.")
    parser.add_argument("--out", type=Path, default=LIBRARIES)
    parser.add_argument("--target", choices=TARGETS, default=own_target())
    parser.add_argument("--levels", default="own", help="own, all, or names with commas between them")
    parser.add_argument("--objects", action="store_true", help="compile for all targets and levels, and link nothing")
    arguments = parser.parse_args()
    if arguments.objects:
        compiled({Compiler(target): levels_of(target, "all") for target in TARGETS})
        return
    for library in build(arguments.target, levels_of(arguments.target, arguments.levels), arguments.out):
        print(library)


if __name__ == "__main__":
    main()
