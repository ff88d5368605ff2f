"""Python code in processes forked from one that has imported the large packages: a fresh one takes seconds to start.

The code still imports what it uses, and pqweights is not imported before it. For code whose subject is the order of
imports, or what a package says when it is imported, start a fresh process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

LARGE_PACKAGES = ["torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.pipelines", "mlx_lm"]


def run_snippet(code: str, cwd: Path, log: Path) -> int:
    """Run code in the folder `cwd` and return the exit code; what it prints goes to the file `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LARGE_PACKAGES)
    process = context.Process(target=_execute, args=(code, str(cwd), str(log)))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _execute(code: str, cwd: str, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(cwd)
    assert "pqweights" not in sys.modules
    exec(compile(code, "<snippet>", "exec"), {"__name__": "__main__"})
