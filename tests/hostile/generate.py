"""Hostile and broken inputs, one folder per case: how to build it, which commands get it, and what each must print.

The cases of each subject are in a module of this folder. tests/cli/test_hostile.py runs each command inside the folder
of its case: the answer must be one line that names the culprit, and nothing in the folder may change.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from hostile.case import Case

SUBJECTS = (
    "headers sources gguf foreign pickles recipes outputs masters columns native",
    "exports folds evaluation generation sizes calibration",
)
CASES: list[Case] = [
    case for subject in " ".join(SUBJECTS).split() for case in importlib.import_module(f"hostile.{subject}").CASES
]
