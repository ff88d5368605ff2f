"""Hostile and broken inputs, one folder per case: how to build it, which commands get it, and what each must print.

The cases of each subject are in a module of this folder. tests/cli/test_hostile.py runs each command inside the folder
of its case: the answer must be one line that names the culprit, and nothing in the folder may change.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from hostile.calibration import CALIBRATE_CASES
from hostile.elsewhere import ELSEWHERE_CASES
from hostile.evaluation import EVAL_CASES
from hostile.exports import EXPORT_CASES
from hostile.folds import FOLD_CASES
from hostile.foreign import FOREIGN_CASES, PACKED_CASES
from hostile.generation import GENERATE_CASES
from hostile.gguf import GGUF_CASES
from hostile.headers import HEADER_CASES, WEIGHT_CASES
from hostile.indexes import INDEX_CASES
from hostile.masters import MASTER_CASES
from hostile.outputs import OUTPUT_CASES
from hostile.pickles import PICKLE_CASES
from hostile.recipes import RECIPE_CASES
from hostile.sizes import FIT_CASES
from hostile.sources import SOURCE_CASES

CASES = [
    *WEIGHT_CASES,
    *HEADER_CASES,
    *INDEX_CASES,
    *SOURCE_CASES,
    *GGUF_CASES,
    *FOREIGN_CASES,
    *PACKED_CASES,
    *PICKLE_CASES,
    *RECIPE_CASES,
    *OUTPUT_CASES,
    *MASTER_CASES,
    *EXPORT_CASES,
    *FOLD_CASES,
    *EVAL_CASES,
    *GENERATE_CASES,
    *CALIBRATE_CASES,
    *FIT_CASES,
    *ELSEWHERE_CASES,
]
