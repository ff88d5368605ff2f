"""What the environment of development does not have: llama.cpp and vLLM, which compute with exports, and an emulator.

A test, or a module, that needs one says so. Without it, it is skipped, and the skip says which command installs it;
with --require-runtimes, as `make test-runtimes` and .ci/run ask, it fails.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_NAMES = ("qemu-aarch64-static", "qemu-aarch64")
# vLLM wants other versions of torch and transformers: an environment beside ours, whose name ends with -vllm.
VLLM = Path(f"{sys.prefix}-vllm")
# Of aarch64, in the environment or of the system.
EMULATOR = next(filter(None, (shutil.which(n, path=f"{sys.prefix}/bin:{os.environ['PATH']}") for n in _NAMES)), None)
# llama.cpp's towers for images, which its binding has no library for: tools/clip_library.py builds it.
CLIP = Path(sys.prefix) / "lib" / "libclip_images.so"
IS_INSTALLED: dict[str, Callable[[], bool]] = {
    "llama.cpp": lambda: importlib.util.find_spec("llama_cpp") is not None,
    "clip.cpp": CLIP.exists,
    "vLLM": lambda: (VLLM / ".ready").exists(),
    "qemu": lambda: EMULATOR is not None,
}
OPTION = "--require-runtimes"
_required = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        OPTION, action="store_true", help="fail, instead of skipping, where llama.cpp, vLLM or qemu is missing"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the option."""
    global _required
    _required = config.getoption(OPTION)


def need(name: str) -> None:
    """End the test, or the module, here if a runtime is not installed."""
    if IS_INSTALLED[name]():
        return
    reason = f"{name} is not installed: make test-runtimes installs it, and runs this"
    if _required:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def run_in_vllm(script: Path, result: Path, job: str) -> None:
    """Let vLLM's Python run a script, without the paths and settings of ours. job: the standard input"""
    command = [str(VLLM / "bin" / "python"), "-I", str(script), str(result)]
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
