"""Hostile and broken inputs, one folder per case: how to build it, which commands get it, and what each must print.

The cases of each subject are in a module of this folder. tests/cli/test_hostile.py runs each command inside the folder
of its case: the answer must be one line that names the culprit, and nothing in the folder may change.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from hostile import calibration, evaluation, exports, folds, foreign, generation, gguf, headers, masters, outputs, pickles, recipes, sizes, sources

CASES = [
    *headers.WEIGHT_CASES,
    *headers.HEADER_CASES,
    *headers.INDEX_CASES,
    *sources.SOURCE_CASES,
    *gguf.GGUF_CASES,
    *foreign.FOREIGN_CASES,
    *foreign.PACKED_CASES,
    *pickles.PICKLE_CASES,
    *recipes.RECIPE_CASES,
    *outputs.OUTPUT_CASES,
    *masters.MASTER_CASES,
    *exports.EXPORT_CASES,
    *folds.FOLD_CASES,
    *evaluation.EVAL_CASES,
    *generation.GENERATE_CASES,
    *calibration.CALIBRATE_CASES,
    *sizes.FIT_CASES,
    *outputs.ELSEWHERE_CASES,
]
