"""The command line as `python -m pqweights_cli`, and as the console script: interrupts are answered from the start."""

from __future__ import annotations

import os
import sys

from . import interrupts

# The commands that multiply matrices in one thread. For all others the BLAS of numpy gets one thread: by default it
# starts one for each core when it is loaded, which takes a fifth of the start-up.
WITH_BLAS = ("eval", "generate")
# What is learned of a model multiplies matrices of numpy in as many threads of its own as there are cores, which more
# of each would only slow down, and runs the model in torch, whose BLAS may be the same library with all threads.
LEARNING = ("--awq", "--calibrate")
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
# Threads of torch spin between two products by default. On cores that other programs use as well, a calibration then
# took four times the processor's time, and a reply up to ten times as long: the thread that has work waits for those
# that spin. On free cores, sleeping costs a small model 30% of its rate.
WAITING = "OMP_WAIT_POLICY"


def main() -> None:
    """Run the command line."""
    interrupts.answer_at_once()
    words = sys.argv[1:]
    os.environ.setdefault(WAITING, "passive")
    if BLAS_THREADS not in os.environ and not any(word in WITH_BLAS for word in words):
        os.environ[BLAS_THREADS] = "1"
        if any(word.partition("=")[0] in LEARNING for word in words):
            import numpy  # noqa: F401  # reads the variable as it is loaded

            del os.environ[BLAS_THREADS]
    from .main import main as run

    run()


if __name__ == "__main__":
    main()
