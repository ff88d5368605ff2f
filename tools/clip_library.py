"""Builds what the tests of towers for images compute with: clip.cpp of llama.cpp, from llama-cpp-python's source.

    python tools/clip_library.py

The prebuilt library that tools/llama_library.py takes does not have it. This downloads 77 MB, and compiles for ten
seconds on a core; tests/support/clip_images.cpp is the function that the tests call.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RESULT = Path(sys.prefix) / "lib" / "libclip_images.so"
SHIM = Path(__file__).parents[1] / "tests" / "support" / "clip_images.cpp"
# Programs, and what the function does without.
LEFT_OUT = ("mtmd-cli.cpp", "mtmd-helper.cpp", "mtmd-helper-gen.cpp", "deprecation-warning.cpp")
INCLUDED = ("include", "ggml/include", "vendor", "tools/mtmd")
LINKED = ("libllama", "libggml", "libggml-base")
OPTIONS = ("-std=c++17", "-O0", "-fPIC", "-DLLAMA_SHARED")


def main() -> None:
    """Build the library, unless it is there."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        sys.exit("llama-cpp-python is not installed")
    if RESULT.exists() and RESULT.stat().st_mtime > SHIM.stat().st_mtime:
        return
    with tempfile.TemporaryDirectory() as folder:
        build(source(Path(folder)), Path(spec.origin).parent / "lib")


def source(folder: Path) -> Path:
    """Download the source of the installed version; return the folder of llama.cpp in it."""
    version = importlib.metadata.version("llama-cpp-python")
    wanted = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder), f"llama-cpp-python=={version}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
    subprocess.run(["tar", "-xzf", next(folder.glob("*.tar.gz")), "-C", folder], check=True)
    return next(folder.glob("*/vendor/llama.cpp"))


def build(llama: Path, libraries: Path) -> None:
    """Compile clip.cpp and its models, and link them with the libraries beneath the binding."""
    mtmd = llama / "tools" / "mtmd"
    models = mtmd / "all_models.cpp"  # one file, so that what they all include is read once
    models.write_text("".join(f'#include "{path}"\n' for path in sorted(mtmd.glob("models/*.cpp"))))
    files = [path for path in mtmd.glob("*.cpp") if path.name not in LEFT_OUT]
    include = [f"-I{llama / path}" for path in INCLUDED]

    def compiled(path: Path) -> str:
        target = mtmd / f"{path.stem}.o"
        subprocess.run(["g++", *OPTIONS, *include, "-c", str(path), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [*files, SHIM]))
    linked = [f"-l:{path.name}" for path in sorted(libraries.glob("*.so")) if path.name.split(".")[0] in LINKED]
    search = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", "-shared", "-o", str(RESULT), *objects, *search, *linked], check=True)


if __name__ == "__main__":
    main()
