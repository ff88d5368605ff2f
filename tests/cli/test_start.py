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
if not paths:
    sys.exit(77)
library = ctypes.CDLL(paths.pop())
names = [prefix + "openblas_get_num_threads" + suffix for prefix in ("", "scipy_") for suffix in ("", "64_")]
print("LEFT", os.environ.get("OPENBLAS_NUM_THREADS"))
print("THREADS", next(getattr(library, name)() for name in names if hasattr(library, name)))
"""
NO_OPENBLAS = 77
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def blas_threads(*line: str, **environment: str) -> int:
    """Return the number of threads with which numpy multiplies matrices in a process of the command line."""
    return found_in_process(*line, **environment)[0]


def found_in_process(*line: str, **environment: str) -> tuple[int, str]:
    """Return that number, and what the environment says of it, which other libraries read."""
    usual = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    run = [sys.executable, "-c", SCRIPT, *line, "--help"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=usual | environment, check=False)
    if done.returncode == NO_OPENBLAS:
        pytest.skip("numpy has another BLAS than OpenBLAS here")
    assert done.returncode == 0, done.stderr
    left, threads = done.stdout.split("LEFT ")[1].split("\nTHREADS ")
    return int(threads), left


@pytest.mark.parametrize("line", ["eval", "generate", "sensitivity"])
def test_commands_that_multiply_matrices_have_all_threads(line: str) -> None:
    assert blas_threads(*line.split()) == CORES


@pytest.mark.parametrize("line", ["quantize", "export", "inspect", ""])
def test_other_commands_start_no_threads_for_matrices(line: str) -> None:
    assert blas_threads(*line.split()) == 1


def test_calibrate_has_one_thread_of_numpy_in_each_of_its_own_and_all_of_torch() -> None:
    assert found_in_process("calibrate") == (1, "None")
    assert found_in_process("calibrate", OPENBLAS_NUM_THREADS="1") == (1, "1")


def test_number_of_threads_in_the_environment_stands() -> None:
    assert blas_threads("eval", OPENBLAS_NUM_THREADS="1") == 1
    assert blas_threads("plan", OPENBLAS_NUM_THREADS=str(CORES)) == CORES


def test_commands_that_multiply_matrices_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {*start.WITH_BLAS, start.WITH_OWN_THREADS} < {*commands}
