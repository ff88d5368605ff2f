"""What messages advise: the known name that is nearest to an unknown one, and the command that installs a package."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

# The least share of common characters (difflib's ratio) of two names that are near. Below it, two names of equal length
# share fewer than three in five characters.
LEAST_RATIO = 0.6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to another one, upper and lower case alike; None if none is near."""
    by_lower: dict[str, str] = {}
    for candidate in known:
        by_lower.setdefault(candidate.lower(), candidate)
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=LEAST_RATIO)
    return by_lower[near[0]] if near else None


def instead(name: str, known: Iterable[str]) -> str:
    """Return what was expected in place of a name: "the nearest is 'bits'; expected name, bits, rules"."""
    names = list(known)
    near = nearest(name, names)
    expected = f"expected {', '.join(names)}"
    return expected if near is None else f"the nearest is {near!r}; {expected}"


_MLX = "mlx[cpu]>=0.32" if sys.platform == "linux" else "mlx>=0.32"
_TRANSFORMERS = ("accelerate>=1.10", "torch>=2.6", "transformers>=5.23")

# The extras of pyproject.toml that messages name, and what each installs. The commands name the packages and not the
# extras, which mean something to pip only where pqweights comes from an index.
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
