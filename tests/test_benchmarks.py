"""Every benchmark still finds what it imports, and what it wraps by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from phases import PHASES
for module, owner, functions in PHASES.values():
    holder = importlib.import_module(module)
    for function in functions:
        getattr(getattr(holder, owner) if owner else holder, function)
"""


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "phases" in names
    path = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests" / "support")]
    code = f"import sys; sys.path[:0] = {path!r}\n{IMPORT_ALL}"
    subprocess.run([sys.executable, "-c", code, *names], check=True, timeout=300, cwd=BENCHMARKS)
