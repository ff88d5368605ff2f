"""Print the digests of what whole commands write, with the compiled kernels of one level, as JSON.

    python tests/support/run_commands.py SOURCE OUT --libraries FOLDER

SOURCE is a folder with a model that the gguf target knows. With 1, 2 and 3 threads: a master, one without loss, and of
this and of the source a GGUF file and an export for vLLM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import pqweights
from pqweights.kernels import native

THREADS = (1, 2, 3)


def made(source: Path, out: Path, threads: int) -> dict[str, str]:
    """Return the digest of the weights of each result, by its name."""
    pqweights.quantize(source, out / "master", threads=threads)
    pqweights.quantize(source, out / "trellis", recipe="t4", threads=threads)
    lossless = out / "lossless" / source.name  # files of GGUF hold the names of folders
    pqweights.quantize(source, lossless, lossless=True, threads=threads)
    for name, of in (("source", source), ("lossless", lossless)):
        pqweights.export(of, out / f"gguf of {name}", "gguf", type="q4_k_m", threads=threads, without_tokenizer=True)
        pqweights.export(of, out / f"vllm of {name}", "vllm", threads=threads)
    return {folder.name: digest(folder) for folder in sorted(out.iterdir())}


def digest(folder: Path) -> str:
    """Return the digest of the files with weights in a folder."""
    files = sorted([*folder.rglob("*.safetensors"), *folder.rglob("*.gguf")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--libraries", type=Path)
    arguments = parser.parse_args()
    native.LIBRARIES = arguments.libraries
    results = [made(arguments.source, arguments.out / str(threads), threads) for threads in THREADS]
    print(json.dumps({"level": native.level(), "results": results}))


if __name__ == "__main__":
    _main()
