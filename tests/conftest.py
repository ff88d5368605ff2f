"""Where no GPU can be used, the GPU kernels run all the same: interpreted, on the CPU. Triton looks when it is imported."""

from __future__ import annotations

import os

from pqweights.kernels.devices import INTERPRETER, _why_no_gpu

if _why_no_gpu() is not None:
    os.environ.setdefault(INTERPRETER, "1")
