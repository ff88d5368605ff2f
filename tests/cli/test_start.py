"""What happens before a command is known to the command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pqweights_cli import __main__ as start
from pqweights_cli.main import app
from typer.main import get_command

# Runs a command line to its end, and prints with how many threads the BLAS of numpy multiplies then.
SCRIPT = """
import ctypes, os, sys
from pqweights_cli.__main__ import main
sys.argv = ["pqweights", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
import numpy
paths = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
library = ctypes.CDLL(paths.pop())
names = [prefix + "openblas_get_num_threads" + suffix for prefix in ("", "scipy_") for suffix in ("", "64_")]
print("LEFT", os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY"))
print("THREADS", next(getattr(library, name)() for name in names if hasattr(library, name)))
"""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@pytest.mark.parametrize(
    ("line", "given", "threads", "left", "waiting"),
    [
        # What multiplies matrices has all threads, and other commands start none.
        ("eval", None, CORES, "None", "passive"),
        ("generate", None, CORES, "None", "passive"),
        ("inspect", None, 1, "1", "passive"),
        ("quantize", None, 1, "1", "passive"),
        # One thread of numpy in each of its own, and all of torch, which reads the environment.
        ("quantize --awq self", None, 1, "None", "passive"),
        ("export --calibrate=self", None, 1, "None", "passive"),
        # A number in the environment stands.
        ("plan", CORES, CORES, str(CORES), "passive"),
    ],
)
def test_threads_of_commands_and_how_they_wait(
    line: str, given: int | None, threads: int, left: str, waiting: str
) -> None:
    ours = {"OMP_WAIT_POLICY"} | {name for name in os.environ if name.endswith("_NUM_THREADS")}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": str(given)}
    run = [sys.executable, "-c", SCRIPT, *line.split(), "--help"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.stdout.split("LEFT ")[1].split() == [left, waiting, "THREADS", str(threads)], done.stderr


def test_commands_that_multiply_matrices_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {*start.WITH_BLAS} < {*commands}
    flags = {flag for name in ("quantize", "export") for param in commands[name].params for flag in param.opts}
    assert {*start.LEARNING} < flags
