"""Prints what an installed package requires, as lines of a requirements file, without some packages.

    PYTHON tools/requirements.py PACKAGE [WITHOUT ...]

vLLM's build for CPUs insists on torch==VERSION+cpu, which PyTorch's own index alone has; that version from PyPI, which
brings CUDA, does as well.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys


def main(package: str, without: list[str]) -> None:
    """Print the requirements."""
    for line in importlib.metadata.requires(package) or ():
        match = re.match(r"[\w.-]+", line)
        if match and match[0].lower() not in without and "extra ==" not in line:
            print(line)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
