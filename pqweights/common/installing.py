"""The commands that install optional packages.

They name the packages themselves and not extras of pqweights, which mean something to pip only where pqweights comes
from an index.
"""

from __future__ import annotations

import sys

_MLX = "mlx[cpu]>=0.32" if sys.platform == "linux" else "mlx>=0.32"
_TRANSFORMERS = ("accelerate>=1.10", "torch>=2.6", "transformers>=5.23")

# The extras of pyproject.toml that messages name, and what each installs.
PACKAGES = {
    "torch": ("torch>=2.6",),
    "transformers": _TRANSFORMERS,
    "torchao": ("torch>=2.6", "torchao>=0.18"),
    "eval": (*_TRANSFORMERS, "datasets>=4.0"),
    "mlx": (_MLX, "mlx-lm>=0.32"),
    "gguf": ("gguf>=0.18",),
    "llama": ("llama-cpp-python>=0.3.16",),
    "ray": ("ray>=2.50",),
    "s3": ("s3fs>=2025.3",),
    "gcs": ("gcsfs>=2025.3",),
    "vllm": ("compressed-tensors>=0.20", "torch>=2.6", "transformers>=5.0"),
}


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an extra (a key of PACKAGES)."""
    return " ".join(["pip install", *(f"'{package}'" for package in PACKAGES[extra])])
