"""What tests compute with besides the environment of development; `make test` and `make runtimes` install it.

llama.cpp is in that environment; vLLM, which wants other versions of torch and transformers, in one beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_NAMES = ("qemu-aarch64-static", "qemu-aarch64")
# An environment whose name ends with -vllm.
VLLM = Path(f"{sys.prefix}-vllm")
# Of aarch64, in the environment or of the system.
EMULATOR = next(filter(None, (shutil.which(n, path=f"{sys.prefix}/bin:{os.environ['PATH']}") for n in _NAMES)), None)
# llama.cpp's towers for images, which its binding has no library for: tools/clip_library.py builds it.
CLIP = Path(sys.prefix) / "lib" / "libclip_images.so"


def run_in_vllm(script: Path, result: Path, job: str) -> None:
    """Let vLLM's Python run a script, without the paths and settings of ours. job: the standard input"""
    command = [str(VLLM / "bin" / "python"), "-I", str(script), str(result)]
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
