"""Open wheels and check the kernels in them: every level there, nothing exported or imported that should not be.

    python tools/check_wheels.py dist/*.whl

Needs lief. `make wheels` runs it. What this machine can run is run by tools/check_installed.py.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import lief
from build_kernels import TARGETS

lief.logging.disable()
MOST_BYTES = 5_000_000
FOLDER = "pqweights/kernels/native/lib/"
EXPORTS = {"pqweights_kernels", "pqweights_sources", "pqweights_runs_here"}
# What the linker for macOS adds.
ADDED = {"_mh_dylib_header", "__mh_dylib_header", "__dso_handle", "___dso_handle"}
# What the kernels may ask of the C library, and of the loader of macOS.
IMPORTS = {"memcpy", "memmove", "memset", "memset_pattern16", "bzero", "__bzero"}
IMPORTS |= {"dyld_stub_binder", "_dyld_stub_binder"}
MACHINES = {
    "linux-x86_64": lief.ELF.ARCH.X86_64,
    "linux-aarch64": lief.ELF.ARCH.AARCH64,
    "macos-x86_64": lief.MachO.Header.CPU_TYPE.X86_64,
    "macos-arm64": lief.MachO.Header.CPU_TYPE.ARM64,
}


def problems_of(library: bytes, target: str) -> list[str]:
    """What is wrong with a library for a target."""
    opened = lief.parse(library)
    machine = opened.header.machine_type if isinstance(opened, lief.ELF.Binary) else opened.header.cpu_type
    strip = "_" if isinstance(opened, lief.MachO.Binary) else ""
    exported = {str(function.name).removeprefix(strip) for function in opened.exported_functions}
    imported = {str(function.name).removeprefix(strip) for function in opened.imported_functions}
    found = [] if machine == MACHINES[target] else [f"made for {machine}"]
    found += [f"exports {name}" for name in sorted(exported - EXPORTS - ADDED)]
    found += [f"lacks {name}" for name in sorted(EXPORTS - exported)]
    found += [f"needs {name}" for name in sorted(imported - IMPORTS)]
    return found


def check(path: Path) -> list[str]:
    """What is wrong with a wheel."""
    tag = path.stem.split("-")[-1]
    (target,) = (name for name, target in TARGETS.items() if target.wheel_tag == tag)
    wheel = zipfile.ZipFile(path)
    names = [name for name in wheel.namelist() if name.startswith("pqweights/kernels/native/")]
    libraries = {Path(name).stem: wheel.read(name) for name in names if name.startswith(FOLDER)}
    problems = [f"has {name}" for name in names if name.endswith((".cpp", ".hpp", ".inc"))]
    if path.stat().st_size > MOST_BYTES:
        problems.append(f"{path.stat().st_size} bytes: expected {MOST_BYTES} at most")
    if set(libraries) != set(TARGETS[target].levels):
        problems.append(f"levels: expected {', '.join(TARGETS[target].levels)}, found {', '.join(libraries)}")
    for level, library in libraries.items():
        problems += [f"{level}: {problem}" for problem in problems_of(library, target)]
    sizes = ", ".join(f"{level} {len(library) / 1e3:.0f} kB" for level, library in libraries.items())
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB; {sizes}")
    return [f"{path.name}: {problem}" for problem in problems]


def main() -> None:
    """Check the wheels that are named; exits with 1 and a line for each problem."""
    problems = [problem for path in sys.argv[1:] for problem in check(Path(path))]
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))


if __name__ == "__main__":
    main()
