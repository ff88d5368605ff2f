"""The command line as `python -m pqweights_cli`, and as the console script: interrupts are answered from the start."""

from __future__ import annotations

import os
import sys

from . import interrupts

# These commands multiply no matrices. By default the BLAS of numpy starts a thread for each core when it is loaded,
# which takes a fifth of their start-up.
WITHOUT_BLAS = ("plan", "quantize", "export", "verify", "inspect", "push", "card")


def main() -> None:
    """Run the command line."""
    interrupts.answer_at_once()
    if sys.argv[1:2] and sys.argv[1] in WITHOUT_BLAS:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from .main import main as run

    run()


if __name__ == "__main__":
    main()
