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
    "exports evaluation generation sizes calibration",
)
CASES: list[Case] = [
    case for subject in " ".join(SUBJECTS).split() for case in importlib.import_module(f"hostile.{subject}").CASES
]
# Cases whose commands are wrong in themselves, whatever the input: these exit with 2, all others with 1.
WRONG_IN_THEMSELVES = """
recipe-name-unknown recipe-name-far-from-all recipe-name-of-a-width recipe-name-of-a-file set-malformed
bits-out-of-range bits-nan bits-infinite bits-no-number bits-a-fraction bits-too-few trellis-bits-too-few
trellis-bits-too-many trellis-bits-nan effort-unknown effort-no-number effort-of-a-codec-without size-no-size
size-zero threads-zero target-unknown ray-no-address ray-no-port ray-port-too-large ray-client address-unknown-scheme
address-without-bucket address-with-credentials output-on-the-hub output-unknown-scheme group-size-that-no-target-has
bits-that-no-target-has option-of-another-target qparams-best-of-rows format-unknown format-of-other-bits
rounding-without-or-beside-what-it-needs gguf-type-misspelled gguf-options-that-exclude-each-other target-misspelled
eval-text-twice generate-temperature-negative generate-temperature-nan generate-temperature-no-number
generate-max-tokens-zero generate-seed-negative generate-seed-too-large generate-revision-of-a-folder
generate-kv-cache-misspelled
generate-kv-cache-heads-of-no-multiple fit-size-no-size fit-size-zero fit-size-beyond-all-files fit-bits-no-number
fit-bits-and-target fit-both-targets fit-bits-nan fit-bits-negative fit-recipe-with-bits memory-zero memory-no-size
memory-context-negative memory-context-no-number memory-context-zero memory-context-beyond-numbers
memory-context-alone memory-runtime-unknown memory-runtime-alone awq-and-calibrate awq-of-few-tokens awq-tokens-alone
calibrate-beside-other-options export-bits-and-type
"""
USAGE_ERRORS = frozenset(WRONG_IN_THEMSELVES.split())
